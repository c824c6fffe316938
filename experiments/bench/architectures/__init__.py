"""Every architecture of transformers, sharded by torch's FSDP and by ours: are all numbers equal bit for bit?"""

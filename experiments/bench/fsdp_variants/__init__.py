"""torch's own ways to shard, recorded and held against one another: FSDP1, FSDP2, DDP, one device, and ours beside them."""

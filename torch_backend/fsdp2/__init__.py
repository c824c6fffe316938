"""Parts of the FSDP2 API alone: arguments, `FSDPModule` and its methods, and how `fully_shard` builds units."""

"""Parts of the FSDP2 API alone: `FSDPModule` and its methods, and how `fully_shard` builds units."""

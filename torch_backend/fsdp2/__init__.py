"""What only the FSDP2 API has: `FSDPModule`, and how `fully_shard` builds units."""

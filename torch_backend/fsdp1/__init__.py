"""What only the FSDP1 API has: the constructor's arguments, `summon_full_params`, and optimizer state methods."""

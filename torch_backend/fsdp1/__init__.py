"""Parts of the FSDP1 API alone: constructor arguments, wrapping by policy, `summon_full_params`, optimizer state methods."""

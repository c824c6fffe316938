"""Parts of the FSDP1 API alone: constructor arguments, `summon_full_params`, and the optimizer state methods."""

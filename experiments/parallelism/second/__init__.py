"""A second set of parallel programs: interleaved pipelines, context parallelism, dispatched experts, Megatron's layers."""

"""The ranks that parameters are sharded and replicated over: process groups, device meshes, tensor parallelism (R07, R10)."""

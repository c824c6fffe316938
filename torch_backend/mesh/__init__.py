"""Which ranks a parameter is sharded and replicated over: process groups, device meshes, and tensor parallelism (R07, R10)."""

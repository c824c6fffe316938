"""`python -m experiments spec`: every rule of sharding against what torch itself builds, case by case.

Every rank of small worlds is built in one process: torch's own constructors read a process group's rank and size, and a fake
group answers those. This folder and the benchmarks are the only ones that import torch's FSDP.
"""

"""Scripts that train with torch's FSDP, run with torch_backend's instead: `python -m experiments fsdp-scripts`."""

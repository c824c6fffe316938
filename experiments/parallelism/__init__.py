"""Correct programs of parallel training and faults in them, with the expected answers: `python -m experiments parallelism`."""

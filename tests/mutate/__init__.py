"""Small faults put into the core one at a time, to see whether a test goes red: `python -m tests.mutate`."""

"""Measures goldens: which faults one of 200 kB detects, and whether a harmless change is called a bug."""

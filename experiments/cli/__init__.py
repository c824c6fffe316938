"""The command line of `python -m experiments`: commands and their options, and how they print and end."""

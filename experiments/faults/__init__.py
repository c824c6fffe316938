"""Whether known faults are found: `faults` puts each into a run, and `clean-pairs` counts false alarms.

The faults are in `catalogue`, which the runs of `experiments.parity` import: they put a fault in by its name.
"""

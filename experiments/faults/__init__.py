"""Whether known faults are found: `crossframe faults` puts each into a run, `crossframe clean-pairs` counts false alarms.

The faults are in `catalogue`, which the runs of `experiments.parity` import: they put a fault in by its name.
"""

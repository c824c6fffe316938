"""Cases on which nobody tuned the verdict: 40 faults with expected answers and 200 clean pairs, to be run once."""

"""The compared quantities in causal order, their differences and their bounds."""

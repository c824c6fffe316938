"""Perturbed runs of a recording: how far rounding takes them apart, and what differs by more, or in one direction."""

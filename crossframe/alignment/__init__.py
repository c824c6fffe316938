"""Alignment: which parameter of one model is which parameter of another, derived from their values alone."""

from crossframe.alignment.align import GRADIENTS, MODULES, VALUES, Alignment, Undecided, align

__all__ = ["GRADIENTS", "MODULES", "VALUES", "Alignment", "Undecided", "align"]

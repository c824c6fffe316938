"""Alignment: which parameter of one model is which parameter of another, and which module which, derived from their values."""

from crossframe.alignment.align import Alignment, Undecided, align, align_either_way
from crossframe.alignment.complete import complete, unlike_other_layers
from crossframe.alignment.matching import GRADIENTS, MODULES, NAMES, SAMPLES, SIMILAR, USE, VALUES
from crossframe.alignment.modules import match_activations

__all__ = [
    "GRADIENTS",
    "MODULES",
    "NAMES",
    "SAMPLES",
    "SIMILAR",
    "USE",
    "VALUES",
    "Alignment",
    "Undecided",
    "align",
    "align_either_way",
    "complete",
    "match_activations",
    "unlike_other_layers",
]

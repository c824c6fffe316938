"""Inspects one recording: NaN and infinities, growth, ranks that disagree, and steps that depart from the optimizer's rule."""

from crossframe.inspection.inspect import Inspection, inspect

__all__ = ["Inspection", "inspect"]

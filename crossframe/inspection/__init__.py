"""The examination of one recording: what is not finite, what grows, where ranks disagree, where the optimizer leaves its rule."""

from crossframe.inspection.inspect import Inspection, inspect

__all__ = ["Inspection", "inspect"]

"""Layouts and plans as text and as SVG: who holds what, padding included, and what a step does when.

The functions are pure and return strings. An SVG needs nothing from outside it, suits light and dark pages, and shows each
range and time as a tooltip.
"""

from crossframe.draw.bars import layout_svg
from crossframe.draw.lanes import plan_svg
from crossframe.draw.shards import Mark
from crossframe.draw.table import layout_text
from crossframe.draw.timeline import events_text, plan_text

__all__ = ["Mark", "events_text", "layout_svg", "layout_text", "plan_svg", "plan_text"]

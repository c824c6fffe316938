"""Draws layouts and plans as text and as SVG: the elements and padding on each rank, and the timeline of a step.

The functions are pure and return strings. An SVG has no external references, works on light and dark pages, and shows ranges and
times as tooltips.
"""

from crossframe.draw.bars import layout_svg
from crossframe.draw.lanes import plan_svg
from crossframe.draw.shards import Mark
from crossframe.draw.table import layout_text
from crossframe.draw.timeline import events_text, plan_text

__all__ = ["Mark", "events_text", "layout_svg", "layout_text", "plan_svg", "plan_text"]

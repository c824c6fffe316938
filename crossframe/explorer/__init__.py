"""The layout explorer: one offline page on which a reader changes the world size, layout, strategy and dtype of a model.

The core computes every combination beforehand (`explorer_data`); the page (`explorer_page`) selects and draws.
"""

from crossframe.explorer.data import DtypeChoice, dtype_choices, explorer_data, world_sizes
from crossframe.explorer.page import explorer_page

__all__ = ["DtypeChoice", "dtype_choices", "explorer_data", "explorer_page", "world_sizes"]

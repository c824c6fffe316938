"""The training step: the gather whose backward reduces, what backward gathers again, the two modes of a step, clipping."""

"""Checkpoints of sharded models, which any backend reads at any world size and in any layout.

    PATH/index.json               metadata; the layouts of each section; size and checksum of each file; its own checksum
    PATH/rank00000.safetensors    the shards of rank 0 of a shard group: one line for each bucket, with padding 0
    PATH/rank00001.safetensors    ...

The section "model" has the parameters by canonical name. The section "state" has the optimizer state, by the names of the entry
in torch and of the parameter: "exp_avg:head.weight". Values that belong to no parameter, such as Adam's "step", are in the file
of rank 0. A reader requests the lines of its own layout and gets them by copies of ranges (`crossframe.layout.overlay`),
without full parameters. It verifies the whole content of each file that it needs.
"""

from crossframe.checkpoint.async_saver import AsyncSaver
from crossframe.checkpoint.index import FORMAT, INDEX, MODEL, STATE, STEP, STEP_DTYPE, CheckpointError, state_layout
from crossframe.checkpoint.reading import FORMATS, LISTED, Saved, read
from crossframe.checkpoint.whole import whole_tensors
from crossframe.checkpoint.writing import (
    Contents,
    Processes,
    abandon,
    begin,
    check_about,
    finish,
    flush,
    remove,
    remove_unfinished,
    save,
    write_rank,
)

__all__ = [
    "FORMAT",
    "FORMATS",
    "INDEX",
    "LISTED",
    "MODEL",
    "STATE",
    "STEP",
    "STEP_DTYPE",
    "AsyncSaver",
    "CheckpointError",
    "Contents",
    "Processes",
    "Saved",
    "abandon",
    "begin",
    "check_about",
    "finish",
    "flush",
    "read",
    "remove",
    "remove_unfinished",
    "save",
    "state_layout",
    "whole_tensors",
    "write_rank",
]

"""Small checkpoints, whole or as their writers leave them before the last step."""

import threading
from contextlib import contextmanager

import numpy as np

from crossframe.checkpoint import MODEL, Contents, begin, write_rank, writing
from crossframe.errors import AgreementError
from crossframe.layout import FlatLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec

PARAMS = (ParamSpec("w", (5, 3), "bfloat16"), ParamSpec("b", (7,), "bfloat16", aliases=("tied",)))


def made(kind, world_size):
    layout = FlatLayout(PARAMS, world_size, True, None) if kind == "flat" else kind(PARAMS, world_size)
    return Sharding((("", layout),), MeshSpec(world_size))


def line_of(sharding, rank, padding):
    """Element k of parameter i is 20 * i + k, which bfloat16 holds."""
    ((_, layout),) = sharding.units
    line = np.full(layout.padded_shard_numel, padding, np.float32)
    for piece in layout.pieces(rank):
        i = [spec.name for spec in PARAMS].index(piece.name)
        line[piece.shard_start : piece.shard_stop] = 20 * i + np.arange(piece.param_start, piece.param_stop)
    return line.astype("bfloat16")


def written(path, sharding, values=None, bump=0):
    """The token of a save that is not finished yet; `bump` is added to every element."""
    token = begin(path)
    for rank in range(sharding.mesh.shard):
        lines = {MODEL: [line_of(sharding, rank, padding=42) + np.array(bump, "bfloat16")]}
        write_rank(path, token, rank, {MODEL: sharding}, lines, values if rank == 0 else None)
    return token


def contents_of(sharding, process):
    """What a process has of a checkpoint, if there is one for each rank."""
    lines = lambda place: {MODEL: [line_of(sharding, place, padding=42)]}  # noqa: E731
    return Contents({MODEL: sharding}, {}, [process.rank], lines)


class ThreadProcess:
    """One of several processes, each a thread of this one."""

    def __init__(self, rank: int, barrier: threading.Barrier, said: dict) -> None:
        self.rank, self.is_first, self._barrier, self._said = rank, rank == 0, barrier, said

    def _exchange(self, value):
        self._said[self.rank] = value
        self._barrier.wait(10)
        everyone = dict(self._said)
        self._barrier.wait(10)
        return everyone

    def together(self, title, act):
        error = None
        try:
            done = act()
        except Exception as caught:
            error = caught
        everyone = self._exchange(error)
        if error is not None:
            raise error
        if failed := [str(each) for each in everyone.values() if each is not None]:
            raise AgreementError(f"{title}: {failed}")
        return done

    def from_first(self, value):
        return self._exchange(value)[0]


@contextmanager
def writing_waits():
    """Files of checkpoints are written after the body."""
    gate, write = threading.Event(), writing.write_tensors
    writing.write_tensors = lambda *args: gate.wait(10) and write(*args)
    try:
        yield
    finally:
        gate.set()
        writing.write_tensors = write

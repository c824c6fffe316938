"""Whether a unit with its shards is what the simple model says, bit for bit."""

from typing import Any

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.layout import Layout, post_forward, post_forward_group
from crossframe.lifecycle import Exposure, Freshness, Residency
from crossframe.reference.live_unit import LiveUnit
from experiments.spec.histories.simple import Full, Simple

SHOWS = {Exposure.SHARDED: "shards", Exposure.FULL: "full", Exposure.SUMMONED: "summoned"}
HOLDS = {Residency.SHARD: "shard", Residency.RESHARD_GROUP: "part", Residency.FULL: "full"}


class Disagreement(AssertionError):
    """The world is not what the model says."""


def check_memory(unit: LiveUnit, model: Simple, rank: int, padding: bytes) -> None:
    """What a rank's memory holds and its module shows; `padding` is what its shard was padded with at the start."""
    state, bucket, here = unit.states[rank], unit.buckets[0], f"unit {unit.name!r}, rank {rank}"
    replica, index = model.where(rank)
    holds = model.holds(rank)
    told = (HOLDS[state.residency], state.freshness, SHOWS[state.exposure], int(state.activity))
    equal((holds, Freshness(model.stale), model.shows, 0), told, f"{here}: state")
    equal((holds == "full", holds == "part"), (bucket.full[rank] is not None, bucket.parts[rank] is not None),
           f"{here}: memory")  # fmt: skip
    shard = bucket.unit.shards[rank]
    whole = ((bucket.layout.padded_shard_numel,), numpy_dtype(model.precision.stored))
    equal(whole, (shard.shape, shard.dtype), f"{here}: its shard")
    pieces = _pieces(bucket.layout, index, model.authoritative[replica])
    same(pieces, bucket.unit.pieces(shard, rank), model.precision.stored, f"{here}: its shard")
    if padding_of(bucket.layout, shard, index) != padding:
        raise Disagreement(f"{here}: padding of the shard was written")
    if holds == "full":
        dtype = model.precision.stored if model.shows == "summoned" else model.precision.gathered
        same(model.full(rank), bucket.views(rank), dtype, f"{here}: its full parameters")
    part = bucket.parts[rank]
    if part is not None:
        smaller = post_forward(bucket.layout, int(model.group))
        equal((smaller.padded_shard_numel,), part.shape, f"{here}: its part")
        place = post_forward_group(model.mesh, rank, int(model.group)).index(rank)
        kept = {piece.name: part[piece.shard_start : piece.shard_stop] for piece in smaller.pieces(place)}
        same(_pieces(smaller, place, model.copy[rank]), kept, model.precision.gathered, f"{here}: its part")
    shown = model.full(rank) if model.visible(rank) else pieces
    dtype = model.precision.gathered if model.shows == "full" else model.precision.stored
    same(shown, unit.shown(rank), dtype, f"{here}: what it is shown")


def check_grads(unit: LiveUnit, model: Simple, rank: int) -> None:
    """A rank's gradients: those that wait, the reduced ones, and those that its user is shown."""
    bucket, here = unit.buckets[0], f"unit {unit.name!r}, rank {rank}"
    replica, index = model.where(rank)
    accumulated = model.precision.accumulated(model.api)
    same(model.waiting[rank], bucket.grads[rank], accumulated, f"{here}: gradients that wait")
    grad = bucket.sharded_grads[rank]
    equal(
        (model.reached[rank], bool(model.reached[rank])),
        (bucket.reached[rank], grad is not None),
        f"{here}: gradients",
    )
    if grad is not None:
        expected = _pieces(bucket.layout, index, model.mean[replica])
        same(expected, bucket.unit.pieces(grad, rank), model.precision.kept, f"{here}: its gradient's shard")
    same(model.shown[rank] or {}, unit.grads_shown(rank), model.precision.kept, f"{here}: the gradients it is shown")


def _pieces(layout: Layout, index: int, full: Full) -> Full:
    """What a shard holds of full arrays, as flat arrays."""
    return {
        piece.name: np.concatenate([full[piece.name].reshape(-1)[r.param_start : r.param_start + r.numel] for r in piece.runs()])
        for piece in layout.pieces(index)
    }  # fmt: skip


def padding_of(layout: Layout, shard: np.ndarray, index: int) -> bytes:
    """All padding of a shard."""
    return b"".join(shard[run.start : run.stop].tobytes() for run in layout.padding(index))


def equal(expected: Any, found: Any, what: str) -> None:
    if expected != found:
        raise Disagreement(f"{what}: expected {expected}, found {found}")


def same(expected: Full, found: Any, dtype: str, what: str) -> None:
    """Arrays of the same names, bit for bit, in a dtype."""
    if list(expected) != list(found) and set(expected) != set(found):
        raise Disagreement(f"{what}: expected {list(expected)}, found {list(found)}")
    for name, value in expected.items():
        wanted = value.astype(numpy_dtype(dtype))
        if (
            wanted.shape != found[name].shape
            or wanted.dtype != found[name].dtype
            or wanted.tobytes() != found[name].tobytes()
        ):
            raise Disagreement(
                f"{what}, {name!r}: expected {wanted.tolist()} {dtype}, found {found[name].tolist()} {found[name].dtype}"
            )

"""Whether all ranks were given the same units, asked once, before the first collective.

Through the store of the process group and with a timeout, not by a collective: ranks that disagree would hang in one.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch.distributed as dist

from crossframe.errors import AgreementError
from torch_backend.unit import Unit, named_below

# How often each group has agreed before: part of the keys, so that no round reads the keys of another.
_rounds: dict[tuple[int, ...], "count[int]"] = {}


def describe_units(named_units: Sequence[tuple[str, Unit]], face: str) -> list[str]:
    """What must be the same everywhere, one line a unit and a parameter."""
    lines = [f"interface {face} with {len(named_units)} units"]
    for name, unit in named_units:
        after = "resharded after forward" if unit.reshard_after_forward else "kept after forward"
        lines.append(f"unit {name!r} over {unit.communicator.size} ranks, {after}")
        for bucket in unit.buckets:
            for spec in named_below(name, bucket.layout.params):
                lines.append(
                    f"parameter {spec.name!r} of shape {list(spec.shape)}, {spec.dtype}, "
                    f"{'trained' if spec.requires_grad else 'frozen'}, in unit {name!r} ({bucket.layout.kind})"
                )
    return lines


def check_agreement(named_units: Sequence[tuple[str, Unit]], face: str) -> None:
    """Raise AgreementError on every rank, naming the first difference, unless all ranks of the group describe the same.

    Rank 0 of the root's group compares the descriptions' hashes and publishes the verdict, so that a rank waits for two keys
    whatever the number of ranks. A rank that does not come is waited for as long as the process group's timeout says.
    """
    communicator = named_units[0][1].communicator
    if communicator.size == 1 or dist.get_backend(communicator.group) == "fake":
        return
    store = dist.distributed_c10d._get_default_store()
    turn = next(_rounds.setdefault(communicator.ranks, count()))
    prefix = f"crossframe/{hashlib.sha256(repr(communicator.ranks).encode()).hexdigest()[:16]}/{turn}"
    lines = describe_units(named_units, face)
    text = json.dumps(lines)
    store.set(f"{prefix}/text/{communicator.rank}", text)
    store.set(f"{prefix}/hash/{communicator.rank}", hashlib.sha256(text.encode()).hexdigest())
    try:
        if communicator.rank == 0:
            store.set(f"{prefix}/verdict", _judge(store, prefix, communicator.size, lines, communicator.ranks))
        store.wait([f"{prefix}/verdict"])
        verdict = store.get(f"{prefix}/verdict").decode()
    except dist.DistStoreError as error:
        raise AgreementError(
            f"rank {dist.get_rank()}: the ranks {list(communicator.ranks)} did not all describe their units within the "
            "timeout of the process group; one of them failed earlier, or never ran the root module: look at its output"
        ) from error
    if verdict:
        raise AgreementError(f"rank {dist.get_rank()}: {verdict}")


def _judge(store: Any, prefix: str, size: int, lines: list[str], ranks: Sequence[int]) -> str:
    """Empty if all agree; otherwise the first rank that differs, and where."""
    keys = [f"{prefix}/hash/{rank}" for rank in range(size)]
    store.wait(keys)
    hashes = [store.get(key) for key in keys]
    for other, digest in enumerate(hashes):
        if digest != hashes[0]:
            theirs = json.loads(store.get(f"{prefix}/text/{other}"))
            width = max(len(lines), len(theirs))
            pad = ["nothing more"] * width
            first = next(
                (a, b) for a, b in zip((lines + pad)[:width], (theirs + pad)[:width], strict=True) if a != b
            )  # fmt: skip
            return (
                f"the ranks do not shard the same model: rank {ranks[0]} has {first[0]}, rank {ranks[other]} has "
                f"{first[1]}; build the same module with the same settings on every rank"
            )
    return ""

"""Pipeline parallelism: the stages of a pipeline, each with other modules of one model, are recorded as one rank.

[Note: stages] Each stage records its own parameters and activations. When a step ends, the later stages send theirs to the first
one, which writes them with its own, with the batch that it was given and the loss of the last stage. A rank may have several
stages, which are recorded one by one. Gradients are those that the optimizers get: what a schedule does to them in between, such
as dividing by the number of microbatches, is not seen, so local gradients are not recorded.

A parameter of a later stage that has the bits of an earlier one is the same parameter (tied weights, as of the embedding and the
head). It is recorded under the name of the earlier stage, and the values of the later one are compared. Layers that are repeated
may begin with the same bits without being tied, as those of stages that draw from one seed: parameters of modules of one class
whose names differ in numbers at most. If stages have other parameters with one name, as those of several `nn.Sequential` do, all
names begin with the number of the stage.

The stages of a pipeline wait for one another in forward. So they begin to record together before, when the recorder is entered.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import walk_stack
from typing import Any

import numpy as np
import torch.distributed as dist

from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.recording import Manifest, RecordingWriter, SilentWriter, Sketch
from crossframe.recording.event_format import INPUT, OUTPUT, PARAMETERS, REDUCE, STATE, UPDATE
from torch_backend.ranks._collectives import Communicator, axis_name, default_process_group

Units = tuple[tuple[str, Layout], ...]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
Bits = tuple[tuple[int, ...], Any, str]
"""The shape of a parameter, a hash of the local values, or None if there are none, and the class of its module."""
_COMPARED = (PARAMETERS, REDUCE, STATE, UPDATE)


@dataclass(frozen=True)
class Copies:
    """Parameters that several stages have.

    Attributes:
        names: of each of this rank's stages, the names of the earlier stage by its own ones.
        ranks: by name of the earlier stage the ranks of this pipeline that have the later ones.
        axis: the mesh axis along which stages lie.
    """

    names: Sequence[Mapping[str, str]] = ()
    ranks: Mapping[str, Sequence[int]] = field(default_factory=dict)
    axis: str = ""


class Pipeline:
    """The stages of one pipeline, some on each rank of a group.

    Attributes:
        group: the process group.
        stages: the numbers of this rank's stages, in order.
        num_stages: of all ranks.
        replicas: the ranks with the same stages.
    """

    def __init__(self, group: dist.ProcessGroup, num_parts: int, stages: Sequence[int] | None) -> None:
        """All ranks call it.

        Args:
            num_parts: how many stages this rank has.
            stages: their numbers. None: the ranks take turns.

        Raises:
            UsageError: numbers that are not those of all stages, each once, from 0 on the first rank.
        """
        self.group, self._ranks = group, Communicator(group)
        given = range(self._ranks.rank, num_parts * self._ranks.size, self._ranks.size) if stages is None else stages
        self.stages = tuple(given)
        of_ranks = self._ranks.gather_objects((num_parts, self.stages))
        numbers = sorted(stage for _, own in of_ranks for stage in own)
        self.num_stages = len(numbers)
        is_right = all(len(own) == number and list(own) == sorted(own) for number, own in of_ranks)
        if not is_right or numbers != list(range(len(numbers))) or 0 not in of_ranks[0][1]:
            raise UsageError(
                f"Recorder: stages: expected a number for each module, in ascending order, of all ranks the numbers from 0 on, "
                f"each once, and 0 on the first rank, got {[own for _, own in of_ranks]}"
            )
        # By rank the ranks of its pipeline.
        self._pipelines = Communicator(default_process_group()).gather_objects(self._ranks.ranks)
        places = [ranks.index(rank) for rank, ranks in enumerate(self._pipelines)]
        by_place = [[rank for rank, each in enumerate(places) if each == place] for place in sorted({*places})]
        replicas, _ = dist.new_subgroups_by_enumeration(by_place)
        assert isinstance(replicas, dist.ProcessGroup)
        self.replicas = replicas

    @property
    def is_first(self) -> bool:
        """Whether this rank has the stage that is given the batch. It writes."""
        return 0 in self.stages

    @property
    def is_last(self) -> bool:
        """Whether this rank has the stage that computes the loss."""
        return self.num_stages - 1 in self.stages

    def is_of_model(self, stage: int, use: str) -> bool:
        """Whether the input or output of a stage is that of the model."""
        return (use == INPUT and stage == 0) or (use == OUTPUT and stage == self.num_stages - 1)

    def axes_of_others(self, every: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, list[int]]:
        """This rank's groups along the axes of other ranks of its pipeline.

        Args:
            every: by rank its groups; empty for ranks without any.
        """
        axes = next((every[rank] for rank in self._ranks.ranks if every[rank]), {})
        place = self._ranks.rank
        return {name: [self._pipelines[rank][place] for rank in ranks] for name, ranks in axes.items()}

    def copies(self, own: Sequence[Mapping[str, Bits]]) -> Copies:
        """Parameters of later stages that are those of earlier ones. Every rank calls it.

        Args:
            own: for each of this rank's stages, the bits of parameters that may be copies, by name.
        """
        every = self._ranks.gather_objects(dict(zip(self.stages, own, strict=True)))
        owners: dict[Any, list[tuple[int, str, str]]] = {}
        found: dict[tuple[int, str], tuple[int, str]] = {}
        for stage, named in sorted((each for of_rank in every for each in of_rank.items()), key=lambda each: each[0]):
            for name, (shape, values, kind) in named.items():
                same = owners.setdefault((shape, values), [])
                role = kind, _pattern(name)
                earlier = ((at, own) for at, own, other in same if at < stage and (other, _pattern(own)) != role)
                if (owner := next(earlier, None)) is not None:
                    found[stage, name] = owner
                same.append((stage, name, kind))
        # Ranks that have no elements of a parameter cannot tell.
        of_all = Communicator(default_process_group()).gather_objects({*found.items()})
        found = dict(sorted({*found.items()}.intersection(*of_all)))
        ranks: dict[str, list[int]] = {}
        for (stage, _), (_, name) in found.items():
            holder = next(rank for rank, of_rank in zip(self._ranks.ranks, every, strict=True) if stage in of_rank)
            ranks.setdefault(name, []).append(holder)
        names = [
            {name: found[stage, name][1] for name in named if (stage, name) in found}
            for stage, named in zip(self.stages, own, strict=True)
        ]
        return Copies(tuple(names), ranks, axis_name(self.group, "pp"))

    def share_names(self, own: Sequence[Iterable[str]]) -> bool:
        """Whether several stages have parameters with one name. Every rank calls it.

        Args:
            own: of each of this rank's stages the names of parameters that are no copies of those of earlier ones.
        """
        every = self._all_names(own)
        return len(every) > len({*every})

    def units(self, own: Sequence[Units], copies: Copies) -> Units:
        """The units of all stages, in order.

        Args:
            own: those of this rank's stages.
            copies: the parameters that count for their first stage only.
        """
        found: Units = ()
        owned: set[str] = set()
        every = self._ranks.gather_objects(list(zip(self.stages, own, strict=True)))
        for _, units in sorted((each for of_rank in every for each in of_rank), key=lambda each: each[0]):
            kept = [(unit, _without(layout, owned.intersection(copies.ranks))) for unit, layout in units]
            units = tuple((unit, layout) for unit, layout in kept if layout is not None)
            owned |= {spec.name for _, layout in units for spec in layout.params}
            found += units
        return found

    def of_first_stage(self, own: Any) -> Any:
        """The value of the rank with the first stage. Every rank calls it."""
        every = self._ranks.gather_objects((self.is_first, own))
        return next(each for is_first, each in every if is_first)

    def left_out(self, own: Sequence[Sequence[str]]) -> tuple[str, ...]:
        """Names of the parameters of all stages that are not recorded. Every rank calls it.

        Args:
            own: those of each of this rank's stages.
        """
        return tuple(dict.fromkeys(self._all_names(own)))

    def _all_names(self, own: Sequence[Iterable[str]]) -> list[str]:
        every = self._ranks.gather_objects([*map(list, own)])
        return [name for of_rank in every for names in of_rank for name in names]

    def gather(self, loss: float, calls: Mapping[int, Iterable[Call]]) -> tuple[float, list[Call]]:
        """(the loss of the last stage, the calls of the stages after the first, in order). Every rank calls it.

        Args:
            calls: of this rank's stages.
        """
        every = self._ranks.gather_objects((loss if self.is_last else None, {k: list(own) for k, own in calls.items()}))
        by_stage = {stage: own for _, of_rank in every for stage, own in of_rank.items()}
        later = [call for stage in sorted(by_stage) for call in by_stage[stage]]
        return next((each for each, _ in every if each is not None), 0.0), later


def _pattern(name: str) -> str:
    """A name without its numbers."""
    return re.sub(r"\d+", "#", name)


def _without(layout: Any, names: set[str]) -> Layout | None:
    """A layout without some parameters; None if none is left."""
    left = [i for i, spec in enumerate(layout.params) if spec.name not in names]
    if len(left) == len(layout.params):
        return layout
    changed: dict[str, Any] = {"params": tuple(layout.params[i] for i in left)}
    if getattr(layout, "dims", None) is not None:
        changed["dims"] = tuple(layout.dims[i] for i in left)
    return replace(layout, **changed) if left else None


class FirstWriter(RecordingWriter):
    """The writer of the first stage. Compares tied weights of later stages with those of the first one."""

    def __init__(self, directory: str | Path, manifest: Manifest, rank: int, copies: Copies) -> None:
        super().__init__(directory, manifest, rank)
        self._copies = copies
        # The pieces of tied weights in this step, by phase, entry of the optimizer state and parameter.
        self._first: dict[tuple[str, str, str], list[Any]] = {}

    def _put(self, phase: str, step: int, unit: str, pieces: Any, slot: str = "") -> None:
        new = {}
        for name, piece in pieces.items():
            first = self._first.setdefault((phase, slot, name), []) if name in self._copies.ranks else []
            if first and phase in _COMPARED:
                self._compare(step, phase, name, slot, first[0], piece, self._copies.ranks[name][len(first) - 1])
            if not first:
                new[name] = piece
            first.append(piece)
        if new:
            super()._put(phase, step, unit, new, slot)

    def _compare(self, step: int, phase: str, name: str, slot: str, first: Any, other: Any, rank: int) -> None:
        a, b = first[2], other[2]
        if isinstance(a, Sketch):
            same, difference = a.fingerprint == b.fingerprint, 2.0
        else:
            wide = a.astype("float64")
            same = bool((a.view("uint8") == b.view("uint8")).all()) if a.shape == b.shape else False
            difference = float(np.linalg.norm(b.astype("float64") - wide)) / (float(np.linalg.norm(wide)) or 1.0)
        if not same:
            self.disagreement(step, phase, self._units[name], name, slot, difference, self._copies.axis, [rank])

    def counts(self, step: int, counts: Mapping[str, float]) -> None:
        """Record the counts, once for tied weights."""
        known = self._first.setdefault(("count", "", ""), [])
        super().counts(step, {name: value for name, value in counts.items() if name not in known})
        known.extend(counts)

    def end_step(self, step: int, rates: Sequence[float] = ()) -> None:
        """Write the step to disk."""
        super().end_step(step, rates)
        self._first = {}


def _keeps(name: str) -> Callable[..., None]:
    def keep(self: "StageWriter", *args: Any, **options: Any) -> None:
        self.calls.append((name, args, options))

    keep.__doc__ = f"Keep a call of `RecordingWriter.{name}`."
    return keep


class StageWriter(SilentWriter):
    """The writer of a later stage: keeps what the first stage writes.

    Attributes:
        calls: (method, arguments, keyword arguments), whose first argument is the step.
    """

    def __init__(self, directory: str | Path, manifest: Manifest, rank: int) -> None:
        super().__init__(directory, manifest, rank)
        self.calls: list[Call] = []

    activation = _keeps("activation")
    parameters = _keeps("parameters")
    unsharded = _keeps("unsharded")
    reduced_grads = _keeps("reduced_grads")
    state = _keeps("state")
    updated = _keeps("updated")
    counts = _keeps("counts")
    buffers = _keeps("buffers")
    disagreement = _keeps("disagreement")

    def taken(self) -> Iterator[Call]:
        """The calls so far. Forgets them."""
        calls, self.calls = self.calls, []
        yield from calls


def replay(writer: RecordingWriter, step: int, calls: Sequence[Call]) -> None:
    """Make the calls of a step."""
    for name, args, options in calls:
        if args[0] == step:
            getattr(writer, name)(*args, **options)


def infers_shapes() -> bool:
    """Whether the forward that begins is torch's shape inference, which runs stages on uninitialised tensors."""
    return any(
        frame.f_globals.get("__name__") == "torch.distributed.pipelining.stage" and "inference" in frame.f_code.co_name
        for frame, _ in walk_stack(sys._getframe(1))
    )

"""Pipeline parallelism: the stages of a pipeline, each with other modules of one model, are recorded as one rank.

[Note: stages] Each stage records its own parameters and activations. When a step ends, the later stages send theirs to the first
one, which writes them with its own, with the batch that it was given and the loss of the last stage. Gradients are those that the
optimizers get: what a schedule does to them in between, such as dividing by the number of microbatches, is not seen, so local
gradients are not recorded.

The stages of a pipeline wait for one another in forward. So they begin to record together before, when the recorder is entered.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.recording import Manifest, RecordingWriter, SilentWriter
from crossframe.recording.event_format import INPUT, OUTPUT
from torch_backend.ranks._collectives import Communicator, default_process_group

Units = tuple[tuple[str, Layout], ...]
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Pipeline:
    """The stages of one pipeline, one on each rank of a group, in order.

    Attributes:
        group: the process group.
        stage: the number of this rank's stage.
        replicas: the ranks with this stage.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """All ranks call it."""
        self.group, self._ranks = group, Communicator(group)
        self.stage = self._ranks.rank
        by_stage: dict[int, list[int]] = {}
        for rank, stage in enumerate(Communicator(default_process_group()).gather_objects(self.stage)):
            by_stage.setdefault(stage, []).append(rank)
        replicas, _ = dist.new_subgroups_by_enumeration([by_stage[stage] for stage in sorted(by_stage)])
        assert isinstance(replicas, dist.ProcessGroup)
        self.replicas = replicas

    @property
    def is_first(self) -> bool:
        """Whether this stage is given the batch. It writes."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self._ranks.size - 1

    def is_of_model(self, use: str) -> bool:
        """Whether the input or output of this stage is that of the model."""
        return (use == INPUT and self.is_first) or (use == OUTPUT and self.is_last)

    def units(self, own: Units) -> Units:
        """Those of all stages, in order.

        Raises:
            UsageError: two stages have parameters of one name.
        """
        found: Units = ()
        owner: dict[str, int] = {}
        for stage, units in enumerate(self._ranks.gather_objects(own)):
            for name in (spec.name for _, layout in units for spec in layout.params):
                if owner.setdefault(name, stage) != stage:
                    raise UsageError(
                        f"stages {owner[name]} and {stage} both have a parameter {name!r}; expected the names of the whole model "
                        "in each stage, as in a copy of it from which the other layers were removed"
                    )
            found += units
        return found

    def gather(self, loss: float, calls: Iterable[Call]) -> tuple[float, list[Call]]:
        """(the loss of the last stage, the calls of the stages after the first). Every stage calls it."""
        every = self._ranks.gather_objects((loss, list(calls)))
        return every[-1][0], [call for _, later in every[1:] for call in later]


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
    disagreement = _keeps("disagreement")

    def taken(self) -> Iterator[Call]:
        """The calls so far, which it keeps no longer."""
        calls, self.calls = self.calls, []
        yield from calls


def replay(writer: RecordingWriter, step: int, calls: Sequence[Call]) -> None:
    """Make the calls of a step."""
    for name, args, options in calls:
        if args[0] == step:
            getattr(writer, name)(*args, **options)


def infers_shapes() -> bool:
    """Whether the forward that begins is none of training: torch's stages run one on uninitialised tensors to learn shapes."""
    frame = sys._getframe(1)
    while frame is not None:
        if (
            frame.f_globals.get("__name__") == "torch.distributed.pipelining.stage"
            and "inference" in frame.f_code.co_name
        ):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False

"""The interiors of the gradients of a script: what each rank's modules computed of its samples, its own gradients, and the
collectives of all ranks."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossframe.recording.module_calls import called_module, renamed_call
from crossframe.trace import Event
from jax_backend.activations import Activations
from jax_backend.recorder._array_interior import ArrayInterior, by_rank
from jax_backend.recorder._device_ranks import Grid
from jax_backend.recorder._models_as_shards import joined_local_grads
from jax_backend.recorder._module_calls import ConstantParams, canonical_module
from jax_backend.recorder._script_turns import Model, Turn
from jax_backend.recorder._taps import Tap, Value
from jax_backend.shards._local_grads import LocalGrads


def interiors_of(
    turn: Turn, params: Any, grid: Grid, leads: Mapping[Model, str], names: Mapping[str, str]
) -> Iterator[ArrayInterior]:
    """The interior of each microbatch of a turn, in order, without activations of the parts of a batch that is cut.

    Args:
        params: of all models, as the recorder has them.
        leads: what precedes the names of each model there, if there are several.
        names: canonical names of modules by path, where they differ.
    """
    lead = leads[turn.model]
    parts = [each.microbatches for each in turn.gradients]
    unique = {tuple(map(id, part)): part for each in parts for part in each if part}
    cut = _Cut.of([*unique.values()], sum(map(len, parts)), grid)
    for gradient, own in zip(turn.gradients, parts, strict=True):
        if len(gradient.tap.scans) < 2:
            for i, batch in enumerate(own):
                found = _activations(gradient.tap, i, batch, grid, turn.model, cut, leads)
                found = {
                    (renamed_call(call, lambda module: names.get(module, module)), use): value
                    for (call, use), value in found.items()
                }
                yield ArrayInterior(params, Activations(tuple(found.values()), tuple(found)))
        elif lead:
            yield ArrayInterior(params, Activations((), ()))


def local_grads_of(turns: Mapping[Model, Turn], leads: Mapping[Model, str]) -> LocalGrads | None:
    """Each rank's own gradients; None if not all models have them.

    Args:
        turns: the last one of each model.
        leads: what precedes the names of each model, if there are several.
    """
    found: dict[str, LocalGrads] = {}
    for model, turn in turns.items():
        if model.tree is None:
            return None
        # One that reduces: of several, what the script makes of them is not known.
        own = [each for each in turn.gradients if not each.is_local]
        if len(own) != 1 or own[0].tap.scans or not own[0].tap.values["local_grads"]:
            return None
        lines = {bucket: value.array for bucket, value in own[0].tap.values["local_grads"].items()}
        found[leads[model].removesuffix(".")] = LocalGrads(lines, model.tree)
    return found[""] if len(leads) == 1 else joined_local_grads(found)


def collectives_of(turns: Sequence[Turn], leads: Mapping[Model, str]) -> Iterator[Event]:
    """The collectives of rank 0, with the names of the models before those of units."""
    steps = ((leads[turn.model], each) for turn in turns for gradient in turn.gradients for each in gradient.rank_steps)
    for microbatch, (lead, rank_step) in enumerate(steps):
        for event in rank_step.collectives:
            yield replace(event, unit=f"{lead}{event.unit}".removesuffix("."), microbatch=microbatch)


@dataclass(frozen=True)
class _Cut:
    """A batch that a step on several ranks cuts into parts itself, inside of the recorded function, which may give a rank other
    samples than its batch has.

    Attributes:
        num_samples: of the batch.
        num_parts: gradients, of one part each.
    """

    num_samples: int
    num_parts: int

    @classmethod
    def of(cls, batches: Sequence[Sequence[Any]], num_parts: int, grid: Grid) -> "_Cut | None":
        """The batch of several gradients, if there is only one, and several ranks."""
        if num_parts == 1 or len(batches) != 1 or grid.spec.world_size == 1:
            return None
        return cls(batches[0][0].shape[0], num_parts)

    def has_part(self, array: Any) -> bool:
        """Whether the rows of an array belong to a part."""
        rows = array.shape[0] if array.ndim else 0
        return rows > 0 and rows % self.num_samples != 0 and rows * self.num_parts % self.num_samples == 0


def _activations(
    tap: Tap,
    microbatch: int,
    batch: Sequence[Any],
    grid: Grid,
    model: Model,
    cut: _Cut | None,
    leads: Mapping[Model, str],
) -> dict[tuple[str, str], Any]:
    """The activations of a microbatch, by module and use."""
    paths, about = tap.about.names, tap.about.modules
    if model.tree is not None:  # it is differentiated by shards, in which no module is
        paths = model.paths
    names = _Names(model, paths, leads)
    found: dict[tuple[str, str], Any] = {}
    for (raw, use, constants), value in zip(about, tap.values["inside"], strict=True):
        array = value.array
        if tap.scans:
            array = array[:, microbatch] if value.by_rank else array[microbatch]
        if cut is not None and not value.by_rank and cut.has_part(array):
            continue
        if (module := names.of(raw, constants)) is not None:
            found.setdefault((module, use), by_rank(Value(array, value.by_rank), batch, grid))
    return found


class _Names:
    """The names in a recording of modules that a loss function calls.

    Args:
        model: whose parameters it is differentiated by.
        paths: of these in the loss function.
        leads: what precedes the names of each model, if there are several.
    """

    def __init__(self, model: Model, paths: Sequence[str], leads: Mapping[Model, str]) -> None:
        self._model, self._paths, self._leads = model, paths, leads
        self._owners = {name[:i] for name in model.paths for i in range(len(name)) if name[i] == "."} | {""}

    def of(self, raw: str, constants: ConstantParams | None) -> str | None:
        """The name of a module; None: it is left out, as part of a model that is not known, such as a teacher whose modules have
        the names of those of its student.

        Args:
            constants: the parameters of the model that calls it, if the loss function is not differentiated by them; () if it is,
                None if that is not known.
        """
        inside = {each: lead for each in self._leads if constants and (lead := each.lead_of(constants)) is not None}
        if self._model in inside or len(inside) == 1:
            owner = self._model if self._model in inside else next(iter(inside))
            inner = inside[owner]
            module = f"{inner}{raw}" if inner not in ("", "params.") else canonical_module(raw, (), owner.names)
            return f"{self._leads[owner]}{module}".removesuffix(".")
        module = canonical_module(raw, self._paths, self._model.paths)
        if constants and (len(self._leads) > 1 or any(self._has(path) for path, _ in constants)):
            return None
        if constants is None and len(self._leads) > 1 and called_module(module) not in self._owners:
            return None
        return f"{self._leads[self._model]}{module}".removesuffix(".")

    def _has(self, path: str) -> bool:
        return any(f".{name}".endswith(f".{path}") for name in self._model.paths)

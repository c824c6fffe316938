"""The interiors of the gradients of a script: what each rank's modules computed of its samples."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax_backend.activations import Activations
from jax_backend.recorder._array_interior import ArrayInterior, by_rank
from jax_backend.recorder._device_ranks import Grid
from jax_backend.recorder._module_calls import canonical_module
from jax_backend.recorder._script_turns import Model, Turn
from jax_backend.recorder._taps import Tap, Value


def interiors_of(turn: Turn, params: Any, grid: Grid, lead: str, names: Mapping[str, str]) -> Iterator[ArrayInterior]:
    """The interior of each microbatch of a turn, in order, without activations of the parts of a batch that is cut.

    Args:
        params: of all models, as the recorder has them.
        names: canonical names of modules by path, where they differ.
        lead: what precedes the names of this model there, if there are other models. Then modules of these are left out.
    """
    parts = [each.microbatches for each in turn.gradients]
    unique = {tuple(map(id, part)): part for each in parts for part in each if part}
    cut = _Cut.of([*unique.values()], sum(map(len, parts)), grid)
    for gradient, own in zip(turn.gradients, parts, strict=True):
        if len(gradient.tap.scans) < 2:
            for i, batch in enumerate(own):
                found = _activations(gradient.tap, i, batch, grid, turn.model, cut, lead)
                found = {(names.get(module, module), use): value for (module, use), value in found.items()}
                yield ArrayInterior(params, Activations(tuple(found.values()), tuple(found)))
        elif lead:
            yield ArrayInterior(params, Activations((), ()))


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
    tap: Tap, microbatch: int, batch: Sequence[Any], grid: Grid, model: Model, cut: _Cut | None, lead: str
) -> dict[tuple[str, str], Any]:
    """The activations of a microbatch, by module and use."""
    paths, _, about, _ = tap.about
    if model.tree is not None:  # it is differentiated by shards, in which no module is
        paths = model.paths
    owners = {name[:i] for name in model.paths for i in range(len(name)) if name[i] == "."} | {""}
    found: dict[tuple[str, str], Any] = {}
    for (raw, use), value in zip(about, tap.values["inside"], strict=True):
        array = value.array
        if tap.scans:
            array = array[:, microbatch] if value.by_rank else array[microbatch]
        if cut is not None and not value.by_rank and cut.has_part(array):
            continue
        module = canonical_module(raw, paths, model.paths)
        if not lead or module in owners:
            of_rank = by_rank(Value(array, value.by_rank), batch, grid)
            found.setdefault((f"{lead}{module}".removesuffix("."), use), of_rank)
    return found

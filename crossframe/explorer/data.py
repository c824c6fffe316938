"""The data of the layout explorer: the layouts and the steps of a model in every combination of a few choices."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from crossframe.cost import PASSING, Cost, step_cost
from crossframe.draw.amounts import ROOT, one_line, ranks_text
from crossframe.draw.lanes import FILLS, MEMORY_FILLS
from crossframe.draw.shards import DrawnUnit, drawn_units
from crossframe.draw.steps import WORDS, unit_text
from crossframe.draw.svg import fill_of
from crossframe.draw.table import mesh_line, summary_line
from crossframe.draw.timeline import summary_rows
from crossframe.errors import LayoutError, UsageError
from crossframe.layout import LAYOUT_KINDS, Layout, Sharding
from crossframe.mesh import MeshSpec, check_world_size
from crossframe.plan import plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.shapes import ModelShapes
from crossframe.strategy import Strategy
from crossframe.trace import ALL_GATHER, CAST, COMPUTE, FREE

STRATEGIES = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD, Strategy.HYBRID_SHARD)
# Maximum size of a shard group under HYBRID_SHARD: the accelerators of a usual machine.
HYBRID_SHARD = 8
# Maximum number of units of all steps together: beyond it, the page takes a minute to write and to load.
MOST_UNITS = 2**15
TOKENS = 4096  # of one rank, for the times of a step, as `crossframe plan` takes them


@dataclass(frozen=True)
class DtypeChoice:
    """A choice of dtypes.

    Attributes:
        name: what the page calls it.
        shapes: the model, with the dtypes in which its parameters are stored.
        stored: the option --dtype that gives these shapes.
        compute: dtype of gathers and compute; None: as stored.
    """

    name: str
    shapes: ModelShapes
    stored: str
    compute: str | None = None


def dtype_choices(shapes_of: Callable[[str], ModelShapes], dtype: str) -> tuple[DtypeChoice, ...]:
    """The choices for a model: stored in `dtype`, float32 or bfloat16, or computed in bfloat16.

    Args:
        shapes_of: the model for a dtype, which it uses for parameters whose dtype is not stated.
    """
    asked = shapes_of(dtype)
    if all(shapes_of(other).params == asked.params for other in ("float32", "bfloat16")):
        computed = DtypeChoice("as stored, computed in bfloat16", asked, dtype, "bfloat16")
        return DtypeChoice("as stored", asked, dtype), computed
    plain = [DtypeChoice(each, shapes_of(each), each) for each in dict.fromkeys((dtype, "float32", "bfloat16"))]
    mixed = DtypeChoice("float32, computed in bfloat16", shapes_of("float32"), "float32", "bfloat16")
    return (*plain, mixed)


def world_sizes(largest: int) -> tuple[int, ...]:
    """The powers of two up to a world size, and this world size.

    >>> world_sizes(12)
    (1, 2, 4, 8, 12)
    """
    check_world_size(largest)
    return tuple(sorted({largest, *(2**k for k in range(largest.bit_length()))}))


def mesh_of(strategy: Strategy, world_size: int) -> MeshSpec | None:
    """The mesh of a strategy; None if a hybrid strategy has no shard group that divides the world size.

    >>> mesh_of(Strategy.HYBRID_SHARD, 12), mesh_of(Strategy.HYBRID_SHARD, 2)
    (MeshSpec(shard=6, replicate=2), None)
    """
    if not strategy.is_hybrid:
        return strategy.mesh(world_size)
    sizes = [size for size in range(2, HYBRID_SHARD + 1) if world_size % size == 0 and size < world_size]
    return strategy.mesh(world_size, sizes[-1]) if sizes else None


def explorer_data(choices: Sequence[DtypeChoice], world_size: int) -> dict[str, Any]:
    """Everything that the page shows, as a JSON object.

    Repeated parts are stored once, in lists, and referred to by their index.

    Args:
        choices: from `dtype_choices`.
        world_size: the largest world size.

    Returns:
        "model", "root" (the displayed name of the root), "world_sizes", "layouts", "strategies"; "dtypes" with "name", "stored"
        and "compute"; "kinds" and "purposes", which map kinds of events and purposes of memory to [text, class of the fill]; and

        - "combinations": by "WORLD STRATEGY LAYOUT DTYPE": "mesh" as [replicas, shards], its description "mesh_text" if there are
          replicas, and the indices "sharding" and "step". If the core refuses the layout, there is "refused" with the reason
          instead of indices. Hybrid strategies are left out where no shard group divides the world size.
        - "shardings": lists of units, of which equal ones are joined. A unit has "names", "title", "about", "shard_numel",
          "groups" of equal shard ranks as [first, count], and "rows". A row is a parameter ("label", "shape", "numel", "fill") or
          padding ("padding"). Its "held" are [group, start, stop, param_start, text]: each rank of the group holds start:stop of
          its shard; rank first + k holds the parameter from param_start + k * (stop - start) on.
        - "steps": the step of rank 0. "plan" is an index of "plans"; "bytes", "seconds" (the time of issue) and the values of
          "memory" by purpose are indices of "columns", with one number for each event; "ranks" are the ranks that take part by
          kind; "summary" is a list of (head, line).
        - "plans": "units", "events" as [kind, unit, phase, dtype] with unit an index of "units", and "full": for each unit the
          ranges of events after which it holds full parameters.

    Raises:
        UsageError: the steps of all combinations have too many units.
    """
    sizes = world_sizes(world_size)
    num_steps = len(sizes) * len(STRATEGIES) * len(LAYOUT_KINDS) * len(choices)
    if (most := num_steps * (len(choices[0].shapes.units) + 1)) > MOST_UNITS:
        raise UsageError(
            f"html: {num_steps} combinations of {len(choices[0].shapes.units) + 1} units are {most:,} units, expected at most "
            f"{MOST_UNITS:,}: pass a smaller --world-size, or draw one combination with --svg"
        )
    shardings, steps, plans, columns = _Interned(), _Interned(), _Interned(), _Interned()
    combinations: dict[str, dict[str, Any]] = {}
    for choice, kind in product(choices, LAYOUT_KINDS):
        known: dict[int, tuple[tuple[tuple[str, Layout], ...], int] | LayoutError] = {}
        for size, strategy in product(sizes, STRATEGIES):
            mesh = mesh_of(strategy, size)
            if mesh is None:
                continue
            found: dict[str, Any] = {
                "mesh": [mesh.replicate, mesh.shard],
                "mesh_text": mesh_line(mesh) if mesh.replicate > 1 else "",
            }
            combinations[f"{size} {strategy.value} {kind} {choice.name}"] = found
            if mesh.shard not in known:
                known[mesh.shard] = _sharding(choice, kind, mesh.shard, shardings)
            if isinstance(sharding := known[mesh.shard], LayoutError):
                found["refused"] = str(sharding)
                continue
            layouts, found["sharding"] = sharding
            found["step"] = steps.index(_step_json(_cost(layouts, strategy, mesh, choice.compute), plans, columns))
    model = choices[0].shapes
    return {
        "model": one_line(model.name),
        "root": ROOT,
        "world_sizes": sizes,
        "layouts": LAYOUT_KINDS,
        "strategies": [strategy.value for strategy in STRATEGIES],
        "dtypes": [{"name": each.name, "stored": each.stored, "compute": each.compute} for each in choices],
        "kinds": {kind: [words, f"fill{FILLS[kind]}"] for kind, words in WORDS.items() if kind in FILLS},
        "purposes": {purpose: [purpose, f"fill{fill}"] for purpose, fill in MEMORY_FILLS.items()},
        "combinations": combinations,
        "shardings": shardings.values,
        "steps": steps.values,
        "plans": plans.values,
        "columns": columns.values,
    }


class _Interned:
    """A list of JSON values in which equal ones are stored once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[str, int] = {}

    def index(self, value: Any) -> int:
        """The index of a value, which is appended if it is new."""
        found = self._index.setdefault(json.dumps(value), len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


def _sharding(
    choice: DtypeChoice, kind: str, shard: int, shardings: _Interned
) -> tuple[tuple[tuple[str, Layout], ...], int] | LayoutError:
    """The layouts of a model and their index, or the error of a model that cannot be laid out like this."""
    try:
        layouts = choice.shapes.layouts(kind, shard, compute_dtype=choice.compute)
    except LayoutError as error:
        return error
    units = drawn_units(Sharding(layouts, MeshSpec(shard)), None, None)
    return layouts, shardings.index([_unit_json(unit) for unit in units])


def _cost(layouts: tuple[tuple[str, Layout], ...], strategy: Strategy, mesh: MeshSpec, compute: str | None) -> Cost:
    units = plan_units(layouts, strategy, policy=PrecisionPolicy(compute, None))
    return step_cost(step_plan(units, mesh), units, tokens=TOKENS)


def _unit_json(unit: DrawnUnit) -> dict[str, Any]:
    pieces = [{piece.name: piece.param_start for piece in unit.layout.pieces(group[0])} for group in unit.groups]
    rows = []
    for row in unit.rows:
        param = unit.layout.params[row.i]
        held = [
            [at, each.start, each.stop, 0 if row.padding else pieces[at][param.name], each.text(unit.groups[at])]
            for at, each in enumerate(row.held)
            if each
        ]
        if row.padding:
            rows.append({"padding": row.padding, "held": held})
        else:
            named = {"label": unit.labels[row.i], "shape": param.shape, "numel": param.numel, "fill": fill_of(row.i)}
            rows.append(named | {"held": held})
    return {
        "names": [one_line(name) for name in unit.names],
        "title": unit.title,
        "about": f"{unit.kind}; {summary_line(unit)}",
        "shard_numel": unit.layout.padded_shard_numel,
        "groups": [[group.start, len(group)] for group in unit.groups],
        "rows": rows,
    }


def _step_json(cost: Cost, plans: _Interned, columns: _Interned) -> dict[str, Any]:
    events = [span.event for span in cost.spans]
    units = list(dict.fromkeys(event.unit for event in events))
    texts = {event.unit: unit_text(event) for event in events}
    plan = {
        "units": [texts[unit] for unit in units],
        "events": [
            [event.phase if event.kind == COMPUTE else event.kind, units.index(event.unit), event.phase, event.dtype]
            for event in events
        ],
        "full": [_full(cost, unit) for unit in units],
    }

    def column(values: Iterable[float]) -> int:
        return columns.index(list(values))

    purposes = [name for name in ("shards", "optimizer", *PASSING) if any(span.memory[name] for span in cost.spans)]
    return {
        "plan": plans.index(plan),
        "bytes": column(event.num_bytes for event in events),
        "seconds": column(float(f"{span.issue_seconds:.3g}") for span in cost.spans),
        "memory": {name: column(span.memory[name] for span in cost.spans) for name in purposes},
        "ranks": {event.kind: ranks_text(event.group) for event in events if event.kind in FILLS},
        "summary": list(summary_rows(cost)),
    }


def _full(cost: Cost, unit: str) -> list[tuple[int, int]]:
    """The ranges of events after which a unit holds full parameters. What is never gathered is full as it is stored (R14)."""
    found, held, since = [], set(), 0
    for at, event in enumerate(span.event for span in cost.spans):
        if event.unit != unit:
            continue
        if event.kind in (ALL_GATHER, CAST):
            since = since if held else at
            held.add(event.bucket)
        elif event.kind == FREE:
            held.discard(event.bucket)
            if not held:
                found.append((since, at))
    if held or not found:
        found.append((since, len(cost.spans)))
    return found

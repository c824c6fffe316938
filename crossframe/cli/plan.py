"""`crossframe plan`: the events of a training step, and their cost."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.api import Api
from crossframe.cli.option_values import choice, put, refused, width_of, write_svg
from crossframe.cli.parallel import ParallelOptions
from crossframe.cost import Cost, Hardware, step_cost
from crossframe.draw import events_text, plan_svg, plan_text
from crossframe.draw.amounts import TIMES, bytes_text, percent_text, seconds_text
from crossframe.draw.steps import WORDS
from crossframe.draw.table import aligned
from crossframe.errors import UsageError
from crossframe.layout import LAYOUT_KINDS
from crossframe.mesh import PIPELINE, check_rank, check_world_size
from crossframe.parallel import ParallelModel, ParallelSharding, Traffic, idle_share, model_traffic, token_shares
from crossframe.parallel.traffic import by_kind
from crossframe.plan import plan_units, step_plan
from crossframe.precision import PrecisionPolicy
from crossframe.quoting import quote
from crossframe.shapes import ModelShapes, model_shapes
from crossframe.strategy import Prefetch, Schedule, Strategy, Sync
from crossframe.trace import COLLECTIVES

MIN_RATE, MAX_RATE, MAX_LATENCY = 1.0, 1e24, 1e6
MAX_TOKENS = 10**12
MAX_PREFETCH = 10**6
# A plan has an event for each unit and microbatch, and takes seconds for so many.
MAX_UNIT_MICROBATCHES = 2**12
_PREFETCH = {"pre": Prefetch.BACKWARD_PRE, "post": Prefetch.BACKWARD_POST, "none": None}


def hardware(
    *,
    bandwidth: float | None = None,
    replica_bandwidth: float | None = None,
    latency: float | None = None,
    flops: float | None = None,
) -> Hardware:
    """The default hardware with the given changes.

    Raises:
        UsageError: a number that is not finite, below 0, or 0 where something has to take time.
    """
    asked = {
        "bandwidth": ("bytes_per_second", bandwidth),
        "replica-bandwidth": ("replica_bytes_per_second", replica_bandwidth),
        "latency": ("latency_seconds", latency),
        "flops": ("flops_per_second", flops),
    }
    for name, (_, value) in asked.items():
        if value is not None and not (0 <= value < math.inf and (value or name == "latency")):
            raise UsageError(f"{name}: expected a finite number above 0{' or 0' * (name == 'latency')}, got {value}")
        if value is not None and not (value <= MAX_LATENCY if name == "latency" else MIN_RATE <= value <= MAX_RATE):
            within = (
                f"at most {MAX_LATENCY:g} s" if name == "latency" else f"from {MIN_RATE:g} to {MAX_RATE:g} a second"
            )
            raise UsageError(f"{name}: expected {within}, got {value:g}")
    return Hardware(**{field: value for field, value in asked.values() if value is not None})


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command.

    Attributes:
        shard: ranks that hold one copy of the model; hybrid strategies need it.
        kind: of LAYOUT_KINDS; None: what torch has, flat (FSDP1) or per_param (FSDP2).
        reshard_after_forward: "true", "false" or the size of a reshard group; None: that of the strategy. FSDP2 only.
        tokens: of one rank and microbatch.
        parallel: the axes that divide the model.
        experts_per_token: the number of experts that process a token; with expert parallelism.
        schedule: the order of microbatches in a pipeline; None: "1f1b".

    Raises:
        UsageError: an unknown word.
        MeshError, PlanError: a world that does not exist, or that the strategy cannot cut.
    """

    world_size: int
    strategy: str = Strategy.FULL_SHARD.value
    shard: int | None = None
    api: str = Api.FSDP1.value
    reshard_after_forward: str | None = None
    kind: str | None = None
    backward_prefetch: str = "pre"
    forward_prefetch: int = 0
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    microbatches: int = 1
    sync: str = Sync.EACH.value
    rank: int = 0
    tokens: int = 4096
    hardware: Hardware = field(default_factory=Hardware)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    schedule: str | None = None
    experts_per_token: int | None = None

    def traffic(self, model: ParallelModel) -> tuple[Traffic, ...] | None:
        """What the rank sends over the axes that divide the model; None if the width of activations is unknown."""
        if model.width is None:
            return None
        return model_traffic(
            model,
            self.rank,
            tokens=self.tokens,
            microbatches=self.microbatches,
            dtype=self.param_dtype,
            experts_per_token=self.experts_per_token,
        )

    def model(self, shapes: ModelShapes) -> ParallelModel:
        """The model on its mesh."""
        check_world_size(self.world_size)
        strategy = choice("strategy", Strategy, self.strategy)
        if strategy.is_hybrid and self.shard is None:
            raise UsageError(
                f"shard: {strategy.value} needs the number of ranks that hold one copy, for instance --shard 8"
            )
        model = self.parallel.model(shapes, strategy.mesh(self.parallel.num_data_ranks(self.world_size), self.shard))
        check_rank(self.rank, self.world_size)
        return model

    def cost(self, model: ParallelModel, rank: int) -> Cost:
        """The plan of the step of a rank and its cost."""
        strategy, api = choice("strategy", Strategy, self.strategy), choice("api", Api, self.api)
        sync = choice("sync", Sync, self.sync)
        if self.experts_per_token is not None and self.parallel.ep == 1:
            raise UsageError("experts-per-token: without --ep every parameter counts for every token; pass --ep")
        if self.schedule is not None and self.parallel.pp == 1:
            raise UsageError("schedule: without --pp there is no pipeline; pass the number of stages")
        schedule = choice("schedule", Schedule, self.schedule or Schedule.ONE_F_ONE_B.value)
        if self.backward_prefetch not in _PREFETCH:
            raise refused("backward-prefetch", _PREFETCH, self.backward_prefetch)
        kind = self.kind or ("flat" if api is Api.FSDP1 else "per_param")
        if kind not in LAYOUT_KINDS:
            raise refused("layout", LAYOUT_KINDS, kind)
        num_units = len(model.part(rank).units) + 1
        for name, value, most in (
            ("tokens", self.tokens, MAX_TOKENS),
            ("forward-prefetch", self.forward_prefetch, MAX_PREFETCH),
            (f"microbatches of {num_units} units", self.microbatches, MAX_UNIT_MICROBATCHES // num_units),
        ):
            if value > most:
                raise UsageError(f"{name}: expected at most {most}, got {quote(value)}")
        units = plan_units(
            # Computing in another dtype moves the alignment of the flat layout (R02).
            ParallelSharding(model, kind, compute_dtype=self.param_dtype).layouts(rank),
            strategy,
            api=api,
            reshard_after_forward=self._reshards(api),
            policy=PrecisionPolicy(self.param_dtype, self.reduce_dtype),
            expert_units=model.expert_units,
        )
        plan = step_plan(
            units,
            model.mesh,
            rank,
            backward_prefetch=_PREFETCH[self.backward_prefetch],
            forward_prefetch=self.forward_prefetch,
            microbatches=self.microbatches,
            sync=sync,
            schedule=schedule,
        )
        shares = token_shares(model, self.experts_per_token)
        return step_cost(plan, units, self.hardware, tokens=self.tokens, token_shares=shares)

    def _reshards(self, api: Api) -> bool | int | None:
        asked = self.reshard_after_forward
        if asked is None:
            return None
        if api is Api.FSDP1:
            raise UsageError("reshard-after-forward: FSDP1 has no such choice, its strategy says it; add --api fsdp2")
        if asked in ("true", "false"):
            return asked == "true"
        if not (asked.isdecimal() and len(asked) < 10 and int(asked)):
            raise UsageError(f"reshard-after-forward: expected true, false or a number of ranks, got {quote(asked)}")
        return int(asked)


def plan_json(cost: Cost) -> dict[str, Any]:
    """A step and its cost as a JSON object: times in seconds, sizes in bytes, and one entry for each event in order of issue."""
    return {
        "seconds": cost.seconds,
        "compute_seconds": cost.compute_seconds,
        "communication_seconds": cost.communication_seconds,
        "exposed_seconds": cost.exposed_seconds,
        "peak_bytes": cost.peak_bytes,
        "peak_memory": dict(cost.peak.memory),
        "collectives": {kind: dict(counts) for kind, counts in cost.collectives.items()},
        "events": [
            {name: value for name, value in span.event.to_json().items() if name != "group"}
            | {
                "num_ranks": len(span.event.group),
                "start_seconds": span.start_seconds,
                "stop_seconds": span.stop_seconds,
                "memory_bytes": span.memory_bytes,
            }
            for span in cost.spans
        ],
    }


@dataclass(frozen=True)
class AxesCost:
    """What the axes that divide a model change: all parts of the model, and the traffic of the axes.

    Attributes:
        model: the model on its mesh.
        rank: the rank of the traffic.
        costs: the cost of the step of a rank of each part, by rank.
        traffic: None if the width of activations is unknown.
        microbatches, hardware: as in PlanOptions.
    """

    model: ParallelModel
    rank: int
    costs: Mapping[int, Cost]
    traffic: Sequence[Traffic] | None
    microbatches: int
    hardware: Hardware

    def totals(self) -> dict[str, int]:
        """The bytes of data parallel collectives of all ranks together, by kind."""
        ranks_of_a_part = self.model.mesh.world_size // len(self.costs)
        found: dict[str, int] = {}
        for cost in self.costs.values():
            for kind, counts in cost.collectives.items():
                found[kind] = found.get(kind, 0) + counts["num_bytes"] * ranks_of_a_part
        return found

    def seconds(self, traffic: Traffic) -> float:
        """The time of all these collectives."""
        each = self.hardware.collective_seconds(
            traffic.kind, traffic.num_bytes, len(traffic.group), between_replicas=False
        )
        return traffic.count * each

    def to_json(self) -> dict[str, Any]:
        """The fields that `plan --json` has with these axes."""
        mesh = self.model.mesh
        return {
            "axes": dict(mesh.items()),
            "coordinate": mesh.coordinate(self.rank),
            "parts": [
                {
                    "rank": rank,
                    "coordinate": mesh.coordinate(rank),
                    "numel": sum(param.numel for param in self.model.part(rank).params),
                    "peak_bytes": cost.peak_bytes,
                    "peak_memory": dict(cost.peak.memory),
                    "collectives": {kind: dict(counts) for kind, counts in cost.collectives.items()},
                }
                for rank, cost in self.costs.items()
            ],
            "total_bytes": self.totals(),
            "model_axes": None
            if self.traffic is None
            else [
                {name: value for name, value in asdict(each).items() if name != "group"}
                | {"num_ranks": len(each.group), "seconds": self.seconds(each)}
                for each in self.traffic
            ],
            "idle_share": idle_share(mesh.size(PIPELINE), self.microbatches),
        }

    def text(self) -> str:
        """A table of the parts, the bytes of all ranks, and the traffic of each axis."""
        mesh = self.model.mesh
        rows = [["part", "parameters", "peak memory", *(WORDS[kind] for kind in COLLECTIVES)]]
        for rank, cost in self.costs.items():
            at = ", ".join(f"{axis} {mesh.coordinate(rank)[axis]}" for axis in self.model.part_axes) or "every rank"
            numel = sum(param.numel for param in self.model.part(rank).params)
            sent = [bytes_text(cost.collectives[kind]["num_bytes"]) for kind in COLLECTIVES]
            rows.append([at, f"{numel:,}", bytes_text(cost.peak_bytes), *sent])
        totals = self.totals()
        rows.append(["all ranks", "", "", *(bytes_text(totals[kind]) for kind in COLLECTIVES)])
        lines = ["data parallel, for one rank of each part", aligned(rows, left=1), ""]
        lines.append(f"model axes, for rank {self.rank:,}; not in the times above")
        if self.traffic is None:
            lines.append("not stated, since no module of style vocab or rowwise states the width of activations")
        table = []
        for (axis, kind), found in by_kind(self.traffic or ()).items():
            num_bytes = sum(each.count * each.num_bytes for each in found)
            seconds = seconds_text(sum(map(self.seconds, found)))
            count = f"{sum(each.count for each in found):,} {TIMES} {WORDS.get(kind, kind.replace('_', '-'))}"
            table.append([f"{axis} {mesh.size(axis)}", count, bytes_text(num_bytes), seconds])
        if table:
            lines.append(aligned(table, left=2))
        if idle := idle_share(mesh.size(PIPELINE), self.microbatches):
            lines.append(
                f"a stage waits for others for {percent_text(idle, 1)} of the step, if stages take equally long"
            )
        return "\n".join(lines)


def show_plan(
    model: str,
    dtype: str,
    options: PlanOptions,
    *,
    events: bool,
    svg: Path | None,
    as_json: bool = False,
    console: Console,
) -> None:
    """Print a step's costs, its timeline, and with `events` every event; write the drawing.

    Args:
        model: a name or a file, as `model_shapes` takes it.
        svg: where the drawing goes; None: nowhere.
        as_json: print `plan_json` instead, with the fields of `AxesCost.to_json` if axes divide the model.

    Raises:
        CrossframeError: a model or an option that does not exist.
        OSError: a drawing that cannot be written.
    """
    shapes = model_shapes(model, dtype)
    parallel = options.model(shapes)
    cost = options.cost(parallel, options.rank)
    axes = None
    if not options.parallel.is_plain:
        costs = {rank: options.cost(parallel, rank) for rank in parallel.distinct_parts()}
        traffic = options.traffic(parallel)
        axes = AxesCost(parallel, options.rank, costs, traffic, options.microbatches, options.hardware)
    ranks = f"{options.world_size:,} rank{'s' if options.world_size > 1 else ''}"
    title = f"{shapes.name} on {ranks}{options.parallel.text()}, {options.strategy}, {options.api}"
    if svg is not None:
        write_svg(svg, plan_svg(cost, title=title))
    if as_json:
        print(json.dumps(plan_json(cost) | (axes.to_json() if axes else {}), indent=1))
        return
    put(console, f"{title}: the step of rank {options.rank:,}\n")
    put(console, plan_text(cost, width=width_of(console)))
    if axes is not None:
        put(console, f"\n{axes.text()}")
    if events:
        put(console, f"\n{events_text(cost)}")
    if svg is not None:
        put(console, f"\ndrawing: {svg}")

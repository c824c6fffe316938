"""The cost of a planned step for one rank: bytes sent, memory, and time in a model of bandwidth and latency.

The time model has one stream that issues all operations in the order of the plan, as the engine of this project does. (torch's
FSDP gathers on a stream that runs ahead of compute in forward, which `forward_prefetch=1` approximates.) Computations run one
after another, and so do the collectives of a group, in parallel with compute. A collective starts when the computations issued
before it are done and its group is free, since the stream of a collective library first waits for the stream that issues. A
computation starts when its unit is gathered. A reduction is issued when the previous one is done, so that only one holds buffers
at a time. *Exposed* communication is the time for which computation waits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crossframe.dtypes import itemsize
from crossframe.errors import PlanError
from crossframe.plan import PlannedBucket, PlannedUnit, api_of
from crossframe.quoting import quote
from crossframe.trace import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    CAST,
    COLLECTIVES,
    COMPUTE,
    FREE,
    REDUCE_SCATTER,
    RESHARD_TO_GROUP,
    SEND,
    STEP,
    Event,
    summary,
)


@dataclass(frozen=True)
class Hardware:
    """Compute and communication rates of a rank. The defaults are of the order of an accelerator of 2023 and a 400 Gb/s link.

    Attributes:
        flops_per_second: floating point operations per second that compute reaches.
        bytes_per_second: bandwidth of one rank inside its shard group.
        replica_bytes_per_second: bandwidth of one rank between replicas; None: the same.
        latency_seconds: time of an empty message.
    """

    flops_per_second: float = 4e14
    bytes_per_second: float = 5e10
    replica_bytes_per_second: float | None = None
    latency_seconds: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "bytes_per_second", "replica_bytes_per_second", "latency_seconds"):
            value = getattr(self, name)
            if value is None and name == "replica_bytes_per_second":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise PlanError(f"{name}: expected a finite number of at least 0, got {quote(value)}")
            if value == 0 and name != "latency_seconds":
                raise PlanError(f"{name}: expected a number above 0, got {quote(value)}")

    def collective_seconds(self, kind: str, num_bytes: int, num_ranks: int, *, between_replicas: bool = True) -> float:
        """Time of a collective whose unsharded side has n = `num_bytes`, over p ranks with latency a and bandwidth 1/b.

        It is a log2(p) + b n (p - 1) / p for an all-gather (recursive doubling) and a reduce-scatter (recursive halving), twice
        that for an all-reduce (Rabenseifner's algorithm), a (p - 1) + b n (p - 1) / p for an all-to-all (pairwise exchange), and
        a + b n for a send. Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH,
        2005, without the cost of additions.

        Args:
            between_replicas: whether an all-reduce is one between replicas, which has their bandwidth.
        """
        if kind == SEND:
            return self.latency_seconds + num_bytes / self.bytes_per_second
        bandwidth = self.bytes_per_second
        if kind == ALL_REDUCE and between_replicas:
            bandwidth = self.replica_bytes_per_second or bandwidth
        messages = num_ranks - 1 if kind == ALL_TO_ALL else math.ceil(math.log2(num_ranks))
        once = self.latency_seconds * messages + num_bytes / bandwidth * (num_ranks - 1) / num_ranks
        return 2 * once if kind == ALL_REDUCE else once

    def compute_seconds(self, numel: int, tokens: float, phase: str) -> float:
        """Time of a unit with `numel` parameters on `tokens` tokens.

        It takes 2 operations per parameter and token in forward and 4 in backward (Kaplan et al., Scaling Laws for Neural
        Language Models, 2020, section 2.1, who exclude embeddings; here every parameter counts).
        """
        return (2 if phase == "forward" else 4) * numel * tokens / self.flops_per_second


# Kinds of memory that are held for a part of the step; "shards" and "optimizer" are held throughout.
PASSING = (
    "full parameters",
    "full gradients",
    "sharded gradients",
    "gather buffers",
    "reduction buffers",
    "activations",
)


@dataclass(frozen=True)
class Span:
    """An event with the times at which it is issued, starts and stops, and the rank's memory from then on, by purpose."""

    event: Event
    issue_seconds: float
    start_seconds: float
    stop_seconds: float
    memory: Mapping[str, int]

    @property
    def memory_bytes(self) -> int:
        """Total memory."""
        return sum(self.memory.values())


@dataclass(frozen=True)
class Cost:
    """The cost of a step for one rank.

    Attributes:
        spans: one for each event, in the order of issue.
        collectives: count and bytes by kind, as `crossframe.trace.summary` returns them.
        compute_seconds: time of all computations.
        communication_seconds: time of all collectives.
        exposed_seconds: time for which computation waited for collectives.
    """

    spans: tuple[Span, ...]
    collectives: Mapping[str, Mapping[str, int]]
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float

    @property
    def seconds(self) -> float:
        """Time of the step: computation and waiting, without the arithmetic of the optimizer."""
        return self.compute_seconds + self.exposed_seconds

    @property
    def peak(self) -> Span:
        """The first span with the highest memory."""
        return max(self.spans, key=lambda span: span.memory_bytes)

    @property
    def peak_bytes(self) -> int:
        """Highest memory of the rank."""
        return self.peak.memory_bytes


def step_cost(
    plan: Sequence[Event],
    units: Sequence[PlannedUnit],
    hardware: Hardware | None = None,
    *,
    tokens: int = 1,
    optimizer_states: int = 2,
    activation_bytes: Mapping[str, int] | None = None,
    token_shares: Mapping[str, float] | None = None,
) -> Cost:
    """The cost of a plan for the rank that it was made for.

    Memory includes shards, optimizer state, sharded gradients, full parameters (with a separate gather buffer if the layout is
    not contiguous), full gradients, and the buffers of one reduction at a time.

    Args:
        plan: from `step_plan`.
        units: the units of the plan.
        hardware: None: the defaults of `Hardware`.
        tokens: number of tokens that one data-parallel rank processes in one microbatch.
        optimizer_states: number of values that the optimizer keeps for each element of a shard: 2 for AdamW, 1 for momentum.
        activation_bytes: bytes that the forward of each unit keeps for backward, by unit. Default: not counted.
        token_shares: the share of its parameters that a token computes with, by unit of experts, as
            `crossframe.parallel.token_shares` gives it. Default: 1.

    Raises:
        PlanError: the plan has an event of another unit, or a number is too small.
    """
    if not isinstance(units, tuple | list) or not all(isinstance(unit, PlannedUnit) for unit in units):
        raise PlanError(f"expected a list of PlannedUnit, as plan_units gives them, got {quote(units)}")
    if not (hardware is None or isinstance(hardware, Hardware)):
        raise PlanError(f"expected a Hardware, got {quote(hardware)}")
    sizes = {} if activation_bytes is None else activation_bytes
    if isinstance(sizes, Mapping) and (unknown := [name for name in sizes if name not in {u.name for u in units}]):
        raise PlanError(f"activation_bytes: {quote(unknown[0])} is none of the units {[unit.name for unit in units]}")
    if not isinstance(sizes, Mapping) or not all(type(size) is int and size >= 0 for size in sizes.values()):
        raise PlanError(f"activation_bytes: expected numbers of bytes by unit, got {quote(activation_bytes)}")
    if not isinstance(plan, list | tuple) or not all(isinstance(event, Event) for event in plan):
        raise PlanError(f"expected a list of events, as step_plan gives it, got {quote(plan)}")
    for name, value, least in (("tokens", tokens, 1), ("optimizer_states", optimizer_states, 0)):
        if type(value) is not int or value < least:
            raise PlanError(f"{name}: expected a number of at least {least}, got {quote(value)}")
    ledger = _Ledger({unit.name: unit for unit in units}, optimizer_states, sizes)
    clock = _Clock(hardware or Hardware(), tokens, dict(token_shares or {}))
    spans = []
    for event in plan:
        bucket = ledger.bucket(event)
        issue, start, stop = clock.run(event)
        ledger.enter(event, bucket)
        spans.append(Span(event, issue, start, stop, ledger.snapshot()))
    return Cost(tuple(spans), summary(plan), clock.compute, clock.communication, clock.exposed)


@dataclass
class _Clock:
    """The times of events. See the docstring of the module."""

    hardware: Hardware
    tokens: int
    token_shares: Mapping[str, float]
    now: float = 0.0  # when all computations issued so far are done
    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0
    free_at: dict[Sequence[int], float] = field(default_factory=dict)  # by group
    gathered_at: dict[str, float] = field(default_factory=dict)
    reduced_at: dict[tuple[str, int], float] = field(default_factory=dict)
    last_reduction: float = 0.0

    def run(self, event: Event) -> tuple[float, float, float]:
        """The times at which an event is issued, starts and stops."""
        if event.kind in COLLECTIVES:
            return self._collective(event)
        if event.kind == COMPUTE:
            self._wait(self.gathered_at.get(event.unit, 0.0))
            start = self.now
            numel = event.num_bytes // itemsize(event.dtype)
            tokens = self.tokens * self.token_shares.get(event.unit, 1)
            seconds = self.hardware.compute_seconds(numel, tokens, event.phase)
            self.now += seconds
            self.compute += seconds
            return start, start, self.now
        if event.kind == STEP:
            self._wait(max(self.free_at.values(), default=0.0))
        return self.now, self.now, self.now

    def _wait(self, until: float) -> None:
        self.exposed += max(0.0, until - self.now)
        self.now = max(self.now, until)

    def _collective(self, event: Event) -> tuple[float, float, float]:
        if event.kind == REDUCE_SCATTER:
            self._wait(self.last_reduction)  # this reduction takes over its buffers
        start = max(self.now, self.free_at.get(event.group, 0.0))
        if event.kind == ALL_REDUCE:
            start = max(start, self.reduced_at.get((event.unit, event.bucket), 0.0))
        seconds = self.hardware.collective_seconds(event.kind, event.num_bytes, len(event.group))
        stop = start + seconds
        self.free_at[event.group] = stop
        self.communication += seconds
        if event.kind == ALL_GATHER:
            self.gathered_at[event.unit] = max(stop, self.gathered_at.get(event.unit, 0.0))
        elif event.kind == REDUCE_SCATTER:
            self.reduced_at[event.unit, event.bucket] = stop
        if event.kind != ALL_GATHER:
            self.last_reduction = stop
        return self.now, start, stop


class _Ledger:
    """The memory of a rank by purpose."""

    def __init__(
        self, units: Mapping[str, PlannedUnit], optimizer_states: int, activation_bytes: Mapping[str, int]
    ) -> None:
        self._units = units
        self._activation_bytes = activation_bytes
        self._api = api_of(tuple(units.values()))
        # Buckets whose full gradients wait for a later microbatch, and the computations of the previous event.
        self._waiting: set[tuple[str, int]] = set()
        # The forwards of each unit whose backward is to come: several in a pipeline.
        self._num_ahead: dict[str, int] = {}
        self._computed: list[tuple[Event, int, PlannedBucket]] = []
        shards = sum(
            bucket.layout.padded_shard_numel * itemsize(bucket.layout.dtype)
            for unit in units.values()
            for bucket in unit.buckets
        )
        trained = sum(
            bucket.layout.padded_shard_numel * itemsize(bucket.layout.dtype)
            for unit in units.values()
            for bucket in unit.buckets
            if bucket.trained
        )
        # Bytes held for each bucket by purpose, and their sums, together with memory that is held throughout.
        self._held: dict[str, dict[tuple[str, int], int]] = {purpose: {} for purpose in PASSING}
        self._memory = {"shards": shards, "optimizer": optimizer_states * trained} | dict.fromkeys(PASSING, 0)

    def bucket(self, event: Event) -> PlannedBucket | None:
        """The bucket of an event."""
        if event.kind == STEP:
            return None
        unit = self._units.get(event.unit)
        if unit is None or event.bucket >= len(unit.buckets):
            raise PlanError(
                f"the plan has an event of unit {event.unit!r}, bucket {event.bucket}, which is not among the units"
            )
        return unit.buckets[event.bucket]

    def snapshot(self) -> dict[str, int]:
        return dict(self._memory)

    def _hold(self, purpose: str, event: Event, num_bytes: int) -> None:
        """Set the bytes that are held for the event's bucket."""
        held, key = self._held[purpose], self._key(event)
        self._memory[purpose] += num_bytes - held.get(key, 0)
        held[key] = num_bytes

    def enter(self, event: Event, bucket: PlannedBucket | None) -> None:
        self._settle()
        if bucket is None:
            for purpose in ("sharded gradients", "full gradients", "reduction buffers"):
                self._clear(purpose)
            return
        layout, precision = bucket.layout, bucket.precision
        wide = itemsize(precision.gathered)
        if event.kind in (ALL_GATHER, CAST):
            self._hold("full parameters", event, layout.unsharded_numel * wide)
            # Over one rank the source of the copy is the shard itself, or its copy in low precision.
            lands = not layout.contiguous and (event.kind == ALL_GATHER or precision.is_mixed)
            landing = event.num_bytes if lands else 0
            cast_shard = layout.padded_shard_numel * wide if precision.is_mixed and event.kind == ALL_GATHER else 0
            self._hold("gather buffers", event, landing + cast_shard)
        elif event.kind == COMPUTE:
            self._hold("gather buffers", event, 0)
            if event.phase == "forward":
                self._hold_activations(event, 1)
            else:
                self._add_grads(event, bucket)
        elif event.kind == FREE:
            self._hold("full parameters", event, 0)
        elif event.kind == RESHARD_TO_GROUP:
            self._hold("full parameters", event, layout.gathered_numel * wide - event.num_bytes)
        elif event.kind in (REDUCE_SCATTER, ALL_REDUCE):
            self._reduce(event, bucket)

    def _add_grads(self, event: Event, bucket: PlannedBucket) -> None:
        """Add full gradients: new ones are in the dtype of compute, those that wait for a later microbatch in their own (R15)."""
        numel = sum(param.numel for param in bucket.layout.params if param.requires_grad)
        waiting = itemsize(bucket.precision.accumulated(self._api)) if self._key(event) in self._waiting else 0
        self._hold("full gradients", event, numel * (itemsize(bucket.precision.gathered) + waiting))
        self._computed.append((event, numel, bucket))

    def _settle(self) -> None:
        """Accumulate the gradients of the previous backward, and free the activations of its forward."""
        for event, numel, bucket in self._computed:
            self._hold_activations(event, -1)
            self._hold("full gradients", event, numel * itemsize(bucket.precision.accumulated(self._api)))
            self._waiting.add(self._key(event))
        self._computed = []

    def _key(self, event: Event) -> tuple[str, int]:
        return event.unit, event.bucket

    def _hold_activations(self, event: Event, num_more: int) -> None:
        """Hold those of so many more forwards of the event's unit."""
        if event.bucket == 0:
            self._num_ahead[event.unit] = self._num_ahead.get(event.unit, 0) + num_more
            each = self._activation_bytes.get(event.unit, 0)
            self._hold("activations", event, self._num_ahead[event.unit] * each)

    def _reduce(self, event: Event, bucket: PlannedBucket) -> None:
        """Start a reduction, which frees the buffers of the previous one."""
        layout, precision = bucket.layout, bucket.precision
        if event.kind == REDUCE_SCATTER or layout.world_size == 1:
            self._clear("reduction buffers")
            self._hold("full gradients", event, 0)
            self._waiting.discard(self._key(event))
            whole = event.num_bytes if event.kind == REDUCE_SCATTER else 0
            shard = layout.padded_shard_numel * itemsize(precision.reduced)
            self._hold("reduction buffers", event, whole + shard)
            self._hold("sharded gradients", event, layout.padded_shard_numel * itemsize(precision.kept))

    def _clear(self, purpose: str) -> None:
        self._memory[purpose] = 0
        self._held[purpose].clear()

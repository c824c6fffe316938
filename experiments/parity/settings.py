"""What a run is: everything that both frameworks must agree on before they start."""

import importlib.metadata
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.cli.option_values import MAX_PERTURBED_RUNS, check_perturbed_runs, check_size
from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.precision import PrecisionPolicy
from crossframe.quoting import quote
from crossframe.recording import Manifest, Schedule
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.known_settings import COMMAND, PER_RANK, TRAIN
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.recording.program import PROGRAM, with_digests
from crossframe.recording.recorded_steps import window_arguments
from crossframe.strategy import Strategy
from experiments.data import Batch
from experiments.faults.catalogue import check_fault
from experiments.models import ModelDefinition, model_named

DTYPES = ("float64", "float32", "bfloat16")
OPTIMIZERS = {"adamw": "AdamW", "sgd": "SGD"}
MOMENTUM = 0.9
STRATEGIES = tuple(strategy.value for strategy in Strategy if strategy is not Strategy.NO_SHARD)
DEVICES = ("auto", "cpu", "cuda")
# More processes than this on one machine's CPUs are a slip of the keyboard.
MAX_CPU_RANKS = 64
# Bounds of settings: what is within them starts at once and fits into a machine's memory.
BOUNDS = {
    "world_size": (1, 1024),
    "steps": (1, 10**7),
    "batch_size": (1, 2**16),
    "seed": (0, 2**32 - 1),
    "accumulate": (1, 1024),
    "perturbed_run": (0, MAX_PERTURBED_RUNS),
    "dense": (0, 10**7),
    "rounding": (0, 2**31 - 1),
}
MAX_SAMPLES = 2**16


@dataclass(frozen=True)
class RunSettings:
    """One training run.

    Attributes:
        batch_size: samples a rank and microbatch.
        strategy: value of `crossframe.plan.Strategy`. Hybrid ones need a mesh.
        mesh: "2x2" for two copies of the model, each over two ranks; "": one copy over all ranks.
        optimizer: "adamw", or "sgd" with momentum.
        clip: largest norm of the gradient; None: whatever it is.
        accumulate: microbatches of a step, of which the last one reduces what all have accumulated.
        device: "cpu", "cuda", or "auto": GPUs if there are enough, otherwise the CPU.
        fault: name of a fault to put in on purpose (`experiments.faults.catalogue`), or "".
        dtype: in which it computes. In bfloat16 parameters are stored, and gradients reduced, in float32 (R33).
        perturbed_run: 0, or the number of a perturbed run, which rounds differently (`crossframe.recording.perturbed_runs`).
        dense: so many steps at the beginning are recorded in full.
        windows: (start, stop) of further steps that are.
        resume_at: the step before which the run is given up and goes on from a checkpoint (`experiments.train.resume`); None: it
            runs through.
        rounding: 0, or one of many other orders of sums, in torch alone: not a perturbed run, since nothing else is moved.

    Raises:
        UsageError: anything out of range; the message names it.
    """

    model: str
    dtype: str = "float64"
    world_size: int = 2
    steps: int = 30
    seed: int = 0
    batch_size: int = 4
    learning_rate: float = 3e-4
    weight_decay: float = 0.01
    strategy: str = Strategy.FULL_SHARD.value
    device: str = "auto"
    fault: str = ""
    mesh: str = ""
    optimizer: str = "adamw"
    clip: float | None = None
    accumulate: int = 1
    perturbed_run: int = 0
    dense: int = 2
    windows: tuple[tuple[int, int], ...] = ()
    resume_at: int | None = None
    rounding: int = 0

    def __post_init__(self) -> None:
        model_named(self.model)
        for name, (least, most) in BOUNDS.items():
            check_size(name.replace("_", "-"), getattr(self, name), least, most)
        if self.batch_size * self.accumulate > MAX_SAMPLES:
            raise UsageError(
                f"batch-size: expected at most {MAX_SAMPLES} samples a rank and step, got {self.batch_size} in each of "
                f"{self.accumulate} microbatches; pass a smaller --batch-size or --accumulate"
            )
        if not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"learning-rate: expected a number above 0, got {self.learning_rate!r}")
        if self.clip is not None and not 0 < self.clip < float("inf"):
            raise UsageError(f"clip: expected a number above 0, got {self.clip!r}")
        if self.resume_at is not None and (type(self.resume_at) is not int or self.resume_at < 2):
            raise UsageError(f"resume-at: expected a step of at least 2, or none, got {quote(self.resume_at)}")
        if self.resume_at is not None and self.resume_at > self.steps:
            raise UsageError(f"resume-at: expected one of the {self.steps} steps, got {quote(self.resume_at)}")
        choices = (("dtype", DTYPES), ("device", DEVICES), ("strategy", STRATEGIES), ("optimizer", tuple(OPTIMIZERS)))
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise UsageError(f"{name}: expected one of {', '.join(allowed)}, got {quote(getattr(self, name))}")
        if self.spec.world_size != self.world_size:
            raise UsageError(
                f"mesh: {self.mesh} has {self.spec.world_size} ranks, and world-size says {self.world_size}"
            )
        if bool(self.mesh) != Strategy(self.strategy).is_hybrid:
            raise UsageError(
                f"mesh: a mesh and a hybrid strategy need each other, got {self.mesh or 'none'!r} and {self.strategy}; pass "
                "--mesh 2x2 --strategy hybrid_shard"
            )
        check_fault(self.fault)

    @property
    def definition(self) -> ModelDefinition:
        """The model."""
        return model_named(self.model)

    @property
    def spec(self) -> MeshSpec:
        """The grid of ranks."""
        return mesh_of(self.mesh) if self.mesh else MeshSpec(shard=self.world_size)

    @property
    def stored_dtype(self) -> str:
        """The dtype of parameters."""
        return "float32" if self.dtype == "bfloat16" else self.dtype

    @property
    def policy(self) -> PrecisionPolicy:
        """What is cast on the way (R33)."""
        if self.dtype == self.stored_dtype:
            return PrecisionPolicy()
        return PrecisionPolicy(param_dtype=self.dtype, reduce_dtype=self.stored_dtype, buffer_dtype=self.dtype)

    @property
    def initial_params(self) -> dict[str, np.ndarray]:
        """Initial values by canonical name; a perturbed run's are a unit in the last place away."""
        values = self.definition.initial_params(self.seed, self.stored_dtype)
        return {name: perturbed_values(name, value, self.perturbed_run) for name, value in values.items()}

    def batch(self, step: int, rank: int) -> Batch:
        """What a rank is fed at a step, all microbatches of it."""
        samples = self.batch_size * self.accumulate
        return self.definition.batch(self.seed, step, rank, self.world_size, samples, self.stored_dtype)

    def manifest(self, framework: str, packages: tuple[str, ...], program: Mapping[str, Any] | None = None) -> Manifest:
        """The manifest of a recording of this run.

        Args:
            packages: whose versions it states.
            program: what the framework's bits depend on (`crossframe.recording.program`); None: not known.

        Raises:
            UsageError: a fault of the other framework.
        """
        check_fault(self.fault, framework)
        return Manifest(
            framework=framework,
            model=self.model,
            dtype=self.dtype,
            mesh=self.spec,
            steps=self.steps,
            learning_rate=self.learning_rate,
            seed=self.seed,
            terms=self.batch_size * self.definition.terms,
            schedule=Schedule(self.dense, 5, self.windows),
            param_map=self.definition.param_map,
            units=self.definition.unit_layouts(self.spec.shard, self.stored_dtype, self.policy.param_dtype),
            strategy=self.strategy,
            versions={name: importlib.metadata.version(name) for name in packages},
            settings={
                "batch_size": self.batch_size,
                "optimizer": OPTIMIZERS[self.optimizer],
                "weight_decay": self.weight_decay,
                COMMAND: shlex.join([*TRAIN.split(), *self.arguments(framework)[1:]]),
            }
            | ({"momentum": MOMENTUM} if self.optimizer == "sgd" else {})
            | ({"clip": self.clip} if self.clip is not None else {})
            | ({"accumulate": self.accumulate} if self.accumulate > 1 else {})
            | ({PER_RANK: list(self.definition.per_rank_statistics)} if self.definition.per_rank_statistics else {})
            | ({PROGRAM: with_digests(program)} if program else {})
            | {name: value for name, value in asdict(self.policy).items() if isinstance(value, str)}
            | ({"resume_at": self.resume_at} if self.resume_at is not None else {})
            | ({"rounding": self.rounding} if self.rounding else {})
            | ({"fault": self.fault} if self.fault else {})
            | ({"perturbed_run": self.perturbed_run} if self.perturbed_run else {}),
        )

    def runs(self, output: Path, perturbed_runs: int) -> list[tuple["RunSettings", Path]]:
        """This run and so many perturbed runs of it, and where each is recorded.

        Raises:
            UsageError: a number of perturbed runs that says nothing.
        """
        check_perturbed_runs(perturbed_runs)
        others = [
            (replace(self, perturbed_run=i), output / perturbed_run_folder(i)) for i in range(1, perturbed_runs + 1)
        ]
        return [(self, output), *others]

    def arguments(self, framework: str) -> list[str]:
        """The command line that records this run, but for where to."""
        arguments = ["train", framework, self.model]
        for name, value in asdict(self).items():
            if name == "windows":
                arguments += window_arguments(self.windows)
            elif name not in ("model", "weight_decay", "perturbed_run") and value not in ("", None):
                arguments += [f"--{name.replace('_', '-')}", str(value)]
        return arguments


def mesh_of(text: str) -> MeshSpec:
    """The mesh that is written "2x2": copies of the model x ranks of each.

    Raises:
        UsageError: anything else.

    >>> mesh_of("2x3")
    MeshSpec(shard=3, replicate=2)
    """
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and len(size) < 10 and int(size) > 0 for size in sizes):
        raise UsageError(f"mesh: expected two numbers above 0, as in 2x2, got {quote(text)}")
    return MeshSpec(shard=int(sizes[1]), replicate=int(sizes[0]))


def choose_device(wanted: str, num_gpus: int, world_size: int) -> str:
    """ "cpu" or "cuda".

    Raises:
        UsageError: fewer devices than ranks.
    """
    if wanted == "cuda" and num_gpus < world_size:
        raise UsageError(
            f"world-size: {world_size} ranks need {world_size} GPUs, but there are {num_gpus}; pass --device cpu, or a "
            "smaller --world-size"
        )
    if wanted == "cuda" or (wanted == "auto" and num_gpus >= world_size):
        return "cuda"
    if world_size > MAX_CPU_RANKS:
        raise UsageError(
            f"world-size: expected at most {MAX_CPU_RANKS} ranks on one machine's CPUs, got {world_size} (and "
            f"{num_gpus} GPUs); pass a smaller --world-size"
        )
    return "cpu"

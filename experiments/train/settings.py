"""What a training run is, and which part of it may change when it is resumed."""

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from crossframe.errors import UsageError
from crossframe.quoting import quote
from crossframe.strategy import Strategy
from experiments.models import ModelDefinition, model_named

AUTO, NONE = "auto", "none"
CHOICES = {
    "api": ("fsdp1", "fsdp2"),
    "layout": ("per_param", "flat", "ragged"),
    "strategy": tuple(strategy.value for strategy in Strategy),
    "precision": ("float32", "bfloat16", "float64"),
    "device": ("auto", "cpu", "cuda"),
}
# These say how and where a run is computed. All others say what it computes.
HOW = frozenset(
    {
        "output",
        "api",
        "layout",
        "strategy",
        "shard",
        "micro_batch_size",
        "checkpoint_every",
        "async_save",
        "keep",
        "resume",
        "device",
    }
)


@dataclass(frozen=True)
class TrainSettings:
    """One training run.

    Attributes:
        output: folder of checkpoints and metrics, which all ranks see.
        api: the interface of torch_backend that shards the model.
        layout: how shards lie; None: as torch's do, "flat" under fsdp1, which has no other, and "per_param" under fsdp2.
        strategy: value of `crossframe.strategy.Strategy`.
        shard: under hybrid strategies, the ranks that hold one copy of the model; None: those of a machine.
        batch_size: samples of a step, on all ranks together, so that a step is the same on any number of ranks.
        micro_batch_size: samples of a rank in one forward; None: its whole part of the batch, without accumulation.
        warmup_steps: steps in which the learning rate rises, after which it falls along a cosine to a tenth.
        clip: largest norm of the gradient.
        precision: "bfloat16" computes in it, and stores and reduces float32. The others do all in one.
        dropout: probability with which an element behind an MLP is dropped.
        checkpoint_every: steps between checkpoints; the last step has one in any case.
        async_save: whether training continues while checkpoints are written.
        keep: how many of the newest checkpoints stay.
        resume: "auto": from the newest whole checkpoint in `output`, if there is one; "none"; or a checkpoint's folder.

    Raises:
        UsageError: anything out of range; the message names it.

    >>> TrainSettings(Path("runs/a"), batch_size=12, micro_batch_size=2).num_microbatches(world_size=3)
    2
    """

    output: Path
    model: str = "gpt"
    api: str = "fsdp2"
    layout: str | None = None
    strategy: str = Strategy.FULL_SHARD.value
    shard: int | None = None
    steps: int = 1000
    batch_size: int = 64
    micro_batch_size: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "float32"
    dropout: float = 0.0
    seed: int = 0
    checkpoint_every: int = 100
    async_save: bool = False
    keep: int = 2
    resume: str = AUTO
    device: str = "auto"

    def __post_init__(self) -> None:
        if model_named(self.model).context is None:
            raise UsageError(f"model: expected one of text, got {self.model!r}, which sees images; 'gpt' is one")
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed and (name, value) != ("layout", None):
                raise UsageError(f"{_flag(name)}: expected one of {', '.join(allowed)}, got {quote(value)}")
        if self.api == "fsdp1" and self.layout not in (None, "flat"):
            raise UsageError(f"--layout: fsdp1 has flat alone, got {self.layout}; pass --api fsdp2 for the others")
        least = {"steps": 1, "batch_size": 1, "warmup_steps": 0, "seed": 0, "checkpoint_every": 1, "keep": 1}
        optional = {name: 1 for name in ("shard", "micro_batch_size") if getattr(self, name) is not None}
        for name, smallest in (least | optional).items():
            value = getattr(self, name)
            if type(value) is not int or value < smallest:
                raise UsageError(f"{_flag(name)}: expected an integer of at least {smallest}, got {quote(value)}")
        for name, low, high in (
            ("learning_rate", 0.0, math.inf),
            ("weight_decay", 0.0, math.inf),
            ("clip", 0.0, math.inf),
            ("dropout", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not low <= value < high:
                raise UsageError(f"{_flag(name)}: expected a number from {low:g} to below {high:g}, got {quote(value)}")
        if self.shard is not None and not Strategy(self.strategy).is_hybrid:
            raise UsageError(f"--shard: only hybrid strategies shard in groups, got {self.shard} with {self.strategy}")

    @property
    def definition(self) -> ModelDefinition:
        """The model."""
        return model_named(self.model)

    @property
    def stored_dtype(self) -> str:
        """In which dtype parameters and optimizer state are stored, as torch calls it."""
        return "float64" if self.precision == "float64" else "float32"

    def rank_batch_size(self, world_size: int) -> int:
        """Samples of one rank at one step.

        Raises:
            UsageError: ranks that cannot have as many as each other.
        """
        if self.batch_size % world_size:
            raise UsageError(f"--batch-size: expected a multiple of the {world_size} ranks, got {self.batch_size}")
        return self.batch_size // world_size

    def num_microbatches(self, world_size: int) -> int:
        """Forwards and backwards of one rank at one step.

        Raises:
            UsageError: a batch that cannot be cut so.
        """
        samples = self.rank_batch_size(world_size)
        if self.micro_batch_size is None:
            return 1
        if samples % self.micro_batch_size:
            raise UsageError(
                f"--micro-batch-size: expected a divisor of the {samples} samples of a rank (--batch-size {self.batch_size} on "
                f"{world_size} ranks), got {self.micro_batch_size}"
            )
        return samples // self.micro_batch_size

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step, which is counted from 0: a line up, then half a cosine down to a tenth.

        >>> settings = TrainSettings(Path("runs/a"), steps=110, warmup_steps=10, learning_rate=1.0)
        >>> [round(settings.learning_rate_at(step), 3) for step in (0, 9, 10, 60, 109)]
        [0.1, 1.0, 1.0, 0.55, 0.1]
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))

    def what(self) -> dict[str, Any]:
        """What is computed, for a checkpoint to carry: how and where it is computed may change when it is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in HOW}

    def changes_from(self, saved: dict[str, Any]) -> list[str]:
        """In words, what is computed otherwise than in the run of a checkpoint.

        Raises:
            UsageError: another model, or parameters of another dtype, into which that checkpoint does not load.
        """
        now = self.what()
        changes = [
            f"{_flag(field.name)} {quote(saved.get(field.name))} is now {quote(now[field.name])}"
            for field in fields(self)
            if field.name in now and saved.get(field.name) != now[field.name]
        ]
        stored = "float64" if saved.get("precision") == "float64" else "float32"
        if saved.get("model") != self.model or stored != self.stored_dtype:
            raise UsageError(
                f"the checkpoint is of model {quote(saved.get('model'))} in {stored}, and this run of {self.model!r} in "
                f"{self.stored_dtype}; pass another --output, or the checkpoint's settings"
            )
        return changes


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

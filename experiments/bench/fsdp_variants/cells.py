"""Which runs are recorded, and which of them are compared.

A set of runs is one training: one model, one dtype, one setting of the optimizer, the same samples at each step. It is recorded
by every contestant on every number of ranks; one device is fed all samples at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from crossframe.errors import UsageError
from experiments.bench.contestants import BARE, DDP
from experiments.models import MODELS
from experiments.parity.settings import BOUNDS, DTYPES, RunSettings, check_size

THEIRS = ("torch FSDP1", "torch FSDP2", DDP)
OURS = ("our FSDP1", "our FSDP2")
CONTESTANTS = (*THEIRS, *OURS)
RANKS = (1, 2, 3, 4)
STEPS = 6
NUM_PERTURBED_RUNS = 4
# Samples of a step, on all ranks together: as many on each of 1, 2, 3 or 4, in one microbatch or two.
SAMPLES = 24
# Whose batch norm takes its statistics from what a rank is fed: on another number of ranks it is another function.
OF_A_RANK = ("conv",)

ADAMW, SGD = "adamw", "sgd, clipped, 2 microbatches"
SETTINGS: dict[str, dict] = {
    ADAMW: {"optimizer": "adamw", "learning_rate": 3e-4},
    # The bound lies below the norms that these models have at first, so that it clips.
    SGD: {"optimizer": "sgd", "learning_rate": 1e-2, "clip": 0.5, "accumulate": 2},
}


@dataclass(frozen=True)
class Run:
    """One recording.

    Attributes:
        contestant: one of CONTESTANTS, or BARE for one device.
        setting: one of SETTINGS.
        perturbed_runs: how many perturbed runs of it.
        fault: whether its gradients are summed instead of averaged, on purpose. Of DDP alone.
    """

    contestant: str
    model: str
    dtype: str
    world_size: int
    setting: str
    steps: int = STEPS
    perturbed_runs: int = 0
    fault: bool = False

    @property
    def settings(self) -> RunSettings:
        """The same in the terms of other experiments: batches, initial values, optimizer."""
        options = SETTINGS[self.setting]
        share = SAMPLES // self.world_size // options.get("accumulate", 1)
        return RunSettings(
            self.model,
            self.dtype,
            world_size=self.world_size,
            steps=self.steps,
            batch_size=share,
            device="cpu",
            **options,
        )

    @property
    def folder(self) -> str:
        """A name for the directory that it is recorded to."""
        words = (self.contestant, self.world_size, self.model, self.dtype, self.setting.partition(",")[0])
        return "-".join(str(word).replace(" ", "_") for word in words)

    def __str__(self) -> str:
        """What it is called beside others of its set."""
        if self.contestant == BARE:
            return "one device"
        return f"{self.contestant} on {self.world_size}"


def sets(
    models: Sequence[str], ranks: Sequence[int], dtypes: Sequence[str], settings: Sequence[str] = (), steps: int = STEPS
) -> list[list[Run]]:
    """The runs of each set; nothing given is all.

    Below float64, one device and DDP have perturbed runs. In bfloat16, which is computed in while parameters are stored and
    gradients reduced in float32, there are only contestants that can do so, and FSDP1 on one rank stands for one device.

    Raises:
        UsageError: a model, a number of ranks, a dtype or a setting that is unknown, or too few steps.
    """
    for what, given, known in (
        ("model", models, tuple(MODELS)),
        ("ranks", ranks, RANKS),
        ("dtype", dtypes, DTYPES),
        ("setting", settings, tuple(SETTINGS)),
    ):
        if strange := [str(each) for each in given if each not in known]:
            raise UsageError(f"{what}: expected among {', '.join(map(str, known))}, got {', '.join(strange)}")
    check_size("steps", steps, *BOUNDS["steps"])
    return [
        list(_runs(model, dtype, setting, sorted(set(ranks or RANKS)), steps))
        for dtype in dict.fromkeys(dtypes or ("float64", "float32"))
        for model in dict.fromkeys(models or MODELS)
        for setting in dict.fromkeys(settings or SETTINGS)
    ]


def _runs(model: str, dtype: str, setting: str, ranks: Sequence[int], steps: int) -> Iterator[Run]:
    perturbed_runs = 0 if dtype == "float64" else NUM_PERTURBED_RUNS
    mixes = dtype == "bfloat16"
    usual = Run("", model, dtype, 1, setting, steps)
    if not mixes:
        yield replace(usual, contestant=BARE, perturbed_runs=perturbed_runs)
    for world_size in ranks:
        for contestant in CONTESTANTS:
            if mixes and contestant == DDP:
                continue
            has_perturbed_runs = contestant == ("torch FSDP1" if mixes else DDP)
            yield replace(
                usual, contestant=contestant, world_size=world_size, perturbed_runs=perturbed_runs * has_perturbed_runs
            )


SAME, ALONE, WORLDS = "same ranks", "one device", "other ranks"


@dataclass(frozen=True)
class Both:
    """Two runs of a set.

    Attributes:
        kind: SAME, two contestants on as many ranks; ALONE, a contestant and one device; WORLDS, a contestant on as many ranks
            and on the next larger number of them.
    """

    kind: str
    a: Run
    b: Run

    @property
    def by_definition(self) -> bool:
        """Whether the two compute different functions, though they train the same model on the same samples."""
        return self.a.model in OF_A_RANK and self.a.world_size != self.b.world_size


def pairs(runs: Sequence[Run]) -> Iterator[Both]:
    """What is compared in a set. Below float64 a pair of which neither has perturbed runs is left out: both are compared with
    one that has, and without perturbed runs there is no verdict after the first update."""
    told = runs[0].dtype == "float64"
    alone = [run for run in runs if run.contestant == BARE]
    sharded = [run for run in runs if run.contestant != BARE]
    for a in alone:
        yield from (Both(ALONE, a, b) for b in sharded)
    for i, a in enumerate(sharded):
        others = sharded[i + 1 :]
        yield from (
            Both(SAME, a, b)
            for b in others
            if b.world_size == a.world_size and (told or a.perturbed_runs or b.perturbed_runs)
        )
        following = [b for b in others if b.contestant == a.contestant][:1]
        yield from (Both(WORLDS, a, b) for b in following if told or a.perturbed_runs or b.perturbed_runs)

"""The untouched cases: loads, expands and checks `faults.toml` and `clean.toml`."""

import ast
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from crossframe.errors import UsageError

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
NUM_FAULTS, NUM_CLEAN = 40, 200
DTYPES = ("float64", "float32", "bfloat16")
UNNAMED = "unnamed"


@dataclass(frozen=True)
class Run:
    """One run of a script.

    Attributes:
        script: name of the script, without .py.
        variant: names of the script's tables CLEAN and FAULTS, joined by +.
        dtype, seed, world: of the run; `world` is the number of ranks.
    """

    script: str
    variant: str
    dtype: str
    seed: int
    world: int

    @property
    def path(self) -> Path:
        return SCRIPTS / f"{self.script}.py"

    @property
    def variants(self) -> list[str]:
        """Names of variants that are joined by +."""
        return self.variant.split("+")

    @property
    def options(self) -> list[str]:
        """The script's command line."""
        return ["--variant", self.variant, "--dtype", self.dtype, "--seed", str(self.seed)]

    @property
    def is_jax(self) -> bool:
        """Whether the script records itself, as scripts of JAX do."""
        return self.script in ("linen_sets", "equinox_heat")


@dataclass(frozen=True)
class Fault:
    """A wrong run, the right run, and the expected answer.

    Attributes:
        what: what is wrong.
        dtypes: those in which it is run.
        perturbed: perturbed runs of the right run.
        source: "owner/repo#number" of a public thread, or "".
        verdicts: any of these is right.
        step: the first step at which it shows.
        places: patterns of "phase/event name" (`fnmatch`), where name is a module or a parameter; any of them is right. "" is
            no place at all.
        settings: names of settings; a reason that names one of them is located too.
        rank: where one rank alone is wrong.
        diagnosis: the name that it must get; "unnamed" where no name fits, and then names are not counted.
    """

    name: str
    what: str
    script: str
    right: str
    wrong: str
    dtypes: list[str]
    world: int
    perturbed: int
    source: str
    verdicts: list[str]
    step: int
    places: list[str]
    diagnosis: str
    settings: list[str] = field(default_factory=list)
    rank: int | None = None

    def runs(self, dtype: str) -> tuple[Run, Run]:
        """The right run and the wrong one."""
        return Run(self.script, self.right, dtype, 0, self.world), Run(self.script, self.wrong, dtype, 0, self.world)


@dataclass(frozen=True)
class CleanPair:
    """Two runs that compute the same in exact arithmetic.

    Attributes:
        a, b: the runs; `a` has the perturbed runs.
        expected: any of these verdicts is right.
    """

    name: str
    a: Run
    b: Run
    perturbed: int
    expected: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """A row of `clean.toml`: `base` against each of `others`, over ranks, dtypes and seeds."""

    name: str
    script: str
    base: str
    others: list[str]
    world: int
    other_worlds: list[int]
    dtypes: list[str]
    seeds: list[int]
    perturbed: int
    expected: list[str]

    def pairs(self) -> list[CleanPair]:
        """The pairs of the axis."""
        return [
            CleanPair(
                f"{self.name}/{other}/{world}/{dtype}/{seed}",
                Run(self.script, self.base, dtype, seed, self.world),
                Run(self.script, other, dtype, seed, world),
                self.perturbed,
                tuple(self.expected),
            )
            for other in self.others
            for world in self.other_worlds
            for dtype in self.dtypes
            for seed in self.seeds
        ]


def faults() -> list[Fault]:
    """All faults."""
    return [Fault(**row) for row in _table("faults.toml")["fault"]]


def clean_pairs() -> list[CleanPair]:
    """All clean pairs."""
    return [pair for row in _table("clean.toml")["axis"] for pair in Axis(**row).pairs()]


def runs() -> list[Run]:
    """Every run of every case, each once."""
    found = [run for fault in faults() for dtype in fault.dtypes for run in fault.runs(dtype)]
    return list(dict.fromkeys([*found, *(run for pair in clean_pairs() for run in (pair.a, pair.b))]))


@cache
def variants_of(script: str) -> dict[str, dict[str, str]]:
    """The tables CLEAN and FAULTS of a script, read without running it."""
    tree = ast.parse((SCRIPTS / f"{script}.py").read_text())
    return {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("CLEAN", "FAULTS")
    }


def check() -> None:
    """Raise UsageError unless there are as many cases as stated, with unique names, and every run's script and variants exist."""
    names = [fault.name for fault in faults()], [pair.name for pair in clean_pairs()]
    if (len(names[0]), len(names[1])) != (NUM_FAULTS, NUM_CLEAN):
        raise UsageError(f"untouched cases: expected {NUM_FAULTS} and {NUM_CLEAN}, got {[len(each) for each in names]}")
    for each in names:
        if len(set(each)) != len(each):
            raise UsageError(f"untouched cases: names occur twice: {sorted({n for n in each if each.count(n) > 1})}")
    for run in runs():
        if run.dtype not in DTYPES or not run.path.is_file():
            raise UsageError(f"untouched cases: no such script or dtype: {run}")
        tables = variants_of(run.script)
        if unknown := set(run.variants) - tables["CLEAN"].keys() - tables["FAULTS"].keys():
            raise UsageError(f"untouched cases: {run.script} has no variants {sorted(unknown)}")
    for pair in clean_pairs():
        for run in (pair.a, pair.b):
            if set(run.variants) & variants_of(run.script)["FAULTS"].keys():
                raise UsageError(f"untouched cases: clean pair {pair.name} has a fault")


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((HERE / name).read_text())

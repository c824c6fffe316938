"""`python -m experiments clean-pairs`: runs that are right, compared with one another, and how often that is called a bug.

A set of runs is one training: one model, dtype and seed, the same samples at each step. It is recorded in both frameworks, on
several numbers of ranks, under several strategies, and with sums in other orders. Some of the recordings have perturbed runs;
each of them is compared with all others. So a few recordings make many pairs.
"""

import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from crossframe.verdict.perturbed_runs.spread import FALSE_POSITIVE_RATE
from experiments.faults.catalogue.fault import ALL_DTYPES, JAX, TORCH
from experiments.faults.judging import loss_differs, parameters_close, place_of
from experiments.faults.run import NUM_PERTURBED_RUNS, Recorders
from experiments.parity.settings import DTYPES, RunSettings, mesh_of

MODELS = ("gpt-tiny", "llama-tiny", "mlp", "conv", "vit", "moe")
# In float64 bounds are known beforehand: some models are enough.
IN_FLOAT64 = ("gpt-tiny", "conv")
SEEDS = {"gpt-tiny": (0, 1)}
STEPS = 5
# Samples of a step, on all ranks together: as many on each of 1, 2, 3 or 4.
SAMPLES = 12
# Whose batch norm takes its statistics from what a rank is fed: another number of ranks is another training.
OF_A_RANK = ("conv",)
# Orders of sums that no perturbed run has.
ROUNDINGS = (1001, 1002)


@dataclass(frozen=True)
class Run:
    """One of the recordings of a set."""

    framework: str
    settings: RunSettings
    perturbed_runs: bool = False


@dataclass(frozen=True)
class Pair:
    """What became of two right runs.

    Attributes:
        kind: in what they differ.
        a, b: what they are.
        verdict, why, place: of the comparison.
        sketched: the verdict by sketches of everything large.
        by_allclose: whether final parameters are too far apart for torch.testing.assert_close.
        by_loss: whether losses differ by more than a hundredth at any step.
    """

    model: str
    dtype: str
    kind: str
    a: str
    b: str
    verdict: str
    sketched: str
    by_allclose: bool
    by_loss: bool
    place: str
    why: str


def runs_of(model: str, dtype: str, seed: int) -> list[Run]:
    """The recordings of one training."""

    def settings(ranks: str, strategy: str, rounding: int = 0) -> RunSettings:
        mesh = ranks if "x" in ranks else ""
        world_size = mesh_of(mesh).world_size if mesh else int(ranks)
        return RunSettings(
            model,
            dtype,
            world_size=world_size,
            steps=STEPS,
            seed=seed,
            batch_size=SAMPLES // world_size,
            strategy=strategy,
            device="cpu",
            mesh=mesh,
            rounding=rounding,
        )

    spread = dtype != "float64"
    return [
        Run(JAX, settings("2", "full_shard"), spread),
        Run(TORCH, settings("2", "full_shard"), spread),
        Run(TORCH, settings("2x2", "hybrid_shard"), spread),
        Run(TORCH, settings("1", "full_shard")),
        Run(TORCH, settings("2", "shard_grad_op")),
        *(Run(TORCH, settings("2", "full_shard", rounding)) for rounding in ROUNDINGS),
        Run(TORCH, settings("3", "full_shard")),
        Run(TORCH, settings("4", "shard_grad_op")),
        Run(JAX, settings("1", "full_shard")),
        Run(JAX, settings("4", "full_shard")),
        Run(JAX, settings("2x2", "hybrid_shard_zero2")),
    ]


def pairs_of(runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    """Each of the first three runs, which have perturbed runs below float64, with every later one."""
    for i, first in enumerate(runs[:3]):
        for second in runs[i + 1 :]:
            same = first.settings.world_size == second.settings.world_size
            if same or first.settings.model not in OF_A_RANK:
                yield first, second


def kind_of(a: Run, b: Run) -> str:
    """In what two runs differ, in words."""
    differences = (
        ("framework", a.framework != b.framework),
        ("ranks", a.settings.world_size != b.settings.world_size),
        ("mesh", a.settings.world_size == b.settings.world_size and a.settings.mesh != b.settings.mesh),
        ("strategy", a.framework == b.framework and a.settings.strategy != b.settings.strategy),
        ("order of sums", a.settings.rounding != b.settings.rounding),
    )
    found = " and ".join(name for name, differs in differences if differs)
    alone = a.framework != b.framework and a.framework == TORCH and a.perturbed_runs and not b.perturbed_runs
    return f"{found} (perturbed runs of torch alone)" if alone else found


def label(run: Run) -> str:
    """What a run is, in few words."""
    s = run.settings
    rounding = f", order {s.rounding}" if s.rounding else ""
    return f"{run.framework} {s.mesh or s.world_size} {s.strategy}, seed {s.seed}{rounding}"


def run_clean(
    models: Sequence[str],
    dtypes: Sequence[str],
    *,
    seeds: Sequence[int],
    output: Path | None,
    keep: Path | None,
    console: Console,
) -> int:
    """Compare all pairs and print how many were called what; 0 if none was called a bug.

    Args:
        models, dtypes: none: all.
        seeds: of the trainings; none: those of `SEEDS`, and 0.
        output: a Markdown file for the table, and beside it JSON.
        keep: a folder in which recordings stay; None: nothing stays.

    Raises:
        UsageError: an unknown model or dtype, or a run that failed.
    """
    for what, given, known in (("model", models, MODELS), ("dtype", dtypes, DTYPES)):
        if strange := [each for each in given if each not in known]:
            raise UsageError(f"{what}: expected among {', '.join(known)}, got {', '.join(strange)}")
    began, done = time.monotonic(), []
    for dtype in dtypes or ALL_DTYPES:
        chosen = [model for model in models or MODELS if dtype != "float64" or model in IN_FLOAT64 or models]
        sets = [runs_of(model, dtype, seed) for model in chosen for seed in seeds or SEEDS.get(model, (0,))]
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) if keep is None else keep / dtype
            where = _record(sets, dtype, folder, console)
            for runs in sets:
                # One set's recordings at a time: what was measured of perturbed runs is kept as long as a recording is.
                opened = {run: Recording.open(where[run]) for run in runs}
                for a, b in pairs_of(runs):
                    done.append(_compared(a, b, opened[a], opened[b]))
                    _show(done[-1], console)
                if keep is None:
                    for run in runs:
                        shutil.rmtree(where[run])
                if output is not None:
                    _write(output, done, time.monotonic() - began)
    console.print(_text(done, time.monotonic() - began), markup=False, highlight=False, soft_wrap=True)
    return int(any(pair.verdict == Verdict.BUG.value for pair in done))


def _record(sets: Sequence[Sequence[Run]], dtype: str, folder: Path, console: Console) -> dict[Run, Path]:
    """Record all runs, those of one framework and number of ranks one behind the other."""
    runs = sorted(
        (run for each in sets for run in each),
        key=lambda run: (run.framework, run.settings.world_size, run.settings.model),
    )
    where = {run: folder / f"run{i:04d}" for i, run in enumerate(runs)}
    with Recorders(dtype) as recorders:
        for run, path in where.items():
            recorders.record(run.framework, run.settings, path, NUM_PERTURBED_RUNS if run.perturbed_runs else 0)
    console.print(f"{dtype}: {len(runs)} runs recorded", highlight=False)
    return where


def _compared(a: Run, b: Run, first: Recording, second: Recording) -> Pair:
    said, sketched = compare(first, second), compare(first, second, sketched=True)
    return Pair(
        a.settings.model,
        a.settings.dtype,
        kind_of(a, b),
        label(a),
        label(b),
        said.verdict.value,
        sketched.verdict.value,
        not parameters_close(first, second),
        loss_differs(first, second),
        place_of(said),
        said.reason,
    )


def _show(pair: Pair, console: Console) -> None:
    if pair.verdict not in (Verdict.EQUAL.value, Verdict.ROUNDING.value) or pair.sketched != pair.verdict:
        by_sketches = f"{pair.sketched} by sketches, " if pair.sketched != pair.verdict else ""
        said = f"{pair.model} {pair.dtype}: {pair.a} against {pair.b}: {by_sketches}{pair.verdict}: {pair.why}"
        console.print(said, markup=False, highlight=False, soft_wrap=True)


HEAD = ("differ in", "dtype", "pairs", "equal", "rounding", "inconclusive", "bug", "by allclose", "by losses")


def _text(done: Sequence[Pair], seconds: float) -> str:
    """The table, with what is expected beside it."""
    false = [pair for pair in done if pair.verdict == Verdict.BUG.value]
    measured = [pair for pair in done if pair.dtype != "float64"]
    lines = [
        "# Pairs of right runs",
        "",
        f"{len(done)} pairs in {seconds / 60:.0f} minutes: {len(false)} called a bug. The false-positive rate of a comparison "
        f"with perturbed runs is {FALSE_POSITIVE_RATE:g}: {FALSE_POSITIVE_RATE * len(measured):.2f} of {len(measured)} pairs. "
        "The last two columns count the pairs whose final parameters fail torch.testing.assert_close, and those with a loss that "
        "differs by more than 1 %. With sketches of all large tensors, the verdict is the same for "
        f"{sum(pair.sketched == pair.verdict for pair in done)} pairs.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + " --- |" * len(HEAD),
    ]
    for (kind, dtype), pairs in _grouped(done).items():
        count = Counter(pair.verdict for pair in pairs)
        cells = [kind, dtype, len(pairs), *(count[verdict] for verdict in HEAD[3:7])]
        cells += [sum(pair.by_allclose for pair in pairs), sum(pair.by_loss for pair in pairs)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if false:
        lines += ["", "## Called a bug", ""]
        lines += [
            f"- {pair.model}, {pair.dtype}: {pair.a} against {pair.b}: {pair.place}: {pair.why}" for pair in false
        ]
    return "\n".join(lines) + "\n"


def _grouped(done: Sequence[Pair]) -> dict[tuple[str, str], list[Pair]]:
    found: dict[tuple[str, str], list[Pair]] = {}
    for pair in sorted(done, key=lambda pair: (pair.kind, pair.dtype)):
        found.setdefault((pair.kind, pair.dtype), []).append(pair)
    return found


def _write(output: Path, done: Sequence[Pair], seconds: float) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(_text(done, seconds))
    output.with_suffix(".json").write_text(json.dumps([asdict(pair) for pair in done], indent=1) + "\n")

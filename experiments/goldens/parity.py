"""Checks this repository's own training against a golden in `results`: a parity run in both frameworks.

`python -m experiments goldens --parity` checks, as `make parity` does, and `--record-parity` records the golden again.
"""

import tempfile
from pathlib import Path

from rich.console import Console

from crossframe.baseline import condense
from crossframe.cli.baseline import PERTURBED_RUNS
from crossframe.cli.compare import answer
from crossframe.cli.machine_output import TEXT_ONLY, MachineOutput
from crossframe.recording import Recording
from experiments.faults.catalogue.fault import JAX, TORCH
from experiments.faults.run import Recorders
from experiments.parity.settings import RunSettings

GOLDEN = Path(__file__).parent / "results" / "parity.golden"
SETTINGS = RunSettings("gpt-tiny", "float32", world_size=2, steps=4, dense=2, device="cpu")
_MOST_BYTES = 100_000


def record_parity(console: Console) -> None:
    """Record the golden in torch."""
    with tempfile.TemporaryDirectory() as temporary, Recorders(SETTINGS.dtype) as recorders:
        path = Path(temporary, "parity")
        recorders.record(TORCH, SETTINGS, path, PERTURBED_RUNS)
        run = Recording.open(path)
        golden = condense(run, run.perturbed_runs(), most_bytes=_MOST_BYTES)
    golden.write(GOLDEN)
    console.print(f"{GOLDEN}: {GOLDEN.stat().st_size / 1000:.0f} kB, {golden.num_sums} sums in each sketch")


def check_parity(console: Console, machine: MachineOutput = TEXT_ONLY) -> int:
    """Train in torch and in JAX, and compare both runs with the golden; returns the exit status of the verdict."""
    golden = Recording.open(GOLDEN)
    with tempfile.TemporaryDirectory() as temporary, Recorders(SETTINGS.dtype) as recorders:
        paths = [Path(temporary, framework) for framework in (TORCH, JAX)]
        for path in paths:
            recorders.record(path.name, SETTINGS, path)
        pairs = [(golden, Recording.open(path)) for path in paths]
        return answer(pairs, None, bitwise=False, machine=machine, file=GOLDEN, console=console)

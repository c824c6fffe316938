"""`python -m experiments bench fsdp-variants`: record every contestant, compare, say what came of it."""

import json
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.recording import Recording
from experiments.bench.command import command_line, torch_machine, torch_machine_line
from experiments.bench.fsdp_variants.cells import STEPS, Run, pairs, sets
from experiments.bench.fsdp_variants.judge import ANOTHER, Failure, Judged, judged
from experiments.bench.fsdp_variants.record import record_all
from experiments.bench.fsdp_variants.table import counts, markdown
from experiments.bench.ranks import GLOO, on_ranks


def run_fsdp_variants(
    console: Console,
    *,
    models: Sequence[str] = (),
    ranks: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    settings: Sequence[str] = (),
    steps: int = STEPS,
    output: Path | None = None,
    keep: Path | None = None,
) -> int:
    """Record and compare all sets; 0 if every pair agrees or is another function by definition, 1 if one does not.

    Args:
        models, ranks, dtypes, settings: as in `sets`: none is all.
        output: a Markdown file for the tables, and beside it JSON. What stands there of other sets stays.
        keep: a folder in which recordings stay; None: nothing stays.

    Raises:
        UsageError: as `sets`, or a rank that did not end.
    """
    chosen, began = sets(models, ranks, dtypes, settings, steps), time.monotonic()
    where = torch_machine()
    done: list[Judged] = []
    failures: list[Failure] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if keep is None else keep
        failed = _record(chosen, folder, console)
        failures += [Failure(run.model, run.dtype, run.setting, str(run), said) for run, said in failed.items()]
        for runs in chosen:
            opened = {run: None if run in failed else Recording.open(folder / run.folder) for run in runs}
            for both in pairs(runs):
                done.append(judged(both, opened[both.a], opened[both.b]))
                _show(done[-1], console)
            if keep is None:
                for run in runs:
                    shutil.rmtree(folder / run.folder, ignore_errors=True)
            if output is not None:
                _write(output, where, done, failures)
    for each in failures:
        console.print(f"failed: {each}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(done)} pairs in {time.monotonic() - began:.0f} s: {counts(done)}", highlight=False)
    return int(bool(failures) or any(not pair.is_fine and pair.verdict != ANOTHER for pair in done))


def _record(chosen: Sequence[Sequence[Run]], folder: Path, console: Console) -> dict[Run, str]:
    """Record all runs, those of one number of ranks by the same processes; returns what went wrong, by run."""
    failed: dict[Run, str] = {}
    every = [run for runs in chosen for run in runs]
    for world_size in sorted({run.world_size for run in every}):
        runs, began = [run for run in every if run.world_size == world_size], time.monotonic()
        said = zip(*on_ranks(world_size, GLOO, record_all, runs, str(folder)), strict=True)
        for run, of_ranks in zip(runs, said, strict=True):
            if errors := [each for each in of_ranks if each is not None]:
                failed[run] = errors[0]
        seconds = time.monotonic() - began
        console.print(f"{len(runs)} runs on {world_size} ranks recorded in {seconds:.0f} s", highlight=False)
    return failed


def _show(pair: Judged, console: Console) -> None:
    if not pair.is_fine and pair.verdict != ANOTHER:
        said = f"{pair.model} {pair.dtype} {pair.setting}: {pair.a} against {pair.b}: {pair.verdict}: {pair.why}"
        console.print(said, markup=False, highlight=False)


def _write(output: Path, where: dict[str, Any], done: Sequence[Judged], failures: Sequence[Failure]) -> None:
    """Write what was found, beside what an earlier command found of other sets and wrote there."""
    beside = output.with_suffix(".json")
    report: dict[str, Any] = json.loads(beside.read_text()) if beside.exists() else {}
    ran = f"`{command_line()}`: {torch_machine_line(where)}"
    commands = [each for each in report.get("commands", []) if each != ran] + [ran]
    sets_done = {pair.of for pair in done}
    pairs_known = [each for fields in report.get("pairs", []) if (each := Judged(**fields)).of not in sets_done]
    failures_known = [each for fields in report.get("failures", []) if (each := Failure(**fields)).of not in sets_done]
    every = sorted([*pairs_known, *done], key=lambda pair: pair.of)
    failed = [*failures_known, *(each for each in failures if each.of in sets_done)]
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(markdown(every, failed, commands))
    beside.write_text(_as_json({"commands": commands, "failures": map(asdict, failed), "pairs": map(asdict, every)}))


def _as_json(lists: dict[str, Iterable[Any]]) -> str:
    """Lists by name as JSON, an item a line.

    >>> _as_json({"a": [1, 2], "b": []})
    '{"a": [\\n1,\\n2\\n], "b": [\\n\\n]}\\n'
    """
    parts = (f'"{name}": [\n' + ",\n".join(map(json.dumps, items)) + "\n]" for name, items in lists.items())
    return "{" + ", ".join(parts) + "}\n"

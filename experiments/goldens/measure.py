"""`python -m experiments goldens`: faults of the catalogue and harmless changes, checked against goldens of at most 200 kB."""

import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.baseline import condense
from crossframe.cli.baseline import MAX_KB, PERTURBED_RUNS, Options
from crossframe.cli.console import PlainConsole
from crossframe.cli.fixture import InProcess
from crossframe.cli.training_command import TrainingCommand
from crossframe.errors import UsageError
from crossframe.recording import Recording, Schedule
from crossframe.verdict import PairVerdict, compare
from experiments.faults.catalogue import FAULTS, Fault
from experiments.faults.judging import place_of
from experiments.faults.run import Recorders, settings_of
from experiments.goldens.parity import GOLDEN, SETTINGS
from experiments.parity.settings import RunSettings

DTYPE = "float32"
OTHER_PACKAGES = "CROSSFRAME_OTHER_PACKAGES"
"""The environment variable with a folder of other versions of packages, for the changes that have them."""
SCRIPT = Path(__file__).with_name("training.py")


@dataclass(frozen=True)
class Checked:
    """What a check said.

    Attributes:
        name: of the fault or the change.
        expected: the right verdict; "agree" for harmless changes.
        verdict: the verdict, or "failed".
        right: whether it is the right one.
        kb: size of the golden.
        num_sums: sums of each of its sketches.
    """

    name: str
    expected: str
    verdict: str
    right: bool
    kb: float
    num_sums: int
    place: str
    why: str
    seconds: float


def measure_faults(
    names: Sequence[str], num: int | None, framework: str | None, output: Path, console: Console
) -> None:
    """Check faults against goldens of clean runs in the same framework, in an order drawn once.

    Faults in the parity run come first, since its golden in torch is there already.

    Args:
        names: only these; none: all.
        num: only the first so many in this order; None: all.
        framework: only faults of this framework; None: all.
        output: JSON file, rewritten after each fault. Faults that it has keep their first answers.
    """
    chosen = [each for each in FAULTS.values() if DTYPE in each.dtypes and framework in (None, each.frameworks[0])]
    _check_names("fault", names, [fault.name for fault in chosen])
    done = _answers(output)
    known = {each["name"] for each in done}
    random.Random(0).shuffle(chosen)
    chosen = [fault for fault in chosen if not names or fault.name in names]

    def order(fault: Fault) -> tuple[bool, int, str]:
        """As few processes as possible are started."""
        return not _is_parity(_clean(fault)), settings_of(fault, DTYPE).world_size, fault.frameworks[0]

    chosen = sorted((fault for fault in chosen[:num] if fault.name not in known), key=order)
    with tempfile.TemporaryDirectory() as temporary, Recorders(DTYPE) as recorders:
        goldens: dict[tuple[str, RunSettings], Recording] = {}
        for fault in chosen:
            done.append(asdict(_fault(fault, recorders, goldens, Path(temporary, fault.name))))
            _tell(done, output, console)


def _clean(fault: Fault) -> RunSettings:
    return replace(settings_of(fault, DTYPE), fault="", resume_at=None)


def _is_parity(settings: RunSettings) -> bool:
    return replace(settings, steps=SETTINGS.steps, dense=SETTINGS.dense) == SETTINGS


def _fault(
    fault: Fault, recorders: Recorders, goldens: dict[tuple[str, RunSettings], Recording], path: Path
) -> Checked:
    began, golden = time.monotonic(), None
    try:
        framework, settings = fault.frameworks[0], settings_of(fault, DTYPE)
        clean = _clean(fault)
        if _is_parity(clean):
            goldens[framework, clean] = Recording.open(GOLDEN)
        if (framework, clean) not in goldens:
            at = path.with_name(f"clean-{len(goldens)}")
            recorders.record(framework, clean, at, PERTURBED_RUNS)
            run = Recording.open(at)
            condense(run, run.perturbed_runs(), most_bytes=1000 * MAX_KB).write(at.with_suffix(".golden"))
            goldens[framework, clean] = Recording.open(at.with_suffix(".golden"))
        golden = goldens[framework, clean]
        recorders.record(framework, settings, path)
        said = compare(golden, Recording.open(path), bitwise=False)
    except Exception as error:  # one that fails is no reason not to go on with the others
        return _checked(fault.name, fault.answer.verdict, None, golden, f"{type(error).__name__}: {error}", began)
    return _checked(fault.name, fault.answer.verdict, said, golden, said.reason, began)


def measure_harmless(names: Sequence[str], output: Path, console: Console) -> None:
    """Check harmless changes against the golden of one run.

    Args:
        names: none: all.
        output: JSON file, rewritten after each change. Changes that it has keep their first answers.
    """
    from experiments.goldens.training import CHANGES, Change, train

    _check_names("change", names, list(CHANGES))
    options = Options(Schedule(2, 1), "torch")
    done = _answers(output)
    chosen = [name for name in names or CHANGES if name not in {each["name"] for each in done}]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        first = InProcess(lambda: train(Change()), "goldens").record(options, folder / "first", PERTURBED_RUNS)
        condense(first, first.perturbed_runs(), most_bytes=1000 * MAX_KB).write(folder / "first.golden")
        golden = Recording.open(folder / "first.golden")
        for name in chosen:
            change, began = CHANGES[name], time.monotonic()
            try:
                if change.world_size > 1 or change.packages:
                    run = _in_processes(name, change, options, folder / name)
                else:
                    run = InProcess(lambda change=change: train(change), "goldens").record(options, folder / name, 0)
                said = compare(golden, run, bitwise=False)
                checked = _checked(name, "agree", said, golden, said.reason, began)
            except Exception as error:
                checked = _checked(name, "agree", None, golden, f"{type(error).__name__}: {error}", began)
            done.append(asdict(checked))
            _tell(done, output, console)


def _in_processes(name: str, change: object, options: Options, folder: Path) -> Recording:
    world_size = change.world_size  # type: ignore[attr-defined]
    command = TrainingCommand(SCRIPT, (name,), nproc_per_node=world_size if world_size > 1 else None)
    before = os.environ.get("PYTHONPATH")
    if change.packages:  # type: ignore[attr-defined]
        if OTHER_PACKAGES not in os.environ:
            raise UsageError(f"set {OTHER_PACKAGES} to a folder with other versions of packages")
        os.environ["PYTHONPATH"] = os.environ[OTHER_PACKAGES]
    try:
        return options.record(command, folder, 0, PlainConsole(stderr=True))
    finally:
        if before is None:
            os.environ.pop("PYTHONPATH", None)
        else:
            os.environ["PYTHONPATH"] = before


def _check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    if strange := [name for name in names if name not in known]:
        raise UsageError(f"{what}: expected among {', '.join(known)}, got {', '.join(strange)}")


def _answers(output: Path) -> list[dict[str, Any]]:
    return json.loads(output.read_text()) if output.exists() else []


def _checked(
    name: str, expected: str, said: PairVerdict | None, golden: Recording | None, why: str, began: float
) -> Checked:
    verdict = "failed" if said is None else said.verdict.value
    right = said is not None and (said.verdict.agrees if expected == "agree" else verdict == expected)
    size = golden.directory.stat().st_size / 1000 if golden is not None else 0.0
    num_sums = golden.golden.num_sums if golden is not None and golden.golden is not None else 0
    place = "" if said is None else place_of(said)
    return Checked(name, expected, verdict, right, size, num_sums, place, why, time.monotonic() - began)


def _tell(done: Sequence[dict[str, Any]], output: Path, console: Console) -> None:
    last, right = done[-1], sum(each["right"] for each in done)
    console.print(
        f"{last['name']:28} {last['verdict']:14} {'right' if last['right'] else 'WRONG':6} {right} of {len(done)}  "
        f"{last['kb']:.0f} kB, {last['num_sums']} sums  {last['place'] if last['right'] else last['why']}"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(done, indent=1) + "\n")

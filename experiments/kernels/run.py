"""`python -m experiments kernels`: each fault put into a program, and the operator and line that `explain` names for it."""

import json
import os
import runpy
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from crossframe.cli.explain import explained, request_of
from crossframe.cli.record import script_command
from crossframe.cli.training_command import TrainingCommand
from crossframe.errors import CrossframeError, UsageError
from crossframe.operators import Finding, Operator, Request, Trace, find
from crossframe.operators.request import TRACE_NAME
from crossframe.operators.target import Target, target_of
from crossframe.processes import run
from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD
from crossframe.recording.known_settings import COMMAND
from crossframe.verdict import compare
from experiments.kernels.backends import BACKEND_FAULTS, BackendFault
from experiments.kernels.faults import FAULTS, JAX, TORCH, KernelFault, path_of, text_of
from torch_backend.recorder.script import run as record_script

FUSED, COMPILED = "torch_fused", "torch_compiled"
TIMEOUT = 500.0


@dataclass(frozen=True)
class Pair:
    """Which programs are compared.

    Attributes:
        right, faulty: the program without a fault and the one that gets it.
        num_ranks: of programs of torch.
        wrapped: whether these are wrapped in DistributedDataParallel (fused) and FSDP.
    """

    name: str
    right: str
    faulty: str
    dtype: str
    num_ranks: int = 1
    wrapped: bool = False

    @property
    def arguments(self) -> list[str]:
        """Of programs of torch."""
        return [self.dtype, *(["wrapped"] if self.wrapped else [])]


PAIRS = (
    Pair("torch", TORCH, TORCH, "float32"),
    Pair("jax", JAX, JAX, "float32"),
    Pair("ddp-fsdp", FUSED, TORCH, "float64", wrapped=True),
    Pair("ddp-fsdp-2", FUSED, TORCH, "float64", 2, wrapped=True),
    Pair("torch-jax", TORCH, JAX, "float64"),
    Pair("fused-jax", FUSED, JAX, "float64"),
)


@dataclass(frozen=True)
class Answer:
    """What was said of a fault.

    Attributes:
        found: whether an operator of either side was named.
        located: whether the faulty side's is in the line that was changed.
        said: operator and line of the faulty side, or why there is none.
        expected: the line.
        seconds: that explain took.
    """

    fault: str
    pair: str
    found: bool
    located: bool
    said: str
    expected: str
    seconds: float


def run_kernels(
    names: Sequence[str], pairs: Sequence[str], *, output: Path | None, keep: Path | None, console: Console
) -> int:
    """Explain each fault, and print and write the table; 0 if all were found.

    Args:
        names, pairs: none: all.
        output: a Markdown file; beside it the same as JSON.
        keep: a folder in which programs and recordings stay.

    Raises:
        UsageError: an unknown fault or pair; a program without a fault that cannot be recorded.
    """
    all_names = [fault.name for fault in (*FAULTS, *BACKEND_FAULTS)]
    for given, known in ((names, all_names), (pairs, [*(pair.name for pair in PAIRS), "compiled"])):
        if unknown := set(given) - set(known):
            raise UsageError(f"kernels: expected among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    answers = []
    with tempfile.TemporaryDirectory(prefix="crossframe-kernels-") as temporary:
        folder = (keep or Path(temporary)).resolve()

        def add(answer: Answer) -> None:
            answers.append(answer)
            console.print(_line(answer), highlight=False, soft_wrap=True)
            if output is not None:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_text(table(answers))
                objects = [asdict(each) for each in answers]
                output.with_suffix(".json").write_text(json.dumps(objects, indent=1) + "\n")

        for pair in PAIRS:
            if pairs and pair.name not in pairs:
                continue
            right = _recorded(pair.right, path_of(pair.right), pair, folder / pair.name / "right")
            for fault in FAULTS:
                if names and fault.name not in names:
                    continue
                add(_answer(fault, pair, right, folder / pair.name / fault.name))
        if not pairs or "compiled" in pairs:
            for fault in (each for each in BACKEND_FAULTS if not names or each.name in names):
                add(_compiled_answer(fault, folder / "compiled" / fault.name))
    console.print(summary(answers), highlight=False)
    return 0 if all(answer.found for answer in answers) else 1


def _recorded(program: str, script: Path, pair: Pair, folder: Path) -> Recording:
    """Run a program and record it: of one process in this one, to start none and to compile little.

    Raises:
        UsageError: it failed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    said = ["crossframe", "record", str(script)]
    said += ["--nproc-per-node", str(pair.num_ranks)] if pair.num_ranks > 1 else []
    settings = {COMMAND: shlex.join([*said, "--", *pair.arguments])}
    if pair.num_ranks == 1:
        _run_here(program, script, pair, folder, settings)
        return Recording.open(folder)
    options = {"directory": str(folder), "dense": 2, "windows": [], "overwrite": True, "settings": settings}
    command = script_command(
        "torch", TrainingCommand(script, tuple(pair.arguments), nproc_per_node=pair.num_ranks), options
    )
    status, printed = run(command, captured=True, timeout=TIMEOUT)
    if status:
        last = "\n".join(printed.strip().splitlines()[-12:])
        raise UsageError(f"kernels: {script} was not recorded: exit status {status}\n{last}")
    return Recording.open(folder)


def _run_here(program: str, script: Path, pair: Pair, folder: Path, settings: dict[str, str]) -> None:
    """Run a program of one process, which records itself or is recorded, and ends early where a trace is asked for."""
    if program != JAX:
        record_script([str(script), *pair.arguments], str(folder), dense=2, overwrite=True, settings=settings)
        return
    before = sys.argv
    sys.argv = [str(script), pair.dtype, str(folder)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise
    finally:
        sys.argv = before


def _explained(right: Recording, faulty: Recording, script: Path, pair: Pair, target: Target, folder: Path) -> Finding:
    """As `explain` does, but that programs of one process run in this one."""
    if pair.num_ranks > 1:
        return explained(right, faulty, target, folder=folder, timeout=TIMEOUT, console=None)
    traces = []
    for side, program, path in (("a", pair.right, path_of(pair.right)), ("b", pair.faulty, script)):
        directory = folder / side
        directory.mkdir(parents=True, exist_ok=True)
        environment = request_of(target, (right, faulty), right, directory).to_environment()
        os.environ.update(environment)
        try:
            _run_here(program, path, pair, directory / "recording", {})
        finally:
            for name in environment:
                del os.environ[name]
        traces.append(Trace.read(directory / TRACE_NAME))
    return find(traces[0], traces[1], target.tolerance)


def _answer(fault: KernelFault, pair: Pair, right: Recording, folder: Path) -> Answer:
    """Put a fault into a program, and explain how its run differs."""
    text, number = fault.applied(pair.faulty)
    expected, began = f"{number}: {text.splitlines()[number - 1].strip()}", time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / f"{pair.faulty}.py"
    script.write_text(text)
    try:
        faulty = _recorded(pair.faulty, script, pair, folder / "recording")
        began = time.monotonic()
        target = target_of(right, faulty, compare(right, faulty))
        if target is None:
            return Answer(fault.name, pair.name, False, False, "nothing differs", expected, time.monotonic() - began)
        found = _explained(right, faulty, script, pair, target, folder / "traces")
    except CrossframeError as error:  # one that fails is no reason not to go on with the others
        said = str(error).replace("\n", " ")[:200]
        return Answer(fault.name, pair.name, False, False, said, expected, time.monotonic() - began)
    seconds, op = time.monotonic() - began, found.b
    located = op is not None and op.line is not None and (op.line.file, op.line.number) == (str(script), number)
    said = f"no operator; first different: {target.name}"
    if op is not None:
        said = _said(op)
    elif found.a is not None:
        said = f"only of the right side: {found.a.name}, {found.a.line.number if found.a.line else 'no line'}"
    return Answer(fault.name, pair.name, found.a is not None or op is not None, located, said, expected, seconds)


def _compiled_answer(fault: BackendFault, folder: Path) -> Answer:
    """Compile a program with a wrong backend, and judge what that computes in the second step."""
    folder.mkdir(parents=True, exist_ok=True)
    began, lines = time.monotonic(), text_of(TORCH).splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.strip() == fault.expected)
    request = Request(str(folder), 1, 0, BACKWARD, "", judged=True, compiled=True)
    os.environ.update(environment := request.to_environment())
    try:
        arguments = ["float32", fault.name, "eager"]
        record_script([str(path_of(COMPILED)), *arguments], str(folder / "recording"), overwrite=True)
    finally:
        for name in environment:
            del os.environ[name]
    outside, seconds = Trace.read(folder / TRACE_NAME).outside(), time.monotonic() - began
    op = outside[0] if outside else None
    located = op is not None and op.line is not None and (op.line.file, op.line.number) == (str(path_of(TORCH)), number)
    said = "all operators are inside their bounds" if op is None else _said(op)
    return Answer(fault.name, "compiled", op is not None, located, said, f"{number}: {fault.expected}", seconds)


def _said(op: Operator) -> str:
    return f"{op.name}, {op.line.number}: {op.line.code}" if op.line is not None else f"{op.name}, no line"


def _line(answer: Answer) -> str:
    mark = "located" if answer.located else "found  " if answer.found else "MISSED "
    return f"{mark} {answer.pair:9} {answer.fault:22} {answer.seconds:5.1f} s  {answer.said}"


def summary(answers: Sequence[Answer]) -> str:
    """By pair, how many were found and located, and what explain took."""
    said = []
    for pair in dict.fromkeys(answer.pair for answer in answers):
        own = [answer for answer in answers if answer.pair == pair]
        if own:
            seconds = sorted(answer.seconds for answer in own)[len(own) // 2]
            found, located = sum(answer.found for answer in own), sum(answer.located for answer in own)
            said.append(f"{pair}: {found} of {len(own)} found, {located} at the line, median {seconds:.1f} s")
    return "\n".join(said)


def table(answers: Sequence[Answer]) -> str:
    """The answers in Markdown."""
    rows = [
        "| pair | fault | found | located | explain named | changed line | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for answer in answers:
        cells = [
            "yes" if answer.found else "no",
            "yes" if answer.located else "no",
            f"`{answer.said}`",
            f"`{answer.expected}`",
        ]
        escaped = [cell.replace("|", "\\|") for cell in cells]
        rows.append(f"| {answer.pair} | {answer.fault} | {' | '.join(escaped)} | {answer.seconds:.1f} |")
    return "\n".join([*summary(answers).splitlines(), "", *rows, ""])

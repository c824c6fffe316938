"""`crossframe explain A B`: repeats two runs up to their first difference, and finds the operators that cause it.

`crossframe explain RUN`: one run made again, and the operators that err by more than rounding. Of a pair of which one run is
compiled and the other is not, the compiled one is examined so first.
"""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.cli.option_values import put, write_svg
from crossframe.cli.record import again_in, script_command
from crossframe.cli.training_command import TrainingCommand, split_variables
from crossframe.draw.operators import operators_svg
from crossframe.errors import UsageError
from crossframe.operators import Finding, Operator, Request, Trace, find
from crossframe.operators.match import Neighbour
from crossframe.operators.request import TRACE_NAME
from crossframe.operators.target import Target, target_of
from crossframe.operators.trace import COMPILED, WHOLE_GRAPH
from crossframe.param_map import ParamMap
from crossframe.processes import run
from crossframe.recording import Recording
from crossframe.recording.event_format import BACKWARD, FORWARD
from crossframe.recording.known_settings import COMMAND, FORWARD_OPTION, MODULE_OPTION, RECORD, TRAIN
from crossframe.recording.program import COMPILED as IS_COMPILED
from crossframe.recording.program import PROCESSES, PROGRAM, SOURCE
from crossframe.verdict import compare
from crossframe.verdict.measure.comparable import labels
from crossframe.verdict.one_naming import in_one_naming, unit_in_source

TIMEOUT = 600.0
_LAST_LINES, _MOST_SHOWN = 12, 8
FOUND, NOTHING_DIFFERS, NOT_FOUND = 1, 0, 3


def explain(
    directories: tuple[Path, Path],
    *,
    folder: Path | None,
    timeout: float,
    param_map: ParamMap | None,
    bitwise: bool = True,
    svg: Path | None,
    as_json: bool,
    console: Console,
) -> int:
    """Print the first operator of each side that computes another value; returns the exit status.

    Where one run is compiled and the other is not, that is the first operator that was compiled wrong, if there is one.

    Args:
        directories: of the recordings.
        folder: where traces are kept; None: nowhere.
        timeout: seconds that each run may take.
        param_map, bitwise: as of `crossframe.verdict.compare`.
        svg: where the drawing of the operators near the difference goes; None: nowhere.

    Raises:
        UsageError: a recording without a command; a run that fails or takes too long.
        RecordingError: a recording that cannot be read.
    """
    naming = in_one_naming(*(Recording.open(directory) for directory in directories), param_map)
    a, b = naming.a, naming.b
    verdict = compare(a, b, bitwise=bitwise)
    compiled = [each for each in (a, b) if _is_compiled(each)]
    first = next((each for each in verdict.judged if each.beyond), None)
    if len(compiled) == 1:
        step = first.step if first is not None else 0
        trace = judged(compiled[0], step, folder=folder, timeout=timeout, console=None if as_json else console)
        wrong = any(op.name.startswith(COMPILED) for op in trace.outside())
        if wrong or first is None:
            return answer(trace, compiled[0], step, as_json, console)
        if not as_json:
            _print_graphs(trace, console)
    target = target_of(a, b, verdict, bitwise=bitwise)
    if target is None:
        console.print("nothing to explain: no recorded value differs beyond its bound", style="green")
        for setting in verdict.settings:
            console.print(f"settings that differ: {setting}", highlight=False, soft_wrap=True)
        return NOTHING_DIFFERS
    found = explained(a, b, target, folder=folder, timeout=timeout, console=None if as_json else console)
    if as_json:
        print(json.dumps(to_json(found, target), indent=1))
    else:
        _print(found, target, labels(a, b), console)
    if svg is not None and any(found.neighbours):
        write_svg(svg, operators_svg(found, labels(a, b)))
        if not as_json:
            put(console, f"\ndrawing: {svg}")
    return FOUND if found.a is not None or found.b is not None else NOT_FOUND


def explain_one(
    directory: Path, step: int, *, folder: Path | None, timeout: float, as_json: bool, console: Console
) -> int:
    """Print the first operator of a run whose error exceeds rounding; returns the exit status.

    Args:
        directory: of the recording.
        step: whose forward and backward are traced.
        folder: where the trace is kept; None: nowhere.
        timeout: seconds that the run may take.

    Raises:
        UsageError: a recording without a command or without that step; a run that fails or takes too long.
        RecordingError: a recording that cannot be read.
    """
    recording = Recording.open(directory)
    if not 0 <= step < recording.num_steps:
        raise UsageError(f"explain: --step: expected one of the {recording.num_steps} steps of {directory}, got {step}")
    trace = judged(recording, step, folder=folder, timeout=timeout, console=None if as_json else console)
    return answer(trace, recording, step, as_json, console)


def judged(recording: Recording, step: int, *, folder: Path | None, timeout: float, console: Console | None) -> Trace:
    """Repeat a run, trace forward and backward of a step, and repeat each operator in float64.

    Args:
        folder, timeout, console: as of `explained`.

    Raises:
        UsageError: as of `explain`.
    """
    _check_repeatable(recording)
    with tempfile.TemporaryDirectory(prefix="crossframe-explain-") as temporary:
        directory = ((folder or Path(temporary)) / "run").resolve()
        request = Request(str(directory), step, 0, BACKWARD, "", judged=True, compiled=_is_compiled(recording))
        return _traced(recording, request, timeout, console)


def explained(
    a: Recording, b: Recording, target: Target, *, folder: Path | None, timeout: float, console: Console | None
) -> Finding:
    """Repeat both runs, and find the first operators that differ.

    Args:
        folder, timeout: as of `explain`.
        console: prints progress; None: prints nothing.

    Raises:
        UsageError: as of `explain`.
    """
    for each in (a, b):
        _check_repeatable(each)
    with tempfile.TemporaryDirectory(prefix="crossframe-explain-") as temporary:
        root = folder or Path(temporary)
        requests = [
            request_of(target, (a, b), each, (root / side).resolve()) for side, each in zip("ab", (a, b), strict=True)
        ]
        with ThreadPoolExecutor(len(requests)) as pool:
            traces = list(pool.map(lambda each, request: _traced(each, request, timeout, console), (a, b), requests))
    return find(traces[0], traces[1], target.tolerance)


def request_of(target: Target, pair: tuple[Recording, Recording], recording: Recording, directory: Path) -> Request:
    """The request to trace one recording of a pair.

    Args:
        directory: where the trace goes.
    """
    # Programs of JAX need not say which module an operator belongs to.
    is_torch = all(each.manifest.framework == "torch" for each in pair)
    unit = unit_in_source(recording, target.unit) if is_torch else ""
    rank = min(target.rank, recording.manifest.world_size - 1)
    return Request(str(directory), target.step, rank, target.phase, unit, target.tolerance is None, judged=True)


def _check_repeatable(recording: Recording) -> None:
    """Raise UsageError if a run is known not to be made again by its command."""
    manifest = recording.manifest
    if not isinstance(manifest.settings.get(COMMAND), str):
        raise UsageError(
            f"explain: {recording.directory} does not state the command that made it; record it with crossframe record"
        )
    number = dict(manifest.settings.get(PROGRAM) or {}).get(PROCESSES, 1)
    if manifest.framework == "jax" and number > 1:
        raise UsageError(
            f"explain: {recording.directory} was recorded by {number} processes of JAX, and explain repeats a run of JAX in one "
            f"process; record the script in one process with {manifest.world_size} devices (on a CPU with "
            f"JAX_NUM_CPU_DEVICES={manifest.world_size}), and explain that recording"
        )


def _traced(recording: Recording, request: Request, timeout: float, console: Console | None) -> Trace:
    """The trace of one run, repeated up to the step."""
    directory = Path(request.directory)
    directory.mkdir(parents=True, exist_ok=True)
    command_text = recording.manifest.settings[COMMAND]
    if console is not None:
        console.print(f"tracing step {request.step} of: {command_text}", style="dim", highlight=False, soft_wrap=True)
    (directory / TRACE_NAME).unlink(missing_ok=True)
    how = f"explain: the run was not made again by '{command_text}'"
    hint = "run explain in the folder in which it was recorded, with the same environment"
    try:
        num_processes = recording.manifest.world_size if recording.manifest.framework == "torch" else 1
        framework = recording.manifest.framework
        variables, stated = split_variables(shlex.split(command_text))
        command = command_of(stated, directory / "recording", num_processes, framework)
        environment = variables | request.to_environment() | _devices(recording)
        status, printed = run(command, captured=True, environment=environment, timeout=timeout)
    except TimeoutError as error:
        raise UsageError(f"{how}: {error}; allow more with --timeout") from None
    if not (directory / TRACE_NAME).exists():
        last = "\n".join(printed.strip().splitlines()[-_LAST_LINES:])
        raise UsageError(f"{how}: exit status {status}, without a trace; {hint}. It printed last:\n{last}")
    _check_source(recording, directory / "recording", console)
    return Trace.read(directory / TRACE_NAME)


def _devices(recording: Recording) -> dict[str, str]:
    """The variable that sets the number of JAX's CPU devices to the number of ranks, unless the environment sets it."""
    manifest, name = recording.manifest, "JAX_NUM_CPU_DEVICES"
    of_cpu = dict(manifest.settings.get(PROGRAM) or {}).get("device") == "cpu"
    return {name: str(manifest.world_size)} if manifest.framework == "jax" and of_cpu and name not in os.environ else {}


def command_of(stated: Sequence[str], output: Path, num_processes: int, framework: str) -> list[str]:
    """The command line that repeats a run.

    Args:
        stated: the command that the recording states.
        output: where `crossframe record` is to record to.
        num_processes: that a script of Python which is started directly has.
        framework: of the recording.

    Raises:
        UsageError: a command that is neither `crossframe record` nor a script of Python.

    >>> command_of(["python", "train.py", "--lr", "1"], Path("out"), 1, "torch")[1:]
    ['train.py', '--lr', '1']
    """
    if shlex.join(stated[:2]) == RECORD and len(stated) > 2:
        is_module = stated[2] == MODULE_OPTION
        script, *options = stated[2 + is_module :]
        arguments: list[str] = []
        if "--" in options:
            options, arguments = options[: options.index("--")], options[options.index("--") + 1 :]
        at = options.index("--nproc-per-node") + 1 if "--nproc-per-node" in options else 0
        recorder: dict[str, Any] = {"directory": str(output), "windows": [], "overwrite": True}
        if FORWARD_OPTION in options:
            recorder["forward_only"] = True
        recorder |= again_in(options)
        processes = int(options[at]) if at else None
        training = TrainingCommand(Path(script), tuple(arguments), nproc_per_node=processes, is_module=is_module)
        return script_command(framework, training, recorder)
    if shlex.join(stated).startswith(TRAIN):
        return [sys.executable, *stated[1:], "--output", str(output), "--overwrite"]
    if stated and stated[0] == "python" and len(stated) > 1:
        if num_processes == 1:
            return [sys.executable, *stated[1:]]
        ranks = ["--standalone", "--nproc-per-node", str(num_processes)]
        return [sys.executable, "-m", "torch.distributed.run", *ranks, *stated[1:]]
    raise UsageError(
        f"explain: cannot make a run again by '{shlex.join(stated)}': expected crossframe record or a script of "
        "Python; record it with crossframe record"
    )


def _check_source(recording: Recording, again: Path, console: Console | None) -> None:
    """Warn if the script has changed since the recording."""
    before = recording.manifest.settings.get(PROGRAM)
    try:
        now = Recording.open(again, partial=True).manifest.settings.get(PROGRAM)
    except Exception:
        return
    if isinstance(before, dict) and isinstance(now, dict) and before.get(SOURCE) != now.get(SOURCE) and console:
        console.print(
            f"the source has changed since {recording.directory} was recorded: what follows is about the source as it is now",
            style="yellow",
            soft_wrap=True,
        )


def _print(found: Finding, target: Target, names: tuple[str, str], console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)

    how = "in every bit" if target.tolerance is None else f"within {target.tolerance:.1e}"
    counts = " and ".join(f"{m} of {n}" for m, n in zip(found.num_matched, found.num_operators, strict=True))
    place = f"step {target.step}, {target.phase}, unit {target.unit or '(root)'!r}"
    say(f"{counts} operators of {place} have outputs that agree {how}")
    if found.a is None and found.b is None:
        say(f"no operator was found at which they part: the first quantity that differs is {target.name}", "yellow")
        return
    if found.from_outside:
        say("they read values that differ already, and that no operator of this part computed:", "yellow")
    for name, op, near in zip(names, (found.a, found.b), found.neighbours, strict=True):
        say("")
        if op is None:
            say(f"{name}: every operator's output has a partner", "bold")
            continue
        say(f"{name}: {_in_words(op)}", "bold red")
        for each in near:
            say(f"    {_mark(each, op)} {_in_words(each.operator, short=True)}")
        if op.judged is not None:
            say(f"    recomputed in float64 from the same inputs: {_judgement(op)}")
    if found.factor is not None:
        say(f"\nthe output in {names[1]} is {_in_digits(found.factor)} times that in {names[0]}")


def _in_digits(factor: float) -> str:
    """A factor in six digits, or its distance from 1 if these are not enough to tell it from 1.

    >>> _in_digits(0.5), _in_digits(1 - 4.5e-7)
    ('0.5', '(1 - 4.5e-07)')
    """
    digits = f"{factor:.6g}"
    return digits if digits != "1" else f"(1 {'+' if factor > 1 else '-'} {abs(factor - 1):.2g})"


def _is_compiled(recording: Recording) -> bool:
    program = recording.manifest.settings.get(PROGRAM)
    return recording.manifest.framework == "torch" and bool(dict(program or {}).get(IS_COMPILED))


def answer(trace: Trace, recording: Recording, step: int, as_json: bool, console: Console) -> int:
    """Print the operators of a run whose error exceeds rounding; returns the exit status.

    Args:
        trace: of forward and backward of a step of the recorded run.
    """
    outside = trace.outside()
    if as_json:
        print(json.dumps(judged_to_json(trace, step), indent=1))
    else:
        _print_judged(trace, recording, step, console)
    return FOUND if outside else NOTHING_DIFFERS


def _print_judged(trace: Trace, recording: Recording, step: int, console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)

    _print_graphs(trace, console)
    outside, number = trace.outside(), len(trace.judged())
    counted = f"{number} of {len(trace.operators)} operators of step {step} of {recording.directory.name}"
    if not outside:
        say(f"{counted} were repeated in float64 on their own inputs: all are inside their bounds", "green")
        return
    wrong = [op for op in outside if op.name != WHOLE_GRAPH]
    say(f"{counted} were repeated in float64 on their own inputs: {len(wrong)} OUTSIDE their bounds")
    if not wrong:
        say("no operator is, where the compiled graph also returns their values: it depends on what is fused", "yellow")
    for op in wrong[:1]:
        say("")
        say(f"first: {_in_words(op)}", "bold red")
        say(f"    {_judgement(op)}")
    if wrong[1:]:
        say("\nalso:")
    for op in wrong[1 : 1 + _MOST_SHOWN]:
        say(f"    {_in_words(op, short=True)}: {_judgement(op)}")


def _print_graphs(trace: Trace, console: Console) -> None:
    """Print the judgement on each compiled graph."""
    for op in trace.operators:
        if op.name == WHOLE_GRAPH:
            what = "outputs" if op.phase == FORWARD else "gradients"
            judgement = _judgement(op) if op.judged is not None else "not judged"
            text = f"compiled module {op.module or '(root)'!r} ({op.arguments}), {what}: {judgement}"
            console.print(text, soft_wrap=True, highlight=False, markup=False)


def _judgement(op: Operator) -> str:
    if op.judged is None:
        return "not repeated"
    inside = "inside" if op.judged.inside else "OUTSIDE"
    return f"off by {op.judged.error:.1e}, {inside} its bound of {op.judged.bound:.1e}"


def _mark(neighbour: Neighbour, op: Operator) -> str:
    return ">" if neighbour.operator is op else ("=" if neighbour.matched else "!")


def _in_words(op: Operator, *, short: bool = False) -> str:
    arguments = f"({op.arguments})" if op.arguments else ""
    shapes = ", ".join(f"{each.dtype}{list(each.shape)}" for each in op.outputs[:2])
    where = op.line.describe() if op.line is not None else "no line of the script"
    if short:
        return f"{op.name}{arguments} -> {shapes}   {where}"
    return f"{where}\n    {op.name}{arguments} -> {shapes}, {op.phase} of module {op.module or '(root)'!r}"


def to_json(found: Finding, target: Target) -> dict[str, Any]:
    """A finding as a JSON object."""

    return {
        "step": target.step,
        "phase": target.phase,
        "unit": target.unit,
        "rank": target.rank,
        "quantity": target.name,
        "tolerance": target.tolerance,
        "from_outside": found.from_outside,
        "factor": found.factor,
        "matched": list(found.num_matched),
        "operators": list(found.num_operators),
        "a": _op_to_json(found.a),
        "b": _op_to_json(found.b),
    }


def judged_to_json(trace: Trace, step: int) -> dict[str, Any]:
    """The operators of one run whose error exceeds rounding, as a JSON object."""
    graphs = [op for op in trace.operators if op.name == WHOLE_GRAPH]
    return {
        "step": step,
        "operators": len(trace.operators),
        "judged": len(trace.judged()),
        "compiled_graphs": [_op_to_json(op) for op in graphs],
        "outside": [_op_to_json(op) for op in trace.outside() if op.name != WHOLE_GRAPH],
    }


def _op_to_json(op: Operator | None) -> dict[str, Any] | None:
    if op is None:
        return None
    line = op.line
    return {
        "operator": op.name,
        "arguments": op.arguments,
        "phase": op.phase,
        "module": op.module,
        "file": line.file if line else None,
        "line": line.number if line else None,
        "code": line.code if line else None,
        "inside_its_bound": op.judged.inside if op.judged else None,
        "error": op.judged.error if op.judged else None,
        "bound": op.judged.bound if op.judged else None,
    }

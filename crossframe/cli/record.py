"""`crossframe record script.py`: runs and records any training script of torch or JAX, followed by its perturbed runs."""

import json
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.cli.launched import Launched, launched, own_port
from crossframe.cli.option_values import check_perturbed_runs, check_size
from crossframe.cli.script_imports import is_of_jax
from crossframe.cli.training_command import MAX_PROCESSES, TrainingCommand, assignments
from crossframe.errors import FailedRunError, UsageError
from crossframe.processes import module_command, run
from crossframe.recording import Recording
from crossframe.recording.known_settings import (
    BY_HAND_OPTION,
    COMMAND,
    FORWARD_OPTION,
    IDLE_OPTION,
    MODULE_OPTION,
    RECORD,
)
from crossframe.recording.manifest import MANIFEST_NAME
from crossframe.recording.recorded_steps import window_arguments
from crossframe.scripts import run_again_file

MODULES = {"torch": "torch_backend.recorder.script", "jax": "jax_backend.recorder.script"}
"""The module of each framework that records a script in its process."""
DENSE, DENSE_FORWARD = 2, 16
_DETAILS = ("full", "sketch", "auto")
MAX_STEPS = 10**9


def record_script(
    training: TrainingCommand,
    *,
    output: Path | None,
    framework: str | None = None,
    perturbed_runs: int,
    every: int,
    dense: int | None = None,
    windows: Sequence[tuple[int, int]],
    stop_after: int | None = None,
    idle_optimizers: Sequence[int] = (),
    by_hand: bool = False,
    forward: bool = False,
    detail: str = "auto",
    overwrite: bool,
    top_up: bool = False,
    watch: bool = False,
    baseline: Path | None = None,
    prints_to_stderr: bool = False,
    console: Console,
) -> None:
    """Run a script or module once, and once for each perturbed run.

    In each process of a launcher this is one of the ranks. The recording then states a command with as many processes.

    Args:
        output: where the recording goes. None: runs/ and the script's name.
        framework: "torch" or "jax": whose optimizers the script uses. None: JAX if it imports JAX and not torch.
        dense: number of steps that are dense, from the first. None: DENSE, or DENSE_FORWARD with `forward`.
        windows: (start, stop) of further steps that are dense.
        stop_after: number of steps after which the script is ended; None: it runs to its end.
        idle_optimizers: numbers of optimizers that the script makes and never uses, in the order in which they are made. If there
            are others, no step ends, and the script is recorded a second time.
        by_hand: the script changes its parameters by itself, without an optimizer of torch. Where this is not stated, it is
            recorded a second time.
        forward: record calls of the model, with gradients or without, instead of training.
        detail: "full", "sketch" or "auto", as of a Recorder.
        perturbed_runs: how many perturbed runs are recorded inside of the recording.
        top_up: keep the recording and its perturbed runs, and record only those that are missing.
        watch: judge the run while it is recorded, and log alarms (`crossframe.monitoring.Monitor`).
        baseline: of the monitor.
        prints_to_stderr: send what the script prints to standard error.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        FailedRunError: there is no such script, or it failed.
        UsageError: options that do not fit.
    """
    stated, framework = framework, framework_of(training, framework)
    process = _launched(training)
    nproc_per_node = process.count if process is not None and framework == "torch" else training.nproc_per_node
    if dense is None:
        dense = DENSE_FORWARD if forward else DENSE
    for name, value, least, most in (
        ("nproc-per-node", training.nproc_per_node, 1, MAX_PROCESSES),
        ("every", every, 1, MAX_STEPS),
        ("dense", dense, 0, MAX_STEPS),
    ):
        if value is not None:
            check_size(name, value, least, most)
    if detail not in _DETAILS:
        raise UsageError(f"record: --detail: expected {', '.join(_DETAILS[:-1])} or {_DETAILS[-1]}, got {detail!r}")
    check_perturbed_runs(perturbed_runs)
    if idle_optimizers and framework == "jax":
        raise UsageError(
            f"record: {IDLE_OPTION} is of scripts of torch; in JAX an optimizer counts when its update is called"
        )
    if by_hand and forward:
        raise UsageError(f"record: {BY_HAND_OPTION} is of training, and {FORWARD_OPTION} records none; leave one out")
    if by_hand and framework == "jax":
        raise UsageError(f"record: {BY_HAND_OPTION} is of scripts of torch; in JAX such updates are found")
    again: dict[str, Any] = ({"idle_optimizers": [*idle_optimizers]} if idle_optimizers else {}) | (
        {"by_hand": True} if by_hand else {}
    )
    if baseline is not None and not watch:
        raise UsageError("record: --baseline is what --watch compares the run with; pass --watch too")
    directory = output or Path("runs", training.name)
    there = (directory / MANIFEST_NAME).exists()
    if there and not overwrite and not top_up:
        raise UsageError(
            f"{directory} holds a recording already; choose another with --output, or replace it with --overwrite"
        )
    command = [*RECORD.split(), *([MODULE_OPTION] if training.is_module else []), str(training.script)]
    if stated is not None:
        command += ["--framework", stated]
    if forward:
        command.append(FORWARD_OPTION)
    if nproc_per_node is not None:
        command += ["--nproc-per-node", str(nproc_per_node)]
    command += ["--every", str(every), "--dense", str(dense)]
    command += window_arguments(windows)
    if detail != "auto":
        command += ["--detail", detail]
    first = 0
    if top_up:
        recording = Recording.open(directory)
        again = again or again_in(shlex.split(recording.manifest.settings.get(COMMAND) or ""))
        first = _missing(recording, _text(training, command, again), perturbed_runs)

    def say(text: str) -> None:
        if process is None or process.number == 0:
            console.print(text, highlight=False)

    def program(options: dict[str, Any]) -> list[str]:
        stated = {COMMAND: _text(training, command, options)}
        return script_command(framework, training, options | {"settings": stated})

    for perturbed_run in range(first, perturbed_runs + 1):
        options: dict[str, Any] = {
            "directory": str(directory.resolve()),
            "every": every,
            "dense": dense,
            "windows": windows,
            "detail": detail,
            "perturbed_run": perturbed_run,
            "stop_after": stop_after,
            "overwrite": overwrite or perturbed_run > 0,
        } | ({"forward_only": True} if forward else {})
        if watch and not perturbed_run:
            options["watch"] = {"baseline": None if baseline is None else str(baseline.resolve())}
        options |= again
        status, _, found = run_program(
            program, options, prints_to_stderr=prints_to_stderr, environment=training.variables
        )
        if found:
            again = found
            why = (
                "updates its parameters by itself"
                if "by_hand" in found
                else "does not use all optimizers that it makes"
            )
            say(f"ran again with {shlex.join(_words_of(found))}: the script {why}")
        if status:
            what = f"perturbed run {perturbed_run} of {training.script}" if perturbed_run else str(training.script)
            how = f"exit status {status}" if status > 0 else f"ended by {signal.Signals(-status).name}"
            raise FailedRunError(f"{what} was not recorded, or not to its end: {how}")
        say(f"recorded {f'perturbed run {perturbed_run} ' if perturbed_run else ''}in {directory}")


def _launched(training: TrainingCommand) -> Launched | None:
    """Which process of a launcher this is.

    Raises:
        UsageError: it is to start others.
    """
    process = launched(os.environ | training.variables)
    if process is not None and training.nproc_per_node is not None:
        raise UsageError(
            f"record: --nproc-per-node starts processes, but {process.by} has started {process.count}, each of which runs this "
            "command; leave the option out, and each is recorded as a rank"
        )
    return process


def run_program(
    program: Callable[[dict[str, Any]], list[str]], options: dict[str, Any], environment: Mapping[str, str], **how: Any
) -> tuple[int, str, dict[str, Any]]:
    """Run a script and record it, and again if no step ended and the recorder knows options with which steps would end.

    Args:
        program: the command line for options of a `Recorder`.
        environment: variables next to those of this process.
        how: arguments of `crossframe.processes.run`.

    Returns:
        The exit status, what was printed if it is captured, and the options with which the script ran again; {} if it did not.
    """
    directory, earlier = Path(options["directory"]), 2 * options.get("perturbed_run", 0)

    def tried(options: dict[str, Any], earlier: int) -> tuple[int, str]:
        variables = own_port(earlier, os.environ | dict(environment))
        return run(program(options), environment={**environment, **variables}, **how)

    _stated_by_ranks(directory)  # by those of a command that was ended before it read them
    status, text = tried(options, earlier)
    if not status or not (found := _stated_by_ranks(directory)) or found.keys() & options.keys():
        return status, text, {}
    return *tried(options | found | {"overwrite": True}, earlier + 1), found


def _words_of(options: Mapping[str, Any]) -> list[str]:
    """The words of a command that state options of the recorder with which the script runs again."""
    idle = [word for number in options.get("idle_optimizers", ()) for word in (IDLE_OPTION, str(number))]
    return [*idle, *([BY_HAND_OPTION] if options.get("by_hand") else [])]


def _text(training: TrainingCommand, command: Sequence[str], options: Mapping[str, Any]) -> str:
    """The command line that repeats a recording."""
    words = [*command, *_words_of(options), *(["--", *training.arguments] if training.arguments else [])]
    return assignments(training.variables) + shlex.join(words)


def again_in(command: Sequence[str]) -> dict[str, Any]:
    """The options of the recorder that a command which records states by words of `_words_of`.

    >>> again_in(["crossframe", "record", "train.py", "--idle-optimizer", "2", "--", "--by-hand"])
    {'idle_optimizers': [2]}
    """
    options = command[: command.index("--")] if "--" in command else command
    idle = [int(number) for option, number in pairwise(options) if option == IDLE_OPTION]
    return ({"idle_optimizers": idle} if idle else {}) | ({"by_hand": True} if BY_HAND_OPTION in options else {})


def _stated_by_ranks(directory: Path) -> dict[str, Any]:
    """The options with which a script that was not recorded is to run again, as all ranks state them, or that of this process;
    {} if none does, or they differ. Deletes the files."""
    process = launched()
    rank = os.environ.get("RANK", "*") if process is None else str(process.number)
    pattern = run_again_file(directory, rank)
    paths = sorted(directory.glob(pattern.name))
    found = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return found[0] if found and all(each == found[0] for each in found) else {}


def framework_of(training: TrainingCommand, stated: str | None = None, *, command: str = "record") -> str:
    """The framework of a script: the stated one, or JAX if it imports JAX and not torch.

    Args:
        command: the command of crossframe, for errors.

    Raises:
        ModuleNotFoundError: the framework is not installed.
        FailedRunError: no such script.
        UsageError: no such framework, or processes for a script of JAX.
    """
    try:
        file = training.file()
    except UsageError as error:
        raise FailedRunError(f"{command}: {error}") from None
    if stated not in (None, *MODULES):
        raise UsageError(f"{command}: --framework: expected torch or jax, got {stated!r}")
    framework = stated or ("jax" if is_of_jax(file, Path() if training.is_module else None) else "torch")
    if find_spec(framework) is None:
        raise ModuleNotFoundError(name=framework)
    if framework == "jax" and training.nproc_per_node is not None:
        raise UsageError(
            f"{command}: --nproc-per-node starts processes of torch; a script of JAX is recorded in one process with all its "
            "devices (on a CPU, JAX_NUM_CPU_DEVICES sets their number), or by this command in each process that calls "
            "jax.distributed.initialize"
        )
    return framework


def _missing(recording: Recording, command: str, perturbed_runs: int) -> int:
    """The number of the first missing perturbed run of a recording, which the same command must have made."""
    made_by = recording.manifest.settings.get(COMMAND)
    if made_by != command:
        raise UsageError(
            f"{recording.directory}: expected a recording made by `{command}`, but it was made by `{made_by}`; perturbed runs "
            "are of one run: repeat that command with --top-up"
        )
    present = len(recording.perturbed_runs())
    if present >= perturbed_runs:
        raise UsageError(f"{recording.directory} has {present} perturbed runs already; pass a larger --perturbed-runs")
    return present + 1


def script_command(framework: str, training: TrainingCommand, options: dict[str, Any]) -> list[str]:
    """The command line of the process that runs and records a script.

    Args:
        framework: "torch" or "jax".
        options: of its `Recorder`, as JSON, and its directory.
    """
    of_script = [json.dumps(options), *training.words_of_python()]
    if training.nproc_per_node is None:
        return module_command(f"{MODULES[framework]}:main", of_script)
    return module_command(f"{MODULES[framework]}:launch", [str(training.nproc_per_node), *of_script])

"""`crossframe check A B`: what two runs differ in before training. `crossframe check RUN`: ranks that differ from the others."""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.check import Check, check_configurations, check_ranks_of, check_recordings
from crossframe.cli.exit_status import AGREE, FOUND, UNSETTLED
from crossframe.cli.option_values import check_size
from crossframe.cli.record import MAX_STEPS, framework_of, run_program, script_command
from crossframe.cli.training_command import EXAMPLES, TrainingCommand
from crossframe.environment import Effect
from crossframe.environment.configuration import SUFFIXES
from crossframe.errors import UsageError
from crossframe.param_map import ParamMap
from crossframe.quoting import quote
from crossframe.recording import Recording
from crossframe.shapes.stored import is_recording

STEPS = 2
_SHOWN = 12
_LAST_LINES = 12
_STATUSES = {Effect.CERTAINLY: FOUND, Effect.POSSIBLY: UNSETTLED, Effect.HARDLY: AGREE}
_STYLES = {Effect.CERTAINLY: "bold red", Effect.POSSIBLY: "yellow", Effect.HARDLY: "green"}
_EXPECTED = f"a recording, a configuration file ({', '.join(SUFFIXES)}), or a command such as {EXAMPLES}"


def check(
    a: str, b: str | None, *, steps: int | None, param_map: ParamMap | None, as_json: bool, console: Console
) -> int:
    """Print the differences of two runs, or of the ranks of one; returns the exit status.

    Args:
        a, b: each a recording, a configuration file or a command line; without b the ranks of a are compared.
        steps: number of steps after which commands are stopped; None: STEPS.
        param_map: as of `crossframe.verdict.compare`.

    Raises:
        UsageError: something else; a command that fails; options that do not fit.
        RecordingError: a damaged recording.
    """
    check_size("steps", STEPS if steps is None else steps, 1, MAX_STEPS)
    with tempfile.TemporaryDirectory(prefix="crossframe-check-") as temporary:
        if _is_configuration(a) or (b is not None and _is_configuration(b)):
            if b is None or not (_is_configuration(a) and _is_configuration(b)):
                raise UsageError("check: a configuration file is compared with another one; pass two of them")
            if param_map is not None or steps is not None:
                raise UsageError(
                    "check: --map and --steps are for recordings and commands, not for configuration files"
                )
            result = check_configurations(Path(a), Path(b))
        elif b is None:
            if param_map is not None:
                raise UsageError("check: --map is for two runs; pass the second one")
            result = check_ranks_of(_recorded(a, Path(temporary, "a"), steps))
        else:
            directories = [_recorded(each, Path(temporary, name), steps) for each, name in ((a, "a"), (b, "b"))]
            first, second = (Recording.open(directory, partial=True) for directory in directories)
            result = check_recordings(first, second, param_map=param_map)
    if as_json:
        print(json.dumps(result.to_json(), indent=1))
    else:
        print_check(console, result, is_one=b is None)
    return _STATUSES[result.effect]


def _is_configuration(text: str) -> bool:
    path = Path(text)
    return path.suffix.lower() in SUFFIXES and path.is_file()


def _recorded(text: str, directory: Path, steps: int | None) -> Path:
    """The recording that is named, or that of the first steps of a command."""
    if is_recording(Path(text)):
        return Path(text)
    if Path(text).is_dir():
        raise UsageError(f"check: expected {_EXPECTED}; {text} is a folder without a recording")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"check: cannot split {quote(text)} into words: {error}") from None
    command = TrainingCommand.parse(words, command="check")
    if command.script.suffix != ".py" and not command.is_module:
        raise UsageError(f"check: expected {_EXPECTED}; got {quote(text)}")
    framework = framework_of(command, command="check")
    options = {
        "directory": str(directory.resolve()),
        "every": MAX_STEPS,
        "dense": 0,
        "windows": (),
        "stop_after": STEPS if steps is None else steps,
    }

    def program(options: dict[str, Any]) -> list[str]:
        return script_command(framework, command, options)

    status, printed, _ = run_program(program, options, captured=True, environment=command.variables)
    if status:
        last = "\n".join(printed.splitlines()[-_LAST_LINES:])
        raise UsageError(f"check: `{text}` was not recorded (exit status {status}); its last lines:\n{last}")
    return directory


def print_check(console: Console, result: Check, *, is_one: bool) -> None:
    """Print the differences, the most likely effects first, at most twelve of each effect."""
    texts: list[tuple[Effect, str, str]] = [
        (each.effect, each.describe(result.labels), each.reason) for each in result.differences
    ]
    for name, odd in result.odd_ranks:
        texts.append((odd.effect, ("" if is_one else f"{name}: ") + odd.describe(), odd.difference.reason))
    if not texts:
        what = "the environments of all ranks are equal" if is_one else "nothing differs"
        console.print(what, style=_STYLES[Effect.HARDLY], highlight=False)
    for effect in Effect:
        own = [(text, reason) for each, text, reason in texts if each is effect]
        if own:
            console.print(f"{effect.title}:", style=_STYLES[effect], highlight=False)
        before = ""
        for text, reason in own[:_SHOWN]:
            why = f" ({reason})" if reason != before else ""
            console.print(f"  {text}{why}", soft_wrap=True, highlight=False, markup=False)
            before = reason
        if len(own) > _SHOWN:
            console.print(f"  and {len(own) - _SHOWN} more; --json prints all", highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", soft_wrap=True, highlight=False, markup=False)

"""The first step of a command: handle signals, and say what to install if something is missing."""

import itertools
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType

LEAST_COLUMNS = 20
_WRONG_USE, _ABORT = 2, 128


def main(app: str = "crossframe.cli.commands", name: str = "crossframe") -> None:
    """Run the command line, and end the processes that it started.

    The exit status is that of the command, or 128 plus the number of the signal that ended it.

    Args:
        app: the module whose `app` defines the commands.
        name: the name of the program, for its help.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_at_once)
    _prepare_output()
    failed = _status_of_wrong_use(sys.argv[1:])
    try:
        from crossframe import processes

        import_module(app)  # takes long
    except ModuleNotFoundError as error:
        print(f"crossframe: needs {error.name}: pip install 'crossframe[all]'", file=sys.stderr)
        sys.exit(failed)
    processes.end_on_signals()
    status = failed
    try:
        status = run(sys.argv[1:], app, name)
    finally:
        processes.end_children()
        if number := processes.received_signal():
            # Whatever the exception became on its way through libraries.
            status = 128 + number
            with suppress(OSError, ValueError):
                print(f"crossframe: {processes.ended_by(number)}", file=sys.stderr, flush=True)
            sys.exit(status)
    sys.exit(_flushed(status, failed))


def run(arguments: Sequence[str], app: str = "crossframe.cli.commands", name: str = "crossframe") -> int:
    """Run the command line in this process; returns the exit status. The other arguments are those of `main`."""
    import typer

    from crossframe.cli.console import run_command

    command = typer.main.get_command(import_module(app).app)
    return run_command(command, arguments, name, failed=_status_of_wrong_use(arguments))


def _status_of_wrong_use(arguments: Sequence[str]) -> int:
    """2, or 128 with `--git-bisect`: git reads 2 as a bad commit, and ends the search at 128.

    A misspelled option counts as well, since it was meant for git.

    >>> _status_of_wrong_use(["baseline", "check", "--git-bisect", "--no-such-option"])
    128
    >>> _status_of_wrong_use(["baseline", "check", "--", "train.py", "--git-bisect"])
    2
    """
    own = itertools.takewhile(lambda word: word != "--", arguments)
    is_for_git = any(word.startswith("--git") and not word.startswith("--github") for word in own)
    return _ABORT if is_for_git else _WRONG_USE


def _prepare_output() -> None:
    """Make output possible in any terminal and environment."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # closed, or replaced
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for name in ("COLUMNS", "LINES", "TERMINAL_WIDTH"):
        value = os.environ.get(name, "")
        least = 1 if name == "LINES" else LEAST_COLUMNS
        if value and not (value.isdecimal() and len(value) < 6 and int(value) >= least):
            del os.environ[name]


def _flushed(status: int, failed: int) -> int:
    """Flush the output; returns the exit status, or `failed` if that fails."""
    from crossframe.cli.console import BROKEN_PIPE, forget_output

    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        forget_output()
        return BROKEN_PIPE
    except (OSError, ValueError) as error:
        forget_output()
        with suppress(OSError, ValueError):
            print(f"crossframe: cannot write the output: {error}", file=sys.stderr, flush=True)
        return failed
    return status


def _exit_at_once(number: int, _: FrameType | None) -> None:
    """Exit without cleanup. During imports there is nothing to clean up, and exceptions may not reach `main`."""
    name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    os.write(2, f"crossframe: {name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()

"""The `crossframe` command's first step: handle signals, say what to install if something is missing, and keep start-up short."""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Run the command line, and end what it started.

    The exit status is the command's, or 128 and the number of the signal that ended it.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_at_once)
    try:
        from crossframe import processes
        from experiments.cli import app
    except ModuleNotFoundError as error:
        print(f"crossframe: needs {error.name}: pip install 'crossframe[experiments]'", file=sys.stderr)
        sys.exit(2)
    processes.end_on_signals()
    try:
        app(prog_name="crossframe")
    finally:
        processes.end_children()
        if number := processes.received_signal():
            # Whatever the exception became on its way through libraries.
            print(f"crossframe: {processes.ended_by(number)}", file=sys.stderr, flush=True)
            sys.exit(128 + number)


def _exit_at_once(number: int, _: FrameType | None) -> None:
    """While modules are imported there is nothing to clean up, and exceptions may not reach `main`."""
    name = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    os.write(2, f"crossframe: {name}\n".encode())
    os._exit(128 + number)


if __name__ == "__main__":
    main()

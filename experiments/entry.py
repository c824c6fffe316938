"""The `crossframe` command's first step: say what to install if something is missing, and keep start-up short."""

import signal
import sys


def main() -> None:
    """Run the command line. Ended by a signal, it ends the processes that it started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        from experiments.cli import app
    except ModuleNotFoundError as error:
        print(f"crossframe: needs {error.name}: pip install 'crossframe[experiments]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("crossframe: interrupted", file=sys.stderr)
        sys.exit(2)
    app(prog_name="crossframe")


if __name__ == "__main__":
    main()

"""The `crossframe` command's first step: say what to install if something is missing, and keep start-up short."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from experiments.cli import app
    except ModuleNotFoundError as error:
        print(f"crossframe: needs {error.name}: pip install 'crossframe[experiments]'", file=sys.stderr)
        sys.exit(2)
    app()


if __name__ == "__main__":
    main()

"""`python -m experiments`: the commands of the research in this repository."""

from crossframe.cli.entry import main as run_main


def main() -> None:
    """Run the command line."""
    run_main("experiments.cli.commands", "python -m experiments")


if __name__ == "__main__":
    main()

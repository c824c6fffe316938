"""`python -m crossframe`: the command `crossframe`."""

from crossframe.cli.entry import main

if __name__ == "__main__":
    main()

"""Detects options of a training script that were given to `crossframe record`."""

import shlex
from typing import Any

from typer.core import TyperCommand

from crossframe.errors import UsageError


class RecordCommand(TyperCommand):
    """`crossframe record`, with an error that shows where options of a script belong."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `TyperCommand.parse_args`.

        Raises:
            UsageError: an option that the command does not have, after a script.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option = getattr(error, "option_name", None)  # of typer's own copy of click, or of click
            reason = _separated(given, option) if isinstance(option, str) else None
            if reason is None:
                raise
            raise UsageError(
                f"record: {option} is not an option of crossframe record; put options of the script after --: {reason}"
            ) from None


def _separated(args: list[str], option: str) -> str | None:
    """The command line with the option after `--`; None if no script precedes it.

    >>> _separated(["train.py", "--every", "1", "--mode", "x"], "--mode")
    'crossframe record train.py --every 1 -- --mode x'
    """
    at = next((i for i, arg in enumerate(args) if arg == option or arg.startswith(f"{option}=")), None)
    if at is None or "--" in args[:at] or not any(arg.endswith(".py") for arg in args[:at]):
        return None
    return shlex.join(["crossframe", "record", *args[:at], "--", *args[at:]])

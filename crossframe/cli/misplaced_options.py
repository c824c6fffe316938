"""Detects options of a training script that were given to `crossframe record` or `crossframe baseline`."""

import shlex
from typing import Any

from typer.core import TyperCommand

from crossframe.errors import UsageError


class CommandWithScript(TyperCommand):
    """A command that runs a script, with an error that shows where options of the script belong."""

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
            words = ctx.command_path.split()
            reason = _separated(words, given, option) if isinstance(option, str) else None
            if reason is None:
                raise
            raise UsageError(
                f"{' '.join(words[1:])}: {option} is not an option of {' '.join(words)}; put options of the script after --: "
                f"{reason}"
            ) from None


def _separated(command: list[str], args: list[str], option: str) -> str | None:
    """The command line with the option after `--`; None if no script precedes it.

    >>> _separated(["crossframe", "record"], ["train.py", "--every", "1", "--mode", "x"], "--mode")
    'crossframe record train.py --every 1 -- --mode x'
    """
    at = next((i for i, arg in enumerate(args) if arg == option or arg.startswith(f"{option}=")), None)
    if at is None or "--" in args[:at] or not any(arg.endswith(".py") for arg in args[:at]):
        return None
    return shlex.join([*command, *args[:at], "--", *args[at:]])

"""The consoles of commands, and their exit on errors."""

import os
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from crossframe.cli.exit_status import WRONG_USE
from crossframe.errors import CrossframeError
from crossframe.processes import received_signal

BROKEN_PIPE = 141
"""The exit status if the reader of the output is gone: 128 plus the number of SIGPIPE."""
LONGEST_MESSAGE = 1800
"""Maximum number of characters of an error message, so that the line stays below 2 kB."""
TRACEBACK = "CROSSFRAME_TRACEBACK"
"""Environment variable: if set, tracebacks of internal errors are printed."""
# The extra that installs a module, where it is not "all".
EXTRAS = {
    "torch": "torch",
    "torch_backend": "torch",
    "jax": "jax",
    "flax": "jax",
    "optax": "jax",
    "jinja2": "report",
    "markupsafe": "report",
    "matplotlib": "report",
}
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    r"""Text with escaped control characters, so that a terminal does not execute them.

    >>> printable("a\x1b[31mb")
    'a\\x1b[31mb'
    """
    return text.translate(_CONTROLS)


class PlainConsole(Console):
    """A console that prints text verbatim: without markup and emoji, and with escaped control characters.

    Styles are given by `rich.text.Text` and by `style`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, soft_wrap=True, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """See `rich.console.Console`; control characters are escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """See `rich.console.Console`, which would exit with 1, the status of a bug."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(BROKEN_PIPE) from None


console = PlainConsole()
errors = PlainConsole(stderr=True)


def complain(message: str) -> None:
    """Print an error message; a long one loses its middle."""
    if len(message) > LONGEST_MESSAGE:
        half = LONGEST_MESSAGE // 2
        message = f"{message[:half]} ... ({len(message) - 2 * half:,} characters) ... {message[-half:]}"
    if message:
        errors.print(f"crossframe: {message}")


@contextmanager
def exit_on_error(status: int = WRONG_USE) -> Iterator[None]:
    """Turns errors of input and of resources into one message and an exit status, without a traceback."""
    try:
        yield
    except typer.Exit:
        raise
    except (KeyboardInterrupt, typer.Abort):
        complain("interrupted")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise SystemExit(BROKEN_PIPE) from None
    except Exception as error:
        if received_signal() is None:
            complain(_message(error))
        raise typer.Exit(status) from None


def run_command(command: Any, arguments: Sequence[str], name: str = "crossframe", *, failed: int = WRONG_USE) -> int:
    """Run a command line in this process; returns the exit status.

    Args:
        command: of click, as `typer.main.get_command` returns it.
        name: of the program, for its help.
        failed: the exit status of wrong use.
    """
    try:
        with exit_on_error(failed):
            status = command.main(list(arguments), prog_name=name, standalone_mode=False)
    except typer.Exit as ended:
        status = ended.exit_code
    except SystemExit as ended:
        status = ended.code
    if status == BROKEN_PIPE:
        forget_output()
    return status if isinstance(status, int) else 0


def command_line() -> str:
    """The command line of this process, as a user would type it."""
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name
    return shlex.join([*name.split(), *sys.argv[1:]])


def forget_output() -> None:
    """Discard further output, so that Python does not fail at exit if the reader is gone."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: Exception) -> str:
    """The message for an exception."""
    if (
        of_arguments := getattr(error, "format_message", None)
    ) is not None:  # click's, of which typer may have its own copy
        path = getattr(getattr(error, "ctx", None), "command_path", "crossframe")
        message = of_arguments().strip().rstrip(".")
        return f"{message}; see {path} --help" if message else ""  # where help was printed
    if isinstance(error, ModuleNotFoundError):
        name = (error.name or "").partition(".")[0]
        return f"needs {name}: pip install 'crossframe[{EXTRAS.get(name, 'all')}]'"
    if isinstance(error, CrossframeError | ImportError):
        return str(error)
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot use{where}: {error.strerror or error}; check the path, or the space left"
    if isinstance(error, MemoryError):
        return f"not enough memory: {error or 'an allocation failed'}; pass smaller sizes"
    return internal_error(error)


def internal_error(error: Exception) -> str:
    """The message for an unexpected exception; if TRACEBACK is set, the exception is raised instead.

    Raises:
        Exception: `error` itself.
    """
    if os.environ.get(TRACEBACK):
        raise error
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else ""
    kind = type(error).__name__
    return f"internal error, please report it: {kind}: {error}{where}; set {TRACEBACK}=1 to see the traceback"

"""Where commands print, and how they end on what is the user's to mend."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from crossframe.errors import CrossframeError

console = Console(soft_wrap=True)
errors = Console(stderr=True, soft_wrap=True, highlight=False)
# Which extra brings a module that may be missing.
EXTRAS = {"torch": "torch", "jax": "jax", "flax": "jax", "optax": "jax"}


@contextmanager
def exit_on_error() -> Iterator[None]:
    """One clear line and exit status 2 instead of a traceback, for what is the user's to mend."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        extra = EXTRAS.get(name, "all")
        errors.print(f"crossframe: needs {name}: pip install 'crossframe[{extra}]'", markup=False)
        raise typer.Exit(2) from None
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        errors.print(
            f"crossframe: cannot use{where}: {error.strerror or error}; check the path, or the space left", markup=False
        )
        raise typer.Exit(2) from None
    except (CrossframeError, ImportError) as error:
        errors.print(f"crossframe: {error}", markup=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        errors.print("crossframe: interrupted")
        raise typer.Exit(2) from None

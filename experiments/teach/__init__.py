"""Lessons on sharded training: Markdown whose code is run, and whose outputs and pictures are compared with what it gives.

`python -m experiments teach` checks them, and with `--update` writes outputs and pictures anew. A lesson is an ordinary Markdown
file, which may import `refused` from here; the rest of it is the public core.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import fill

from crossframe.errors import CrossframeError, UsageError


@contextmanager
def refused() -> Iterator[None]:
    """Print what the core says to something that it refuses, in lines of 100 characters.

    Raises:
        UsageError: nothing was refused.

    >>> from crossframe.params import ParamSpec
    >>> with refused():
    ...     ParamSpec("w", (-1,))
    ParamError: parameter 'w': expected a tuple of sizes >= 0 as shape, got (-1,)
    """
    try:
        yield
    except CrossframeError as error:
        print(fill(f"{type(error).__name__}: {error}", 100, break_long_words=False, break_on_hyphens=False))
    else:
        raise UsageError("refused(): expected an error of crossframe in this block, and none was raised")

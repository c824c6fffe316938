"""Formats values for error messages: anything that a caller passed, in one line."""

import os
from typing import Any

LONGEST = 300


def quote(value: Any) -> str:
    """The repr of a value, cut to a readable length; its type if it has no repr.

    >>> quote("w"), quote(10**10000)
    ("'w'", 'an int that cannot be written out')
    """
    try:
        text = repr(value)
    except Exception:  # a user's own __repr__, or an int of more digits than Python converts
        kind = type(value).__name__
        return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} that cannot be written out"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def quote_path(path: str | os.PathLike) -> str:
    """A path in one readable line: shortened in the middle if it is long, and its repr if it has unprintable characters.

    >>> print(quote_path("runs/a"), quote_path("a\\x1b[2J"))
    runs/a 'a\\x1b[2J'
    """
    text = os.fspath(path)
    text = text if isinstance(text, str) else os.fsdecode(text)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}...{text[-LONGEST // 2 :]}"
    return text if text.isprintable() else repr(text)


def quote_error(error: BaseException) -> str:
    """The message of an error in one line, cut to a readable length.

    >>> quote_error(ValueError("a\\nb"))
    'a b'
    """
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

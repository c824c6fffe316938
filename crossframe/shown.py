"""A value in an error message: whatever a caller passed, shown in one line."""

import os
from typing import Any

LONGEST = 300


def shown(value: Any) -> str:
    """The value's repr, cut to a readable length; its type where Python refuses to write it out.

    >>> shown("w"), shown(10**10000)
    ("'w'", 'an int that cannot be written out')
    """
    try:
        text = repr(value)
    except Exception:  # a user's own __repr__, or an int of more digits than Python converts
        kind = type(value).__name__
        return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind} that cannot be written out"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def shown_path(path: str | os.PathLike) -> str:
    """A path, as it is where that is one readable line; its start and its end where it is long, its repr where it has characters
    that cannot be printed.

    >>> print(shown_path("runs/a"), shown_path("a\\x1b[2J"))
    runs/a 'a\\x1b[2J'
    """
    text = os.fspath(path)
    text = text if isinstance(text, str) else os.fsdecode(text)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]}...{text[-LONGEST // 2 :]}"
    return text if text.isprintable() else repr(text)


def shown_error(error: BaseException) -> str:
    """What an error says, in one line and cut to a readable length.

    >>> shown_error(ValueError("a\\nb"))
    'a b'
    """
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."

"""A value in an error message: whatever a caller passed, shown in one line."""

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

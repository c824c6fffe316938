"""Names of the calls of a module that a forward calls several times, such as a shared layer or a discriminator.

The first call has the name of the module, and the second one "encoder.layer (call 2)".
"""

import re
from collections.abc import Callable

MOST_CALLS = 64
"""The number of calls of a module in a forward that are recorded: more than models share a layer, and fewer than the positions of
a sequence, for each of which a recurrent cell is called."""
_CALL = re.compile(r" \(call \d+\)$")


def next_call(module: str, is_taken: Callable[[str], bool]) -> str | None:
    """The name of the first call of a module whose name is not taken; None after `MOST_CALLS` calls, and after the first call of
    the root module.

    >>> next_call("shared", {"shared"}.__contains__), next_call("shared", {"other"}.__contains__)
    ('shared (call 2)', 'shared')
    """
    for call in range(1, MOST_CALLS + 1 if module else 2):
        name = f"{module} (call {call})" if call > 1 else module
        if not is_taken(name):
            return name
    return None


def called_module(name: str) -> str:
    """The module of a call.

    >>> called_module("encoder.layer (call 2)"), called_module("encoder.layer")
    ('encoder.layer', 'encoder.layer')
    """
    return _CALL.sub("", name)


def renamed_call(name: str, rename: Callable[[str], str]) -> str:
    """The name of the same call of a module that has another name; "" if the module is the root module under that name.

    >>> renamed_call("encoder.layer (call 2)", lambda module: module.upper())
    'ENCODER.LAYER (call 2)'
    """
    module = called_module(name)
    other = rename(module)
    return f"{other}{name.removeprefix(module)}" if other else ""

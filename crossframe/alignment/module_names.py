"""Names of modules in the names of parameters."""

import re
from collections.abc import Iterator

INDEX = re.compile(r"(?<![^.\[])\d+(?![^.\]/])")
"""The index of a layer: a part of a name, or in a pattern that of a slice."""


def kind_of(name: str) -> str:
    """The name without the indices of layers.

    >>> kind_of("h.11.attn.q.weight")
    'h.*.attn.q.weight'
    """
    return INDEX.sub("*", name)


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def first_part(name: str, module: str) -> str:
    """What a module calls the parameter, or the module that encloses it.

    >>> first_part("layers.0.norm.weight", "layers.0")
    'norm'
    """
    return name[len(module) + 1 :].partition(".")[0]


def is_in(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


def enclosing(name: str) -> Iterator[str]:
    """The modules that enclose a parameter, the innermost first, without the root.

    >>> list(enclosing("layers.0.fc.bias"))
    ['layers.0.fc', 'layers.0', 'layers']
    """
    while name := name.rpartition(".")[0]:
        yield name

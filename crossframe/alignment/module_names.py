"""Names of modules in the names of parameters. Their parts are separated by ".", and in keras and haiku by "/"."""

import re
from collections.abc import Iterator

INDEX = re.compile(r"(?<![^.\[])\d+(?![^.\]/])|(?<=/)\d+(?![^./])")
"""The index of a layer: a part of a name, or in a pattern that of a slice."""


def kind_of(name: str) -> str:
    """The name without the indices of layers.

    >>> kind_of("h.11.attn.q.weight"), kind_of("h/11/attn/q/kernel"), kind_of("a b[1/3] -> b a")
    ('h.*.attn.q.weight', 'h/*/attn/q/kernel', 'a b[*/3] -> b a')
    """
    return INDEX.sub("*", name)


def module_of(name: str) -> str:
    """The module of a parameter, or the one that encloses a module; "" for the root.

    >>> module_of("layers.0.fc.bias"), module_of("layers/fc/bias")
    ('layers.0.fc', 'layers/fc')
    """
    return name[: max(name.rfind("."), name.rfind("/"), 0)]


def first_part(name: str, module: str) -> str:
    """What a module calls the parameter, or the module that encloses it.

    >>> first_part("layers.0.norm.weight", "layers.0")
    'norm'
    """
    return re.split("[./]", name[len(module) + 1 :], maxsplit=1)[0]


def is_in(name: str, module: str) -> bool:
    return not module or name == module or name.startswith((f"{module}.", f"{module}/"))


def enclosing(name: str) -> Iterator[str]:
    """The modules that enclose a parameter, the innermost first, without the root.

    >>> list(enclosing("layers.0.fc.bias"))
    ['layers.0.fc', 'layers.0', 'layers']
    """
    while name := module_of(name):
        yield name

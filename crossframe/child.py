"""Runs a function of this project in a new process: `python -P .../crossframe/child.py PARENT MODULE:FUNCTION ARGUMENTS`.

The script is started by its path (`crossframe.processes.module_command`). It finds the packages of the project next to its own
folder, before packages of the same names in the current folder or on PYTHONPATH.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parents[1])
_LIBRARIES = frozenset({"crossframe", "torch_backend", "jax_backend"})
_RESEARCH = "experiments"


class _Finder:
    """Finds packages in the folder of the project.

    Args:
        names: names of the packages.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See `importlib.abc.MetaPathFinder`."""
        return PathFinder.find_spec(name, [_ROOT]) if name in self._names else None


def _main() -> None:
    _, parent, target, *sys.argv[1:] = sys.argv
    module, _, function = target.partition(":")
    # A training script may have its own package `experiments`.
    own = _LIBRARIES | {_RESEARCH} if module.partition(".")[0] == _RESEARCH else _LIBRARIES
    sys.meta_path.insert(0, _Finder(own))  # type: ignore[arg-type]
    from crossframe.processes import end_with_parent

    end_with_parent(int(parent))
    sys.exit(getattr(import_module(module), function)())


if __name__ == "__main__":
    _main()
elif __name__ == "__mp_main__":  # a multiprocessing child of such a process; that of a script has the script here
    sys.meta_path.insert(0, _Finder(_LIBRARIES | {_RESEARCH}))  # type: ignore[arg-type]

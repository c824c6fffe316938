"""The batch of a script's step: which arguments of a jitted function, or which arrays in a loss function, are its batch."""

import inspect
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from crossframe.environment.collect import digest
from jax_backend.recorder._array_interior import may_be_batch
from jax_backend.recorder._model_state import named_leaves
from jax_backend.recorder._optimizer_settings import noted
from jax_backend.tree import path_name


class Constants:
    """Arrays that a script gives to its step beside the batch, such as frozen weights: the same ones at two steps, while others
    are new. They are known once the second step begins, for which the first one waits.

    Attributes:
        digests: of the values of each, by its path among the arguments.
    """

    def __init__(self) -> None:
        self.are_known = False
        self.digests: dict[str, str] = {}
        self._first: dict[int, tuple[Any, str]] = {}  # each array, and the digest of one that may be written to
        self._step: int | None = None
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._found: dict[int, Any] = {}  # by id, which stays unique as long as the array lives

    def begin(self, arrays: Sequence[Any], given: Any, step: int) -> None:
        """A gradient is about to be taken in a step with this number.

        Args:
            arrays: what may be its batch.
            given: a pytree of all arguments.
        """
        if self._step is None:
            self._first, self._step = {id(array): (array, _written_digest(array)) for array in arrays}, step
        elif not self.are_known and step > self._step:
            second = {id(array): array for array in arrays}
            kept = [
                array for i, (array, before) in self._first.items() if i in second and before == _written_digest(array)
            ]
            same = {id(array): array for array in kept}
            if len(same) < len(second):
                self._found = same
                self.digests = {
                    ".".join(names) or f"argument {i}": _digest(leaf)
                    for i, (names, leaf) in enumerate(named_leaves(given))
                    if id(leaf) in same and getattr(leaf, "is_fully_addressable", True)
                }
            self.end()

    def end(self) -> None:
        """Stop looking for constants."""
        self._first, self.are_known = {}, True

    def note_copies(self, copies: Sequence[Any], arrays: Sequence[Any]) -> None:
        """Note which arrays of the first step were copied, since the step may donate them."""
        if not self.are_known:
            pairs = zip(copies, arrays, strict=True)
            self._copies |= {id(copy): (copy, array) for copy, array in pairs if copy is not array}

    def forget_copies(self) -> None:
        """The first step is recorded."""
        self._copies = {}

    def others(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays without the constants; a copy of a constant counts as one."""
        own = (self._copies.get(id(array), (array, array))[1] for array in arrays)
        return [array for array, its in zip(arrays, own, strict=True) if id(its) not in self._found]


def _digest(array: Any) -> str:
    return digest(np.ascontiguousarray(array).tobytes())


def _written_digest(array: Any) -> str:
    """The digest of an array that the script may write to; "" of others."""
    return _digest(array) if isinstance(array, np.ndarray) else ""


def batch_arguments(args: Any, kwargs: Any, result: Any, known: set[int], by_rank: frozenset[int]) -> tuple[int, ...]:
    """The arguments that are the batch: not parameters or state of the optimizer, and not returned under the same name as the
    statistics of norms and the metrics are.

    Args:
        known: arguments that are no batch.
        by_rank: those that have a leading dim of ranks.
    """
    returned = {
        (key, tuple(leaf.shape), leaf.dtype)
        for path, leaf in jax.tree_util.tree_flatten_with_path(result)[0]
        for key in (path, _last_name(path))
        if hasattr(leaf, "dtype")
    }
    # What has the name and the shape of a parameter of several models may be of another one, or a slow copy.
    models = noted.leaves if noted.num_models > 1 else set()
    found = []
    for i, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path((args, kwargs))[0]):
        if i in known or not hasattr(leaf, "dtype"):
            continue
        each = jax.ShapeDtypeStruct(leaf.shape[i in by_rank :], leaf.dtype)
        if not may_be_batch(each) or (path_name(path).rpartition(".")[2], each.shape) in models:
            continue
        # Positional arguments are the first part of the pair of arguments.
        if not {(key, tuple(leaf.shape), leaf.dtype) for key in (path[1:], _last_name(path))} & returned:
            found.append(i)
    return tuple(found)


def arrays_named_in(fun: Any) -> list[Any]:
    """The arrays, in dicts, lists or tuples too, to which a function of the script refers by name."""
    try:
        names = inspect.getclosurevars(inspect.unwrap(fun))
    except (TypeError, ValueError):  # a function without Python code
        return []
    found = [*names.nonlocals.values(), *names.globals.values()]
    return [each for each in found if isinstance(each, np.ndarray | jax.Array | dict | tuple | list)]


def samples_of_all_ranks(leaf: Any, lengths: Sequence[int]) -> Any:
    """An array with a leading dim of ranks as one with the samples of all ranks.

    Args:
        lengths: of the scans around the gradient. The dims that they cut come first.
    """
    cut = 0
    while cut < len(lengths) and leaf.ndim > cut + 2 and leaf.shape[cut + 1] == lengths[cut]:
        cut += 1
    moved = jnp.moveaxis(leaf, 0, cut)
    return jnp.reshape(moved, (*moved.shape[:cut], -1, *moved.shape[cut + 2 :]))


def _last_name(path: Any) -> str | None:
    last = next((key for key in reversed(path) if not isinstance(key, jax.tree_util.SequenceKey)), None)
    name = None if last is None else getattr(last, "key", getattr(last, "name", None))
    return name if isinstance(name, str) and isinstance(path[-1], type(last)) else None

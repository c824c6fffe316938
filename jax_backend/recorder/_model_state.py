"""State of a model that is no parameter, such as flax's `batch_stats`, as the buffers of a recording."""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from crossframe.dtypes import FLOATING
from crossframe.errors import UsageError
from jax_backend.recorder._device_ranks import Grid
from jax_backend.recorder._optimizer_settings import noted
from jax_backend.tree import dtype_name, path_name

ByRank = Mapping[str, Mapping[int, np.ndarray]]
"""The arrays of each rank of this process, by canonical name."""
_TORCH_NAMES = {"mean": "running_mean", "var": "running_var"}
"""The names in torch of the statistics of flax's batch norm."""
_OF_MEAN = re.compile(r"(.+)([./][a-z_]*)mean([a-z_]*(?:\.[a-z]+)?)")
"""The path of a running mean in (module, start, end): `norm.mean` of flax, `norm/~/mean_ema.average` of haiku, `norm/moving_mean`
of keras."""


def state_by_rank(state: Any, grid: Grid, params: Iterable[str], *, by_rank: bool) -> ByRank:
    """The floating leaves of a pytree of arrays, by rank.

    Args:
        params: canonical names of the parameters.
        by_rank: whether each leaf has a leading dim of ranks.

    Raises:
        UsageError: a leaf without that dim.
    """
    leaves = {
        path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0] if is_recorded(leaf)
    }
    found = {}
    for path, name in canonical_names(leaves, tuple(params)).items():
        leaf = leaves[path]
        if by_rank and np.shape(leaf)[:1] != (grid.spec.world_size,):
            raise UsageError(
                f"model_state: {path}: expected a leading dim of {grid.spec.world_size} ranks, as ShardedParams have "
                f"state, got shape {np.shape(leaf)}; make it with jax_backend.per_rank"
            )
        found[name] = of_ranks(leaf, grid, by_rank=by_rank)
    return found


def statistics_of_ranks(state: Any) -> list[str]:
    """The modules that normalise over the samples of their own rank, by path: their statistics differ between ranks.

    Args:
        state: after a step, of which each leaf has a leading dim of ranks. All processes call it.
    """
    leaves = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}
    found = []
    for path, mean in leaves.items():
        if (parts := _OF_MEAN.fullmatch(path)) is not None:
            variances = {f"{parts[1]}{parts[2]}{kind}{parts[3]}" for kind in ("var", "variance")}
            if variances & leaves.keys() and not bool((mean == mean[:1]).all()):
                found.append(parts[1].removesuffix("/~"))
    return list(dict.fromkeys(found))


def canonical_names(paths: Iterable[str], params: Sequence[str]) -> dict[str, str]:
    """The names of buffers by their paths (`canonical_name`). Paths that would share a name keep their own."""
    names = {path: canonical_name(path, params) for path in paths}
    shared = Counter(names.values())
    return {path: name if shared[name] == 1 else path for path, name in names.items()}


def of_ranks(leaf: Any, grid: Grid, *, by_rank: bool) -> Mapping[int, np.ndarray]:
    """An array of each rank of this process."""
    return {rank: grid.rows(leaf, rank)[0] for rank in grid.here} if by_rank else grid.copies(leaf)


def is_recorded(leaf: Any) -> bool:
    """Whether an array can be a buffer: it is floating, and has elements."""
    return hasattr(leaf, "dtype") and dtype_name(leaf) in FLOATING and 0 not in np.shape(leaf)


def canonical_name(path: str, params: Sequence[str]) -> str:
    """The name of a buffer in a recording: in the module whose parameters lie at the end of its path, under torch's name if it is
    a statistic of flax's batch norm.

    >>> canonical_name("batch_stats.norm.mean", ["params.norm.scale"]), canonical_name("2.ema.w", ["w"])
    ('params.norm.running_mean', '2.ema.w')
    """
    parts = path.split(".")
    modules = {name.rpartition(".")[0] for name in params}
    for start in range(len(parts) - 1):
        own = ".".join(parts[start:-1])
        found = [module for module in modules if module == own or module.endswith(f".{own}")]
        if len(found) == 1 and f"{found[0]}.{parts[-1]}" not in params:
            return f"{found[0]}.{_TORCH_NAMES.get(parts[-1], parts[-1])}"
    return path


def carried(args: Any, kwargs: Any, result: Any, left_out: AbstractSet[int]) -> dict[str, tuple[int, int]]:
    """The state that a function gets and returns: (index of the argument, index of the result) by path.

    It is a floating leaf of the flattened arguments that the function returns under the same path, with the same shape. The path
    in the result may begin with the name of a collection.

    Args:
        left_out: arguments that are no state: parameters and those of the optimizer.
    """
    returned: dict[tuple[tuple[str, ...], Any, Any], list[int]] = {}
    for j, (names, leaf) in enumerate(named_leaves(result)):
        if is_recorded(leaf):
            for start in range(len(names)):
                returned.setdefault((names[start:], tuple(leaf.shape), leaf.dtype), []).append(j)
    found: dict[str, tuple[int, int]] = {}
    taken: dict[int, int] = {}
    for i, (names, leaf) in enumerate(named_leaves((args, kwargs))):
        if i in left_out or not is_recorded(leaf):
            continue
        places = returned.get((names, tuple(leaf.shape), leaf.dtype), [])
        if names and len(places) == 1:
            found[".".join(names)] = i, places[0]
            taken[places[0]] = taken.get(places[0], 0) + 1
    return {name: (i, j) for name, (i, j) in found.items() if taken[j] == 1}


def name_list(state: Sequence[Any], names: Sequence[str]) -> None:
    """Give the arrays of a list names, as of the variables that a model of Keras gets and returns besides its parameters."""
    if (form := _form_of(state)) is not None:
        noted.state_names[form] = [*names]


def _form_of(value: Any) -> tuple[Any, ...] | None:
    """The shapes and dtypes of a list of arrays; None of anything else."""
    if not isinstance(value, list) or not value or not all(hasattr(each, "dtype") for each in value):
        return None
    return tuple((tuple(each.shape), each.dtype) for each in value)


def named_leaves(tree: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a pytree in its order, with the parts of their paths."""
    extract = sys.modules.get("flax.nnx.extract")
    kinds: tuple[type, ...] = () if extract is None else (extract.NodeStates,)

    def is_leaf(node: Any) -> bool:
        return isinstance(node, kinds) or _form_of(node) in noted.state_names

    for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]:
        if isinstance(leaf, kinds):
            yield from _leaves_of_module(leaf)
        elif isinstance(leaf, list):
            names = noted.state_names[_form_of(leaf) or ()]
            yield from zip((tuple(name.split(".")) for name in names), leaf, strict=True)
        else:
            yield _names(path), leaf


def _leaves_of_module(node: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a module as `nnx.jit` passes it: a list of arrays, whose paths are those of the module made of it."""
    leaves, nnx = jax.tree.leaves(node), sys.modules["flax.nnx"]
    names: dict[int, tuple[str, ...]] = {}
    if node._graphdef is not None and len(node.states) == 1:
        with suppress(Exception):  # of a module that shares variables with an earlier one
            made = nnx.merge(node._graphdef, [_Place(i) for i in range(len(leaves))])
            for path, variable in nnx.to_flat_state(nnx.state(made)):
                names[variable.get_value().index] = tuple(map(str, path))
    for i, leaf in enumerate(leaves):
        yield names.get(i, ()), leaf


@dataclass(frozen=True)
class _Place:
    """Stands for the array of a variable of nnx."""

    index: int


def _names(path: Sequence[Any]) -> tuple[str, ...]:
    """The parts of a path, without the indices before its first name."""
    first = next((k for k, key in enumerate(path) if not isinstance(key, jax.tree_util.SequenceKey)), len(path))
    return tuple(path_name(tuple(path[first:])).split(".")) if first < len(path) else ()

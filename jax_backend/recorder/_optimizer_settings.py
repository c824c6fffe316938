"""The settings of the optimizers that a script makes, under torch's names."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import numpy as np
import optax

from crossframe.alignment.module_names import is_in
from crossframe.recording.known_settings import GROUPS
from crossframe.replacing import replacing
from jax_backend.tree import path_name

_KINDS = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD"}
"""Optimizers with the same rule in torch. Others keep optax's names."""
_NUMBERS = {"learning_rate": "lr", "weight_decay": "weight_decay", "momentum": "momentum", "eps": "eps"}
_ONLY_IN_OPTAX = ("nesterov", "eps_root")
"""Options that change the rule, and that torch's optimizer of the same name lacks."""
_CLIPPING = "clip_by_global_norm"
_DECAY, _MASK = "weight_decay", "mask"
"""The decay of an optimizer, and the option that exempts parameters from it."""


class Noted:
    """The optimizers that a script has made."""

    def __init__(self) -> None:
        self.optimizers: list[tuple[str, dict[str, Any]]] = []
        self.clips: list[Any] = []
        self.of_keras: dict[int, dict[str, Any]] = {}
        """The settings of Keras optimizers, by the ids of the optimizers."""
        self.keras_names: dict[int, list[str]] = {}
        """The names of the parameters that each of them updates, by the same ids."""
        self.state_names: dict[tuple[Any, ...], list[str]] = {}
        """The names of the arrays in a list of a model's state, by the shapes and dtypes of all of them."""
        self.exempt: tuple[str, ...] | None = ()
        """Names of the parameters or trees that the last optimizer's decay mask excludes; None: unknown."""
        self.trees: list[dict[str, tuple[int, ...]]] = []
        self.leaves: set[tuple[str, tuple[int, ...]]] = set()
        """The shapes of parameters by their paths, of each model whose optimizer was initialised, and of each parameter the last
        part of its path with its shape."""
        self.initial: dict[int, Any] = {}
        """The arrays of these parameters by their ids, until the recording begins."""

    @property
    def has_optimizer(self) -> bool:
        """Whether the script has made or initialised an optimizer."""
        return bool(self.optimizers or self.of_keras or self.trees)

    @property
    def num_models(self) -> int:
        """How many models the script trains, as far as is known from the optimizers' states that it has initialised."""
        return max(1, len(self.trees))

    def initialised(self, params: Mapping[str, Any]) -> None:
        """The state of an optimizer of these parameters is made."""
        if params:
            shapes = {path: tuple(leaf.shape) for path, leaf in params.items()}
            if not any(_is_same_model(shapes, each) for each in self.trees):
                self.trees.append(shapes)
            self.initial |= {id(leaf): leaf for leaf in params.values()}
            names = {path: path.rpartition(".")[2] for path in params}
            self.leaves |= {
                (names[path], tuple(leaf.shape)) for path, leaf in params.items() if names[path].isidentifier()
            }

    def settings(self, params: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """For a manifest; empty unless the script has made one optimizer, or one of Keras was traced.

        Parameters that a mask exempts from decay are a group with decay 0, as in torch. If they are unknown, no decay is stated.

        Args:
            params: names of the parameters in each leaf that the optimizer updates, by its path.
        """
        if len(self.optimizers) + len(self.of_keras) != 1:
            return {}
        if self.of_keras:
            return next(iter(self.of_keras.values()))
        name, given = self.optimizers[0]
        is_of_torch = name in _KINDS and not any(given.get(option) for option in _ONLY_IN_OPTAX)
        found: dict[str, Any] = {"optimizer": _KINDS[name] if is_of_torch else name}
        found |= {ours: float(given[own]) for own, ours in _NUMBERS.items() if _is_number(given.get(own))}
        if _is_number(given.get("b1")) and _is_number(given.get("b2")):
            found["betas"] = [float(given["b1"]), float(given["b2"])]
        if self.exempt is None:
            found.pop(_DECAY, None)
        elif found.get(_DECAY) and (own := self._among_exempt(params)):
            found[GROUPS] = [{"params": own, _DECAY: 0.0}]
        if len(self.clips) == 1 and _is_number(self.clips[0]):
            found["clip"] = float(self.clips[0])
        return found

    def _among_exempt(self, params: Mapping[str, Sequence[str]]) -> list[str]:
        exempt = self.exempt or ()
        return [name for path, names in params.items() if any(is_in(path, each) for each in exempt) for name in names]

    def schedule(self) -> Callable | None:
        """The schedule of the learning rate, if the optimizer has one."""
        rate = self.optimizers[0][1].get("learning_rate") if len(self.optimizers) == 1 else None
        return rate if callable(rate) else None


noted = Noted()


@contextmanager
def noting_optimizers() -> Iterator[None]:
    """A context in which `noted` knows the optimizers that are made."""
    noted.__init__()
    makers = {
        name: maker
        for name, maker in vars(optax).items()
        if inspect.isfunction(maker) and (_takes_rate(maker) or name == _CLIPPING)
    }
    with ExitStack() as stack:
        for name, maker in makers.items():
            stack.enter_context(replacing(optax, name, _noting(name, maker)))
        yield


def _noting(name: str, maker: Callable) -> Callable:
    signature = inspect.signature(maker)

    @functools.wraps(maker)
    def make(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return maker(*args, **kwargs)  # raises it
        mask: Any = given.arguments.get(_MASK)
        is_function = callable(mask) and jax.tree_util.all_leaves([mask])
        if is_function:
            given.arguments[_MASK] = _noting_mask(mask)
        made = maker(*given.args, **given.kwargs)
        given.apply_defaults()
        if name == _CLIPPING:
            noted.clips.append(given.arguments["max_norm"])
        elif _is_number(rate := given.arguments["learning_rate"]) or callable(rate):
            noted.optimizers.append((name, dict(given.arguments)))
            noted.exempt = () if mask is None else None if is_function else _left_out(mask)
        return made

    return make


def _noting_mask(mask: Callable) -> Callable:
    """A mask whose first result, that for the parameters, is noted."""

    @functools.wraps(mask)
    def noting(tree: Any) -> Any:
        found = mask(tree)
        if noted.exempt is None:
            noted.exempt = _left_out(found)
        return found

    return noting


def _left_out(mask: Any) -> tuple[str, ...] | None:
    """The names that a mask leaves out (a tree of flags or a prefix of one); "" is everything. None if it has no flags."""
    leaves = jax.tree_util.tree_flatten_with_path(mask)[0]
    if not all(isinstance(keep, bool | np.bool_) for _, keep in leaves):
        return None
    return tuple(path_name(path) if path else "" for path, keep in leaves if not keep)


def _takes_rate(maker: Callable) -> bool:
    names = inspect.signature(maker).parameters
    return next(iter(names), "") == "learning_rate" and not maker.__name__.startswith(("scale_by", "_"))


def _is_same_model(a: Mapping[str, tuple[int, ...]], b: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether two trees of parameters are of one model, whole or divided over devices: some have a dim that is larger by a factor
    that all these have, and that divides the number of devices; most elements are in these. An actor and a critic may differ like
    this in their heads."""
    if sorted(a.values()) == sorted(b.values()):
        return True
    if a.keys() != b.keys() or any(len(a[name]) != len(b[name]) for name in a):
        return False
    apart = [[(x, y) for x, y in zip(a[name], b[name], strict=True) if x != y] for name in a]
    factors = {max(x, y) / min(x, y) if min(x, y) else 0.0 for dims in apart for x, y in dims}
    are_divided = all(each and jax.device_count() % each == 0 for each in factors)
    most = sum(math.prod(a[name]) for name, dims in zip(a, apart, strict=True) if dims)
    are_divided &= 2 * most > sum(map(math.prod, a.values()))
    return all(len(dims) < 2 for dims in apart) and len(factors) == 1 and are_divided


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

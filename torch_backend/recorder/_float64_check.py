"""Repeats a function of tensors in float64 on the same inputs, and bounds the difference that rounding can make.

`crossframe.operators.roundings` derives the bound.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from crossframe.dtypes import FLOATING, unit_roundoff
from crossframe.operators import Judged
from crossframe.operators.roundings import ARITHMETIC, DRAWS, OTHERS, SIGNIFICANT, bound_of, roundings_of_sum
from crossframe.operators.trace import worst
from torch_backend.compat._dtypes import dtype_name
from torch_backend.recorder._float32_precision import roundoff_of_factors

aten = torch.ops.aten
_NUM_SIGNS = 1 << 19


def packets(names: str) -> frozenset[Any]:
    """The operators of aten with these names, separated by spaces."""
    return frozenset(getattr(aten, name) for name in names.split())


_PRODUCTS = packets("mm bmm addmm baddbmm mv dot convolution")
_SUMS = _PRODUCTS | packets("sum mean cumsum linalg_vector_norm norm var std var_mean std_mean logsumexp")
_IS_ARITHMETIC = packets("add sub rsub mul div add_ sub_ mul_ div_ sqrt reciprocal neg square addcmul addcdiv lerp")


class Exact:
    """The results of a function in float64.

    Args:
        results: None for those that are not floating.
        reaches: by result how far rounding may drive it, as a norm.
    """

    def __init__(self, results: Sequence[Tensor | None], reaches: Sequence[float]) -> None:
        self._results, self._reaches = results, reaches

    def judge(self, result: Any) -> Judged | None:
        """The worst of all results; None if none can be judged."""
        return worst(self.judge_each(result))

    def judge_each(self, result: Any) -> list[Judged | None]:
        """Compare each tensor of a result with the exact one; None for those that are exactly zero, or not floating."""
        computed = tensor_leaves(result)
        if len(computed) != len(self._results):
            return [None] * len(computed)
        return [_judged(*each) for each in zip(computed, self._results, self._reaches, strict=True)]


def _judged(computed: Tensor, exact: Tensor | None, reach: float) -> Judged | None:
    dtype = dtype_name(computed.dtype)
    if exact is None or dtype not in FLOATING or computed.shape != exact.shape:
        return None
    kept = torch.isfinite(exact)
    wanted = exact[kept]
    size = float(wanted.norm())
    if not size:
        return None
    bound = bound_of(reach, size, dtype, wanted.numel())
    largest = torch.finfo(computed.dtype).max
    if not torch.equal(torch.isfinite(computed), kept) and float(wanted.abs().max()) < largest:
        return Judged(math.inf, bound)
    return Judged(float((computed.detach()[kept].double() - wanted).norm()) / size, bound)


def exact_of(function: Callable, args: tuple, kwargs: dict[str, Any], *, several: bool = False) -> Exact | None:
    """The results of a function in float64, before it may change its inputs; None where it cannot be repeated.

    Args:
        several: whether it may consist of several operators, and may be random.
    """
    tensors = tensor_leaves((args, kwargs))
    if not tensors or any(type(each) not in (Tensor, nn.Parameter) for each in tensors):
        return None
    dtypes = {dtype_name(each.dtype) for each in tensors if each.is_floating_point()}
    if not dtypes or not dtypes <= set(FLOATING):
        return None
    try:
        with _forked_generators(tensors):
            exact = _wide_results(function, args, kwargs)
            if several and not _same(exact, _wide_results(function, args, kwargs)):
                return None
            squares = [0.0] * len(exact)
            for seed in range(DRAWS):
                with _Perturbed(seed, dtypes, several):
                    drawn = _wide_results(function, args, kwargs)
                moved = [_distance(*each) for each in zip(drawn, exact, strict=True)]
                squares = [total + each**2 for total, each in zip(squares, moved, strict=True)]
    except Exception:  # an operator may refuse float64 in any way of its own
        return None
    return Exact(exact, [SIGNIFICANT * math.sqrt(each / DRAWS) for each in squares])


def _forked_generators(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """A context that restores the generators of the CPU and of the tensors' devices. (Reading one initialises its device.)"""
    devices = {each.device for each in tensors if each.device.type not in ("cpu", "meta")}
    return torch.random.fork_rng(devices, device_type=next((each.type for each in devices), None))


def widened(value: Any) -> Any:
    """A floating tensor in float64, any other tensor as a copy, a floating dtype as float64; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64, copy=True) if value.is_floating_point() else value.clone()
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _wide_results(function: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Tensor | None]:
    own_args, own_kwargs = tree_map(widened, (args, kwargs))
    found = tensor_leaves(function(*own_args, **own_kwargs))
    return [each.detach().double() if each.is_floating_point() else None for each in found]


def tensor_leaves(value: Any) -> list[Tensor]:
    """All tensors in a pytree."""
    return [each for each in tree_leaves(value) if isinstance(each, Tensor)]


def _same(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs if a is not None and b is not None)


def _distance(drawn: Tensor | None, exact: Tensor | None) -> float:
    if drawn is None or exact is None or drawn.shape != exact.shape:
        return 0.0
    kept = torch.isfinite(exact) & torch.isfinite(drawn)
    return float((drawn[kept] - exact[kept]).norm())


class _Perturbed(TorchDispatchMode):
    """A context in which the inputs of each operator are perturbed by as much as its own rounding.

    Args:
        dtypes: floating dtypes of the inputs, before they were widened.
        several: whether results of one operator that another reads were rounded to the lowest of these.
    """

    def __init__(self, seed: int, dtypes: set[str], several: bool) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)
        roundoffs = [unit_roundoff(each) for each in dtypes]
        self._stored = max(roundoffs)
        self._inner = min(self._stored, unit_roundoff("float32"))
        self._between = self._stored if several and self._stored > self._inner else 0.0
        self._has_float32 = "float32" in dtypes

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.is_view:
            return func(*args, **kwargs)
        written = {each.name for each in func._schema.arguments if each.alias_info is not None}
        names = [each.name for each in func._schema.arguments]
        of_inputs, of_results = self._sizes(func, args, tensor_leaves((args, kwargs)))

        def moved(name: str, value: Any) -> Any:
            return value if name in written else tree_map(lambda each: self._moved(each, of_inputs), value)

        own_args = [moved(name, value) for name, value in zip(names, args, strict=False)]
        result = func(*own_args, **{name: moved(name, value) for name, value in kwargs.items()})
        if not of_results or written:
            return result
        return tree_map(lambda each: self._moved(each, of_results), result)

    def _sizes(self, func: Any, args: tuple, tensors: Sequence[Tensor]) -> tuple[float, float]:
        """How far off, relative to themselves, elements are that an operator reads, and those of its results."""
        packet, u = func.overloadpacket, self._inner
        if packet in _IS_ARITHMETIC:
            return ARITHMETIC * u + self._between, 0.0
        if torch.Tag.pointwise in func.tags:
            return OTHERS * u + self._between, 0.0
        terms = _terms(packet, args, tensors)
        if packet in _SUMS:
            of_factors = 0.0
            if packet in _PRODUCTS and self._has_float32:
                of_factors = roundoff_of_factors(tensors[0].device.type, convolution=packet is aten.convolution)
            of_inputs, of_results = roundings_of_sum(terms, u, of_factors)
            return of_inputs + self._between, of_results
        return OTHERS * u + self._between, math.sqrt(terms) * self._stored

    def _moved(self, value: Any, size: float) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float64 or not value.numel():
            return value
        return value * (1 + size * self._drawn(value))

    def _drawn(self, value: Tensor) -> Tensor:
        """Signs for the elements of a tensor: a random part of many signs that are drawn once, repeated if there are too few."""
        start = int(torch.randint(0, _NUM_SIGNS, (), generator=self._generator))
        signs = _signs(value.device)[start : start + min(value.numel(), _NUM_SIGNS)]
        return signs.repeat(-(-value.numel() // len(signs)))[: value.numel()].view(value.shape)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    drawn = torch.randint(0, 2, (2 * _NUM_SIGNS,), generator=torch.Generator().manual_seed(0))
    return (2 * drawn - 1).to(device, torch.float64)


def _terms(packet: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> int:
    """At least how many terms an element of the result adds up."""
    if packet is aten.convolution:
        return tensors[1].numel() // tensors[1].shape[0]
    if packet in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot, aten.cumsum):
        return tensors[-2 if len(tensors) > 1 else 0].shape[-1]
    if packet in _SUMS:
        dims = next((each for each in args[1:] if isinstance(each, list | tuple) and each), range(tensors[0].dim()))
        return math.prod(tensors[0].shape[dim] for dim in dims)
    sizes = [each.numel() for each in tensors if each.is_floating_point() and each.numel()]
    inner = [each.shape[-1] for each in tensors if each.dim() > 1]
    return max([*inner, max(sizes, default=1) // min(sizes, default=1)], default=1)

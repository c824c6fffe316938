"""A function of tensors repeated in float64 on the inputs that it had, and how far rounding may drive its results from that.

[Note: the bound of an operator] Arithmetic is right to one rounding, elementary functions to some units in the last place, and
kernels are stable: what they compute is the exact result of inputs that are off by a few roundings, rounded (mixed stability,
N. Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 1.5). So the function is evaluated in float64 on
inputs x (1 + k u s), with s = +1 or -1 at random for each element, u the unit roundoff, and k

    4         for arithmetic of elements, whose inputs take part in at most a few roundings
    64        for other functions of elements: vectorised exponentials are off by up to 20 units in the last place, which is 40 u
    64 + 6 sqrt(n)   for kernels that add up n numbers besides other things, such as norms and softmax: the probabilistic bound
              of N. Higham and T. Mary, A new approach to probabilistic rounding error analysis, 2019, with lambda = 6
    4 + n     for sums of n products: each takes part in at most n additions

To first order such an evaluation is off by k u J (x s), whose mean square over s is the sum of (k u J_ij x_j)^2. Four draws
estimate it; four times their root mean square is the bound on the norm of the error, together with 4 roundings of the result. The
estimate is below a quarter of its mean with a chance of 0.7 % where it depends on one number alone, and the error of a right
kernel is far below k u: it would have to reach the bound by that.

A function of several operators, such as a compiled graph, is perturbed at each of them. Kernels of bfloat16 and float16 compute
in float32, so u is that of float32 inside of an operator, and between several that of the dtype.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from crossframe.dtypes import FLOATING, unit_roundoff
from crossframe.operators import Judged
from torch_backend.dtypes import dtype_name

aten = torch.ops.aten
_DRAWS = 4
_SIGNIFICANT = 4.0
_RESULT_ROUNDINGS = 4
_ARITHMETIC, _ELEMENTARY, _LAMBDA = 4, 64, 6
_TF32 = 2.0**-11


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


_SUMS = _packets("mm bmm addmm baddbmm mv dot sum mean convolution cumsum")
_IS_ARITHMETIC = _packets("add sub rsub mul div add_ sub_ mul_ div_ sqrt reciprocal neg square addcmul addcdiv lerp")
_ACCUMULATES = _packets("index_put index_put_ index_add scatter_add embedding_dense_backward cumsum scatter_reduce")
"""Kernels that add up in the dtype of their result."""


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
        judged = [each for each in self.judge_each(result) if each is not None]
        return max(judged, key=lambda each: each.error / each.bound, default=None)

    def judge_each(self, result: Any) -> list[Judged | None]:
        """Each tensor of a result held against what is exact; None for those that are exactly zero, or not floating."""
        computed = _tensors(result)
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
    info = torch.finfo(computed.dtype)
    reach += _RESULT_ROUNDINGS * unit_roundoff(dtype) * size
    reach += math.sqrt(wanted.numel()) * info.smallest_normal * info.eps
    if not torch.equal(torch.isfinite(computed), kept) and float(wanted.abs().max()) < info.max:
        return Judged(math.inf, reach / size)
    return Judged(float((computed.detach()[kept].double() - wanted).norm()) / size, reach / size)


def exact_of(function: Callable, args: tuple, kwargs: dict[str, Any], *, several: bool = False) -> Exact | None:
    """The results of a function in float64, before it may change its inputs; None where it cannot be repeated.

    Args:
        several: whether it may consist of several operators, and may be random.
    """
    tensors = _tensors((args, kwargs))
    if not tensors or any(type(each) not in (Tensor, nn.Parameter) for each in tensors):
        return None
    dtypes = {dtype_name(each.dtype) for each in tensors if each.is_floating_point()}
    if not dtypes or not dtypes <= set(FLOATING):
        return None
    try:
        with torch.random.fork_rng():
            exact = _wide_results(function, args, kwargs)
            if several and not _same(exact, _wide_results(function, args, kwargs)):
                return None
            squares = [0.0] * len(exact)
            for seed in range(_DRAWS):
                with _Perturbed(seed, dtypes, several):
                    drawn = _wide_results(function, args, kwargs)
                moved = [_distance(*each) for each in zip(drawn, exact, strict=True)]
                squares = [total + each**2 for total, each in zip(squares, moved, strict=True)]
    except Exception:  # an operator may refuse float64 in any way of its own
        return None
    return Exact(exact, [_SIGNIFICANT * math.sqrt(each / _DRAWS) for each in squares])


def widened(value: Any) -> Any:
    """A floating tensor in float64, any other tensor as a copy, a floating dtype as float64; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64, copy=True) if value.is_floating_point() else value.clone()
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _wide_results(function: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Tensor | None]:
    own_args, own_kwargs = tree_map(widened, (args, kwargs))
    found = _tensors(function(*own_args, **own_kwargs))
    return [each.detach().double() if each.is_floating_point() else None for each in found]


def _tensors(value: Any) -> list[Tensor]:
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
    """A context in which each operator reads inputs that are off by what its own rounding amounts to.

    Args:
        dtypes: floating dtypes of the inputs, before they were widened.
        several: whether results of one operator that another reads were rounded to the lowest of these.
    """

    def __init__(self, seed: int, dtypes: set[str], several: bool) -> None:
        super().__init__()
        self._seed, self._generators = seed, {}
        roundoffs = [unit_roundoff(each) for each in dtypes]
        self._stored = max(roundoffs)
        self._inner = min(self._stored, unit_roundoff("float32"))
        self._between = self._stored if several and self._stored > self._inner else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload) or func.is_view:
            return func(*args, **kwargs)
        written = {each.name for each in func._schema.arguments if each.alias_info is not None}
        names = [each.name for each in func._schema.arguments]
        size = self._size(func, args, _tensors((args, kwargs)))

        def moved(name: str, value: Any) -> Any:
            return value if name in written else tree_map(lambda each: self._moved(each, size), value)

        own_args = [moved(name, value) for name, value in zip(names, args, strict=False)]
        return func(*own_args, **{name: moved(name, value) for name, value in kwargs.items()})

    def _size(self, func: Any, args: tuple, tensors: Sequence[Tensor]) -> float:
        """How far off, relative to itself, an element that an operator reads is."""
        packet, u = func.overloadpacket, self._inner
        if packet in _SUMS and any(each.is_cuda for each in tensors) and torch.backends.cuda.matmul.allow_tf32:
            u = max(u, _TF32)
        if packet in _ACCUMULATES:
            u = self._stored
        if packet in _IS_ARITHMETIC:
            roundings = _ARITHMETIC
        elif torch.Tag.pointwise in func.tags:
            roundings = _ELEMENTARY
        elif packet in _SUMS:
            roundings = _ARITHMETIC + _terms(packet, args, tensors)
        else:
            roundings = _ELEMENTARY + _LAMBDA * math.sqrt(_terms(packet, args, tensors))
        return roundings * u + self._between

    def _moved(self, value: Any, size: float) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        signs = torch.randint(0, 2, value.shape, generator=self._generators[value.device], device=value.device)
        return value * (1 + size * (2 * signs - 1))


def _terms(packet: Any, args: Sequence[Any], tensors: Sequence[Tensor]) -> int:
    """At least how many terms an element of the result adds up."""
    if packet is aten.convolution:
        return tensors[1].numel() // tensors[1].shape[0]
    if packet in (aten.sum, aten.mean):
        dims = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) and args[1] else range(tensors[0].dim())
        return math.prod(tensors[0].shape[dim] for dim in dims)
    if packet in _SUMS:
        return tensors[-2 if len(tensors) > 1 else 0].shape[-1]
    sizes = [each.numel() for each in tensors if each.is_floating_point() and each.numel()]
    inner = [each.shape[-1] for each in tensors if each.dim() > 1]
    return max([*inner, max(sizes, default=1) // min(sizes, default=1)], default=1)

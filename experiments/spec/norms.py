"""R30: the norm of sharded gradients, and clipping, beside torch's on whole gradients in float64."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import product
from math import prod

import numpy as np
import torch

from crossframe.dtypes import numpy_dtype
from crossframe.grad_norm import norm_dtype
from crossframe.layout import Layout
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.reference.grad_norm import clip_coefficient, combine, norm_reductions, partial
from crossframe.writeback import writeback_copies
from experiments.spec.cases import KINDS, layout_of
from experiments.spec.checks import SEED, Scope
from experiments.spec.fake_ranks import DTYPES
from experiments.spec.tally import Tallies
from experiments.spec.watch import dtype_name

NUM_MODELS = 1500
ORDERS = (1.0, 2.0, 3.0, math.inf)
SHAPES = ((0,), (1,), (5,), (13,), (4, 4), (7, 2), (3, 2, 3))
# A quarter, no, and a hundred times the norm.
BOUNDS = (0.25, 0.0, 100.0)
EMPTY = (
    "torch raises on a gradient without elements where the norm is of order inf; in the core it counts for nothing, as in "
    "any order"
)
Grads = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Model:
    """Units by name: shapes of their parameters, kind of layout and mesh; a dtype; which parameters have no gradient."""

    units: tuple[tuple[tuple[tuple[int, ...], ...], str, MeshSpec], ...]
    dtype: str
    without: frozenset[str]
    seed: int

    def layouts(self) -> dict[str, Layout]:
        """The core's layout of every unit."""
        return {f"u{at}": self._layout(at) for at in range(len(self.units))}

    def meshes(self) -> dict[str, MeshSpec]:
        """The mesh of every unit."""
        return {f"u{at}": mesh for at, (_, _, mesh) in enumerate(self.units)}

    def _layout(self, at: int) -> Layout:
        shapes, kind, mesh = self.units[at]
        specs = tuple(ParamSpec(f"u{at}.p{i}", shape, self.dtype) for i, shape in enumerate(shapes))
        return layout_of(kind, specs, mesh.shard)

    def grads(self) -> dict[str, np.ndarray]:
        """Full gradients, over some orders of magnitude."""
        rng = np.random.default_rng(self.seed)
        specs = [spec for layout in self.layouts().values() for spec in layout.params]
        scales = 10.0 ** rng.integers(-2, 3, len(specs))
        drawn = {spec.name: rng.standard_normal(spec.shape) * scale for spec, scale in zip(specs, scales, strict=True)}
        return {name: grad.astype(numpy_dtype(self.dtype)) for name, grad in drawn.items() if name not in self.without}


@cache
def models() -> tuple[Model, ...]:
    """A seeded sample of models of one to three units, each on a mesh of its own over the same ranks."""
    rng = random.Random(SEED)
    return tuple(_model(rng) for _ in range(NUM_MODELS))


def _model(rng: random.Random) -> Model:
    world_size = rng.randint(1, 8)
    shards = [shard for shard in range(1, world_size + 1) if world_size % shard == 0]
    units = []
    for _ in range(rng.randint(1, 3)):
        shard = rng.choice(shards)
        shapes = tuple(rng.choices(SHAPES, k=rng.randint(1, 3)))
        units.append((shapes, rng.choice(KINDS), MeshSpec(shard, world_size // shard)))
    names = [f"u{at}.p{i}" for at, (shapes, _, _) in enumerate(units) for i in range(len(shapes))]
    without = frozenset(name for name in names if rng.random() < 0.2)
    return Model(tuple(units), rng.choice(tuple(DTYPES)), without, rng.randrange(2**32))


def norms(tallies: Tallies, scope: Scope) -> None:
    """Every order of norm on every rank of every model, and every clipped gradient; padding holds NaN."""
    tally = tallies["R30"]
    for model in scope.take(models(), num_quick=40):
        grads = model.grads()
        dtype = norm_dtype([model.dtype])
        held = _held(model, grads)
        for order in ORDERS:
            if order == math.inf and not all(grad.size for grad in grads.values()):
                _compare_empty(tallies, model, grads)
            some = {name: grad for name, grad in grads.items() if grad.size}
            whole = _clipped_by_torch(some, order, math.inf)[0]
            found = _norms(model, held, order, dtype)
            close = [_within(model, float(norm), whole, dtype) for norm in found]
            same_type = {str(norm.dtype) for norm in found} == {dtype}
            tally.compare((close, same_type), ([True] * len(found), True), (model, f"order {order}", found, whole))
            for bound in BOUNDS:
                _compare_clipped(tallies, model, some, order, bound * whole, found[0], dtype)


def _held(model: Model, grads: Grads) -> list[dict[str, list[np.ndarray]]]:
    """By rank and unit, pieces of gradients read out of shards that hold NaN wherever the layout puts no element."""
    ranks = []
    for rank in range(next(iter(model.meshes().values())).world_size):
        held: dict[str, list[np.ndarray]] = {}
        for (unit, layout), mesh in zip(model.layouts().items(), model.meshes().values(), strict=True):
            shard = np.full(layout.padded_shard_numel, np.nan, numpy_dtype(model.dtype))
            index = mesh.coordinate(rank)[1]
            for copy in writeback_copies(layout, index):
                full = grads.get(layout.params[copy.index].name)
                if full is not None:
                    shard[copy.shard_start : copy.shard_stop] = full.reshape(-1)[copy.param_start : copy.param_stop]
            runs = [(piece, run) for piece in layout.pieces(index) if piece.name in grads for run in piece.runs()]
            held[unit] = [shard[run.shard_start : run.shard_start + run.numel] for _, run in runs]
        ranks.append(held)
    return ranks


def _norms(model: Model, held: Sequence[dict[str, list[np.ndarray]]], order: float, dtype: str) -> list[np.ndarray]:
    """The norm as each rank finds it, by the core's list of all-reduces, done by hand."""
    found = []
    for rank in range(len(held)):
        totals = []
        for reduction in norm_reductions(model.meshes(), rank, order):
            parts = [partial((g for u in reduction.units for g in held[r][u]), order, dtype) for r in reduction.group]
            totals.append(reduce(np.maximum if reduction.op.value == "max" else np.add, parts))
        found.append(combine(totals, order, dtype))
    return found


def _clipped_by_torch(grads: Grads, order: float, max_norm: float) -> tuple[float, dict[str, np.ndarray]]:
    """torch's norm of whole gradients in float64, and what its clipping leaves."""
    params = {name: torch.nn.Parameter(torch.zeros(grad.shape, dtype=torch.float64)) for name, grad in grads.items()}
    for name, param in params.items():
        param.grad = torch.from_numpy(grads[name].astype(np.float64))
    norm = torch.nn.utils.clip_grad_norm_(list(params.values()), max_norm, order)
    return float(norm), {name: param.grad.numpy() for name, param in params.items() if param.grad is not None}


def _compare_empty(tallies: Tallies, model: Model, grads: Grads) -> None:
    try:
        _clipped_by_torch(grads, math.inf, math.inf)
    except RuntimeError:
        tallies["R30"].explain(EMPTY, model)
    else:
        tallies["R30"].agreed += 1


def _tolerance(model: Model, dtype: str) -> float:
    """Relative: non-negative terms lose u with each of the n additions; a power, a root and a product lose a few u more."""
    numel = sum(prod(shape) for shapes, _, _ in model.units for shape in shapes)
    return (numel + 32) * float(np.finfo(dtype).eps)


def _within(model: Model, ours: float, theirs: float, dtype: str) -> bool:
    return abs(ours - theirs) <= _tolerance(model, dtype) * theirs


def _compare_clipped(
    tallies: Tallies, model: Model, grads: Grads, order: float, max_norm: float, norm: np.ndarray, dtype: str
) -> None:
    """The coefficient, by what it makes of the gradients; in the norm's dtype, where nothing else is rounded."""
    coefficient = clip_coefficient(norm, max_norm)
    _, whole = _clipped_by_torch(grads, order, max_norm)
    wrong = [
        name
        for name, grad in grads.items()
        if not np.allclose(
            grad.astype(dtype) * coefficient,
            whole[name],
            rtol=_tolerance(model, dtype),
            atol=float(np.finfo(dtype).tiny),
        )
    ]
    case = (model, f"order {order}", f"max_norm {max_norm}")
    tallies["R30"].compare((wrong, bool(coefficient <= 1)), ([], True), case)


def dtypes(tallies: Tallies, scope: Scope) -> None:
    """Every set of up to three dtypes: that of the norm is torch's promotion of all of them with float32."""
    for length in range(4):
        for names in product(DTYPES, repeat=length):
            promoted = reduce(torch.promote_types, [DTYPES[name] for name in names], torch.float32)
            tallies["R30"].compare(norm_dtype(names), dtype_name(promoted), names)

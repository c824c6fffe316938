"""PieceTensor: what parameters are under a flat or ragged layout (pieces/, registration/_pieces.py)."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportPrivateImportUsage=false, reportReturnType=false

import copy
import io
import math
import os
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from crossframe.errors import ParamError, ReplacedError, UsageError
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.layouts import LAYOUTS, mesh_of, shard
from tests.on_torch.helpers.models import build_net, loss_of
from tests.on_torch.helpers.piece_tensors import ELEMENTWISE, FUSED, HOW, full_tensors, like, pieces_of
from torch_backend.engine._unit import unit_of
from torch_backend.observe import record_trace
from torch_backend.pieces._piece_tensor import PieceTensor, piece_tensor

PIECES = LAYOUTS[1:]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """NaNs included."""
    return (
        type(a) is Tensor
        and a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.reshape(-1, 1).view(torch.uint8), b.reshape(-1, 1).view(torch.uint8))
    )


def close(a: Tensor, b: Tensor) -> bool:
    """Within some roundings of float64."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-13, atol=1e-15)


# Training


class Sums(nn.Module):
    """Its gradients are the integers that it is given, so that they sum exactly in any order (R32)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3, 5), nn.Linear(7, 2)])
        self.weight = nn.Parameter(torch.randn(6, 3))

    def forward(self, generator: torch.Generator) -> Tensor:
        def product_with(param: Tensor) -> Tensor:
            return (param * torch.randint(-4, 5, param.shape, generator=generator)).sum()

        parts = [product_with(self.weight)]
        for block in self.blocks:
            parts.append(block(generator))
        return torch.stack(parts).sum()


def _sums(self: nn.Linear, generator: torch.Generator) -> Tensor:
    return sum(
        ((p * torch.randint(-4, 5, p.shape, generator=generator)).sum() for p in (self.weight, self.bias)),
        torch.zeros(()),
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw, lists": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
}


def _trained(rank: int, layout: str, optimizer: str, exact: bool, mesh: Any) -> Any:
    """Parameters and optimizer state in full after three steps of two microbatches."""
    if exact:
        torch.manual_seed(5)
        model: nn.Module = Sums()
        for block in model.blocks:
            block.forward = _sums.__get__(block)
    else:
        model = build_net(tied=True)
    shard(model, layout, mesh)
    stepping = OPTIMIZERS[optimizer](model.parameters())
    for step in range(3):
        for microbatch in range(2):
            if exact:
                loss = model(torch.Generator().manual_seed(100 * step + 10 * microbatch + rank))
            else:
                loss = loss_of(model, 2 * step + microbatch, rank)
            loss.backward()
        stepping.step()
        stepping.zero_grad(set_to_none=step == 0)
    named = dict(model.named_parameters())
    assert all(isinstance(param, DTensor if layout == "per_param" else PieceTensor) for param in named.values())
    state = {
        (name, key): value.full_tensor() if isinstance(value, DTensor | PieceTensor) else value
        for name, param in named.items()
        for key, value in stepping.state[param].items()
    }
    return {name: param.detach().full_tensor() for name, param in named.items()}, state


def _trains(rank: int, world_size: int, exact: bool, sizes: tuple[int, ...], optimizers: list[str]) -> None:
    mesh = mesh_of(*sizes)
    for optimizer in optimizers:
        expected, *others = [_trained(rank, kind, optimizer, exact, mesh) for kind in LAYOUTS]
        for kind, found in zip(PIECES, others, strict=True):
            for of_a, of_b in zip(expected, found, strict=True):
                assert of_a.keys() == of_b.keys()
                for name in of_a:
                    assert same_bits(of_a[name], of_b[name]), (optimizer, kind, name)


# An optimizer sees pieces alone, whatever the mesh is: two step on one mesh, one on each of the others (--exhaustive: all).
@pytest.mark.parametrize(
    ("sizes", "exact", "optimizers"),
    [((2,), False, ["momentum", "adamw, lists"]), ((3,), True, ["momentum"]), ((2, 2), True, ["adamw, lists"])],
)
def test_R09_three_layouts_train_to_the_same_bits(ranks, sizes, exact, optimizers):
    ranks.run(math.prod(sizes), _trains, exact, sizes, list(OPTIMIZERS) if EXHAUSTIVE in os.environ else optimizers)


def _steps_of(params: Any, grads: list[list[Any]], name: str, options: dict[str, Any]) -> torch.optim.Optimizer:
    optimizer = getattr(torch.optim, name)(params, **options)
    for step, given in enumerate(grads):
        for param, grad in zip(params, given, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)
    return optimizer


def _optimizers(rank: int, world_size: int, kind: str) -> None:
    full, grads = full_tensors(0), [full_tensors(10 + step) for step in range(3)]
    for (at, (name, options)), how in product(enumerate(ELEMENTWISE), HOW):
        if "fused" in how and name not in FUSED:
            continue
        # Each optimizer with each layout, and in each of its ways with one layout of the two.
        if EXHAUSTIVE not in os.environ and (at + HOW.index(how) + PIECES.index(kind)) % 2:
            continue
        plain = [nn.Parameter(value.clone()) for value in full]
        pieces = [nn.Parameter(piece) for piece in pieces_of(kind, full)]
        # A fused kernel on the CPU rounds the last elements of a tensor, which fill no vector register, in another way.
        same = same_bits if "foreach" in how else close
        expected = _steps_of(plain, grads, name, options | how)
        found = _steps_of(pieces, [like(pieces, given) for given in grads], name, options | how)
        for a, b in zip(plain, pieces, strict=True):
            assert isinstance(b, PieceTensor) and same(a.detach(), b.full_tensor()), (name, how, b)
            assert expected.state[a].keys() == found.state[b].keys()
            for key, value in expected.state[a].items():
                other = found.state[b][key]
                if isinstance(value, Tensor) and value.shape == a.shape and value.dim():
                    assert same(value, other.full_tensor()), (name, how, key)
                else:
                    assert value == other, (name, how, key)


@pytest.mark.parametrize("kind", PIECES)
def test_R09_every_elementwise_optimizer_steps_as_on_full_tensors(ranks, kind):
    ranks.run(3, _optimizers, kind)


def _averaged(rank: int, world_size: int) -> None:
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    full, others = full_tensors(0), full_tensors(1)
    pieces = pieces_of("flat", full)
    averaged = [value.clone() for value in full]
    for means, values in ((averaged, others), (pieces, like(pieces, others))):
        get_ema_multi_avg_fn(0.9)(means, values, torch.tensor(1))
    for a, b in zip(averaged, pieces, strict=True):
        assert same_bits(a, b.full_tensor())


def test_an_exponential_average_of_pieces_is_that_of_the_parameters(ranks):
    ranks.run(2, _averaged)


# Gradient scalers


def _scales(rank: int, world_size: int) -> None:
    full = full_tensors(0, torch.float32)
    for fused, bad in product((None, True), (False, True)):
        pieces = [nn.Parameter(piece) for piece in pieces_of("flat", full)]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(pieces, lr=1.0, fused=fused)
        scaler.scale(torch.zeros(()))
        for piece, grad in zip(pieces, like(pieces, full), strict=True):
            piece.grad = grad * 8
        if bad and rank == 1:
            pieces[-1].grad.local[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (4.0 if bad else 8.0)
        for piece, value in zip(pieces, full, strict=True):
            assert same_bits(piece.full_tensor(), value if bad else torch.zeros_like(value))


def test_a_grad_scaler_sees_on_every_rank_what_one_rank_has(ranks):
    ranks.run(2, _scales)


# Operations


def _pointwise_ops() -> list[tuple[Any, int]]:
    """Every operation that torch tags as pointwise and that needs one, two or three tensors and nothing else."""
    found = []
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if name.startswith("__") or not hasattr(packet, "overloads"):
            continue
        for overload in ("default", "Tensor", "self", "other"):
            op = getattr(packet, overload, None)
            if op is None or torch.Tag.pointwise not in op.tags or torch.Tag.nondeterministic_seeded in op.tags:
                continue
            needed = [a for a in op._schema.arguments if not a.has_default_value()]
            tensors = all(str(a.type) == "Tensor" for a in (*needed, *op._schema.returns))
            if tensors and 0 < len(needed) <= 3:
                found.append((op, len(needed)))
    return found


def _computes(rank: int, world_size: int, kind: str) -> int:
    # One lies on the first rank, one has no elements, one lies on both ranks.
    shapes = ((5, 3), (0, 4), (3, 17))
    num_done = 0
    for op, num_tensors in _pointwise_ops():
        for dtype in (torch.float64, torch.int64, torch.bool):
            full = [
                [t.abs().add(0.5).to(dtype) for t in full_tensors(seed, shapes=shapes)] for seed in range(num_tensors)
            ]
            if "where" in str(op) or "masked" in str(op):
                full[0] = [t > 1 for t in full_tensors(0, shapes=shapes)]
            try:
                expected = [op(*[t.clone() for t in args]) for args in zip(*full, strict=True)]
            except (RuntimeError, NotImplementedError):
                continue  # not defined for this dtype
            pieces = [pieces_of(kind, [t.double() for t in values]) for values in full]
            pieces = [[p.to(t.dtype) for p, t in zip(*pair, strict=True)] for pair in zip(pieces, full, strict=True)]
            for args, value in zip(zip(*pieces, strict=True), expected, strict=True):
                found = op(*args)
                for a, b in zip(*[x if isinstance(x, tuple) else (x,) for x in (value, found)], strict=True):
                    # A function's last elements, which fill no vector register, may be rounded otherwise than the first.
                    eps = torch.finfo(a.dtype).eps if a.is_floating_point() else 0
                    assert isinstance(b, PieceTensor) and b.dtype == a.dtype, (op, dtype)
                    assert torch.allclose(b.full_tensor(), a, rtol=16 * eps, atol=0, equal_nan=True), (op, dtype)
                if op._schema.is_mutable:
                    assert found is args[0]
            num_done += 1
    return num_done


@pytest.mark.exhaustive
def test_R09_what_is_pointwise_is_computed_piece_by_piece(ranks):
    assert min(ranks.run(2, _computes, "flat")) > 250


def _creates(rank: int, world_size: int, kind: str) -> None:
    full = full_tensors(0)
    for piece, value in zip(pieces_of(kind, full), full, strict=True):
        made = {
            "clone": lambda x: x.clone(),
            "to": lambda x: x.to(torch.bfloat16),
            "double": lambda x: x.float().double(),
            "contiguous": lambda x: x.contiguous(),
            "cpu": lambda x: x.cpu(),
            "zeros_like": torch.zeros_like,
            "ones_like": lambda x: torch.ones_like(x, dtype=torch.float32, memory_format=torch.preserve_format),
            "full_like": lambda x: torch.full_like(x, 3),
            "new_zeros": lambda x: x.new_zeros(x.shape),
            "new_full": lambda x: x.new_full(x.shape, 2.0),
            "fill_": lambda x: x.clone().fill_(2),
            "zero_": lambda x: x.clone().zero_(),
            "by a number": lambda x: 2 * x / 3 - 1,
            "by an element": lambda x: x * torch.tensor(2.0) + torch.tensor([1.0]),
            "masked": lambda x: x.clone().masked_fill_(x > 0, 1.5),
            "set by a mask": _set_by_mask,
            "where": lambda x: torch.where(x > 0, x, 0.0),
            "lerp": lambda x: torch.lerp(x, x + 1, 0.25),
            "lists": lambda x: torch._foreach_mul(torch._foreach_add([x], [x]), 2.0)[0],
            "copied": lambda x, value=value: torch.empty_like(x).copy_(value),
            "maximum, out": lambda x: torch.maximum(x, -x, out=torch.zeros_like(x)),
            "deep copy": copy.deepcopy,
        }
        for name, make in made.items():
            expected, found = make(value), make(piece)
            assert isinstance(found, PieceTensor) and same_bits(found.full_tensor(), expected), (name, piece)
            assert (
                found.local.data_ptr() != piece.local.data_ptr()
                or name in ("cpu", "contiguous")
                or not piece.local.numel()
            )
        assert type(piece.new_zeros(())) is Tensor
        for alias in (piece.detach(), piece.data, nn.Parameter(piece)):
            assert isinstance(alias, PieceTensor) and alias.local.data_ptr() == piece.local.data_ptr()
        for order in (0, 1, 2, 3, math.inf):
            if value.numel() or order != math.inf:
                norm = torch.linalg.vector_norm(piece, order)
                torch.testing.assert_close(
                    norm.full_tensor(), torch.linalg.vector_norm(value, order), rtol=1e-14, atol=0
                )


def _set_by_mask(x: Any) -> Any:
    x = x.clone()
    x[x > 0] = 7
    return x


@pytest.mark.parametrize("kind", PIECES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_piece_is_created_and_converted_as_the_tensor_would_be(ranks, world_size, kind):
    ranks.run(world_size, _creates, kind)


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "t": lambda x, y: nn.functional.linear(torch.ones(2, 3), x),
    "mm": lambda x, y: x @ torch.ones(3, 2),
    "view": lambda x, y: x.view(-1),
    "permute": lambda x, y: x.T,
    "slice": lambda x, y: x[:2],
    "select": lambda x, y: x[0],
    "index": lambda x, y: x[x > 0],
    "index_put_": lambda x, y: x.__setitem__(torch.tensor([0]), 1.0),
    "unbind": lambda x, y: list(x),
    "sum": lambda x, y: x.sum(),
    "mean": lambda x, y: x.mean(),
    "max": lambda x, y: x.max(),
    "any": lambda x, y: x.isnan().any(),
    "argmax": lambda x, y: x.argmax(),
    "std": lambda x, y: x.std(),
    "cat": lambda x, y: torch.cat([x, x]),
    "stack": lambda x, y: torch.stack([x, x]),
    "equal": lambda x, y: torch.equal(x, x),
    "cumsum": lambda x, y: x.cumsum(0),
    "sort": lambda x, y: x.sort(),
    "linalg_vector_norm": lambda x, y: torch.linalg.vector_norm(x, dim=0),
    "_foreach_norm": lambda x, y: torch._foreach_norm([x], -1),
    "_foreach_max": lambda x, y: torch._foreach_max([x]),
    "normal_": lambda x, y: x.normal_(),
    "rand_like": lambda x, y: torch.rand_like(x),
    "bernoulli": lambda x, y: x.abs().bernoulli(),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * torch.ones(3),
    "sub": lambda x, y: torch.ones(5, 3) - x,
    "add_": lambda x, y: torch.ones(5, 3).add_(x),
    "sub_": lambda x, y: torch.ones(()).sub_(x),
    "copy_": lambda x, y: torch.ones(5, 3).copy_(x),
    "_foreach_add_": lambda x, y: torch._foreach_add_([x], [y]),
    "_foreach_mul_": lambda x, y: torch._foreach_mul_([x, torch.ones(1)], 2),
    "_to_copy": lambda x, y: x.to(memory_format=torch.channels_last, dtype=torch.float32),
    "numpy": lambda x, y: x.numpy(),
    "tolist": lambda x, y: x.tolist(),
    "item": lambda x, y: x.item(),
    "bool": lambda x, y: bool(x),
    "share_memory_": lambda x, y: x.share_memory_(),
}


def _refuses(rank: int, world_size: int) -> None:
    mesh = mesh_of(2)
    full = full_tensors(0, shapes=((5, 3), (5, 3)))
    x, y = pieces_of("flat", full, mesh)
    before = x.local.clone()
    for name, operation in REFUSED.items():
        with pytest.raises(UsageError) as raised:
            operation(x, y)
        message = str(raised.value)
        assert message.startswith(f"{name} on ") and "'p0'" in message, message
        assert "full_tensor()" in message and "to_dtensor()" in message and 'layout="per_param"' in message, message
        assert torch.equal(x.local, before), name
    with CommDebugMode() as seen, record_trace() as events:
        assert repr(x) == (
            "PieceTensor('p0', shape=(5, 3), dtype=float64, flat layout, elements "
            f"{'0:15' if rank == 0 else 'none'} on rank {rank} of 2)"
        )
        assert f"{nn.Parameter(y)}".startswith("Parameter of PieceTensor('p1', ")
    assert not seen.get_total_counts() and not events
    for save in (lambda: torch.save(x, io.BytesIO()), lambda: torch.save({"state": [nn.Parameter(x)]}, io.BytesIO())):
        with pytest.raises(UsageError, match=r"'p0'.*model.state_dict"):
            save()
    for local in (torch.zeros(1), torch.zeros(15, 1), 3):
        with pytest.raises(ParamError, match="'p0', rank "):
            PieceTensor(local, x.location)
    for other in (torch.zeros(5, 3), y, None):
        with pytest.raises(ParamError, match=r"'p0', rank .*assigned to .data"):
            x.data = other


def test_what_would_be_wrong_on_a_piece_says_what_to_use(ranks):
    ranks.run(2, _refuses)


def _copies(rank: int, world_size: int) -> None:
    full = full_tensors(0)
    (piece, *_) = pieces_of("ragged", full)
    param = nn.Parameter(piece)
    param.grad = torch.ones_like(param)
    param.requires_grad_(False)
    copied = copy.deepcopy({"a": param, "b": param})
    assert copied["a"] is copied["b"] and isinstance(copied["a"], nn.Parameter) and not copied["a"].requires_grad
    assert copied["a"].grad is not param.grad and torch.equal(copied["a"].grad.local, param.grad.local)
    param.detach().zero_()
    assert same_bits(copied["a"].full_tensor(), full[0])
    # An optimizer takes the state of another one of the same layout.
    optimizers = [torch.optim.Adam([p]) for p in (param.requires_grad_(), nn.Parameter(pieces_of("ragged", full)[0]))]
    param.grad = torch.ones_like(param)
    optimizers[0].step()
    (a,) = copy.deepcopy(optimizers[0].state).values()
    optimizers[1].load_state_dict({**optimizers[1].state_dict(), "state": {0: a}})
    (b,) = optimizers[1].state.values()
    assert isinstance(b["exp_avg"], PieceTensor) and torch.equal(a["exp_avg"].local, b["exp_avg"].local)


def test_state_that_holds_pieces_can_be_copied(ranks):
    ranks.run(2, _copies)


# What a module shows


def _adopts(rank: int, world_size: int, kind: str) -> None:
    model = shard(build_net(), kind)
    (bucket,) = unit_of(model).buckets
    pieces = bucket.store.pieces

    def aliased() -> bool:
        params = bucket.registrar.managed()
        return all(p.local.data_ptr() == piece.data_ptr() for p, piece in zip(params, pieces, strict=True))

    assert aliased()
    named = {name: p for name, p in model.named_parameters() if "blocks" not in name}
    # Assigned data, another parameter, and a state dict that is assigned.
    for name, p in named.items():
        p.data = p.data * 2 + 1
        assert p.local.data_ptr() != bucket.store.buffer.data_ptr(), name
    expected = {name: p.detach().full_tensor() for name, p in named.items()}
    model.head.bias = nn.Parameter(model.head.bias.detach() + 1)
    expected["head.bias"] += 1
    loss_of(model, 0, rank)
    model.reshard()
    assert aliased()
    for name, p in model.named_parameters():
        if name in expected:
            # Another object that was registered is the parameter from then on.
            assert (p is named[name]) == (name != "head.bias"), name
            assert isinstance(p, PieceTensor) and same_bits(p.detach().full_tensor(), expected[name]), name
    state = {name: value + 1 if isinstance(value, Tensor) else value for name, value in _plain(model).items()}
    model.load_state_dict(state, assign=True)
    assert aliased() and next(iter(model.parameters())) is bucket.registrar.managed()[0]
    for name, value in _plain(model).items():
        assert same_bits(value, state[name]), name
    # Also on a rank that holds none of it: all ranks refuse alike.
    model.embedding.weight.data = model.embedding.weight.data.double()
    with pytest.raises(ReplacedError, match=r"embedding.weight.*float64"):
        loss_of(model, 0, rank)


def _plain(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value.clone()
        for name, value in model.state_dict().items()
    }


@pytest.mark.parametrize("kind", PIECES)
def test_R25_replaced_data_is_adopted(ranks, kind):
    ranks.run(2, _adopts, kind)


def _converts(rank: int, world_size: int, kind: str) -> None:
    model = shard(build_net(), kind)
    plain = build_net()
    params = list(model.parameters())
    loss_of(model, 0, rank).backward()
    grads = [p.grad.full_tensor() for p in params]
    model.double()
    plain.double()
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    for p, grad in zip(params, grads, strict=True):
        assert p.dtype == torch.float64 and same_bits(p.grad.full_tensor(), grad.double())
    for name, value in _plain(model).items():
        assert same_bits(value, plain.state_dict()[name]), name
    loss_of(model, 0, rank).backward()
    assert all(p.grad.dtype == torch.float64 for p in params)


@pytest.mark.parametrize("kind", PIECES)
def test_R25_a_model_that_is_converted_takes_its_gradients_along(ranks, kind):
    ranks.run(2, _converts, kind)


def _accumulates(rank: int, world_size: int) -> None:
    """However gradients were touched between two reductions, the second is added to what is there."""
    (own,) = [shard(nn.Linear(3, 5), "flat")]
    registrar = unit_of(own).buckets[0].registrar
    store = unit_of(own).buckets[0].store
    weight, bias = registrar.managed()
    generator = torch.Generator().manual_seed(1)

    def reduced() -> list[Tensor]:
        shard_of_grads = torch.randn(store.buffer.numel(), generator=generator)
        registrar.add_grad(shard_of_grads, (0, 1), frozenset())
        return [part.clone() for part in store.split(shard_of_grads)]

    def grads() -> list[Tensor]:
        return [p.grad.local.clone() for p in (weight, bias)]

    a, b = reduced(), None
    held = [weight.grad, bias.grad]
    b = reduced()
    assert all(torch.equal(x, y + z) for x, y, z in zip(grads(), a, b, strict=True))
    assert weight.grad is held[0] and bias.grad is held[1]
    weight.grad = weight.grad.clone() * 0  # type: ignore[union-attr]  # another object
    c = reduced()
    assert torch.equal(grads()[0], c[0]) and torch.equal(grads()[1], a[1] + b[1] + c[1])
    bias.grad = None
    d = reduced()
    assert torch.equal(grads()[0], c[0] + d[0]) and torch.equal(grads()[1], d[1])
    e = reduced()
    assert torch.equal(grads()[0], c[0] + d[0] + e[0]) and torch.equal(grads()[1], d[1] + e[1])
    own.zero_grad()
    f = reduced()
    bias.grad.data = bias.grad.data * 2
    g = reduced()
    assert torch.equal(grads()[0], f[0] + g[0]) and torch.equal(grads()[1], 2 * f[1] + g[1])
    own.zero_grad()
    registrar.add_grad(torch.ones_like(store.buffer), (0, 1), {0})
    assert weight.grad is None and bias.grad is not None
    registrar.add_grad(torch.ones_like(store.buffer), (0, 1), {1})
    assert (weight.grad.local == 1).all() and (bias.grad.local == 1).all()
    own.zero_grad()
    weight.requires_grad_(False)
    reduced()
    assert weight.grad is None and bias.grad is not None
    assert piece_tensor(store.pieces[0], registrar.locations[0]).location is weight.location


def test_R29_gradients_accumulate_whatever_was_done_to_them(ranks):
    ranks.run(2, _accumulates)

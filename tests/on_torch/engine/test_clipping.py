"""Gradient clipping (R30) by FSDP1's `clip_grad_norm_`, and by torch.nn.utils on models of `fully_shard`.

The arithmetic is tested in tests/core/step/test_grad_norm.py. Scripts that clip are run with torch's FSDP and with ours in
fsdp1/scripts/clipping.py and fsdp2/scripts/clipping.py.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportPrivateImportUsage=false

import math
import os
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers import tensor_parallel
from tests.on_torch.helpers.layouts import LAYOUTS, mesh_of, shard
from tests.on_torch.helpers.models import build_net, loss_of
from tests.on_torch.helpers.piece_tensors import full_tensors, like, pieces_of
from tests.on_torch.helpers.scripts import PACKAGES
from tests.on_torch.helpers.sharded_and_plain import (
    APIS,
    CLOSE,
    F64,
    FSDP2,
    SGD,
    backward_of_both,
    differing,
    full,
    whole,
)
from tests.on_torch.helpers.sharded_and_plain import shard as shard_for

# Models under every API and layout


def _clip_by_norm_and_value(rank, world_size):
    wrong = []
    for api in APIS:
        plain, model = build_net(F64), shard_for(build_net(F64), api)
        backward_of_both(plain, 0)
        loss_of(model, 0, rank).backward()
        norms = [get_total_norm([param.grad for param in plain.parameters()])]
        if api in FSDP2:
            norms += [get_total_norm([param.grad for param in model.parameters()])]
            norms += [clip_grad_norm_(model.parameters(), 0.5)]
        else:  # torch's function would see the shards of this rank alone
            norms += [model.clip_grad_norm_(0.5)]
        norms += [clip_grad_norm_(plain.parameters(), 0.5)]
        wrong += [api] if any(not torch.allclose(whole(norm), norms[0], **CLOSE) for norm in norms) else []
        for one in (plain, model):
            clip_grad_value_(one.parameters(), 1e-3)
            SGD(one.parameters()).step()
        wrong += [api] if differing(full(model), full(plain)) else []
    return wrong


def test_R30_gradients_are_clipped_by_norm_and_by_value(ranks):
    assert ranks.run(2, _clip_by_norm_and_value) == [[], []]


def _clip_layout(rank: int, world_size: int, layout: str) -> tuple[float, int]:
    model = shard(build_net(torch.float64), layout)
    loss_of(model, 0, rank).backward()
    with CommDebugMode() as seen:
        norm = clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    return float(whole(norm)), seen.get_total_counts()


def test_R30_clipping_a_model_takes_as_many_collectives_under_each_layout(ranks):
    plain = build_net(torch.float64)
    (loss_of(plain, 0, 0) + loss_of(plain, 0, 1)).div(2).backward()
    expected = float(clip_grad_norm_(plain.parameters(), 0.1))
    for layout in LAYOUTS:
        for norm, num_collectives in ranks.run(2, _clip_layout, layout):
            assert math.isclose(norm, expected, rel_tol=1e-13) and num_collectives == 1, layout


# Tensors as pieces


def _clip_pieces(rank: int, world_size: int, kind: str, sizes: tuple[int, ...]) -> None:
    """Clips pieces as torch clips full tensors, with one collective, as DTensors take."""
    mesh, full = mesh_of(*sizes), full_tensors(0)
    for (i, order), (j, foreach) in product(enumerate((1, 2, 3, math.inf)), enumerate((False, True, None))):
        clipped, unclipped = (full_tensors(1), 0.25), ([1e-3 * grad for grad in full_tensors(2)], 1e9)
        # One of the two in turn, so that each occurs with every order and with every `foreach`.
        both = (clipped, unclipped) if EXHAUSTIVE in os.environ else ((clipped, unclipped)[(i + j) % 2],)
        for grads, max_norm in both:
            plain = [nn.Parameter(value) for value in full]
            pieces = [nn.Parameter(piece) for piece in pieces_of(kind, full, mesh)]
            for param, piece, grad, own in zip(plain, pieces, grads, like(pieces, grads), strict=True):
                param.grad, piece.grad = grad.clone(), own
                if not grad.numel() and order == math.inf:  # torch has no such norm of an empty tensor
                    param.grad = None
            expected = clip_grad_norm_(plain, max_norm, order, foreach=foreach)
            with CommDebugMode() as seen:
                found = clip_grad_norm_(pieces, max_norm, order, error_if_nonfinite=False, foreach=foreach)
            assert seen.get_total_counts() == 1, (order, foreach, seen.get_comm_counts())
            assert math.isclose(float(whole(found)), float(expected), rel_tol=1e-14), (order, foreach)
            for param, piece in zip(plain, pieces, strict=True):
                if param.grad is not None:
                    torch.testing.assert_close(piece.grad.full_tensor(), param.grad, rtol=1e-14, atol=0)
            # gloo's maximum of NaN and a number is either, under DTensors too.
            for bad in (math.inf,) if order == math.inf else (math.nan, math.inf):
                if rank % sizes[-1] == sizes[-1] - 1:
                    pieces[-1].grad.local[-1:].fill_(bad)
                with pytest.raises(RuntimeError, match="non-finite"):
                    clip_grad_norm_(pieces, max_norm, order, error_if_nonfinite=True, foreach=foreach)


@pytest.mark.parametrize(
    ("sizes", "kind"),
    list(product([(2,), (3,), (2, 2)], LAYOUTS[1:]))
    if EXHAUSTIVE in os.environ
    else [((2,), "flat"), ((3,), "ragged"), ((2, 2), "flat")],
)
def test_R30_clipping_counts_each_element_once(ranks, kind, sizes):
    ranks.run(math.prod(sizes), _clip_pieces, kind, sizes)


# Tensor parallelism


def _clip_tensor_parallel(rank, world_size, strategy, norm_type):
    """The norm of all gradients, the norm that our clipping returns, and the norm that torch's returns."""
    found = []
    for name in reversed(PACKAGES):
        side = tensor_parallel.Side(name, rank, world_size, (2, 2))
        model = side.model(strategy=strategy, use_orig_params=strategy != "NO_SHARD" or name == "torch_backend")
        model(side.batch(0)).square().mean().backward()
        if name == "torch_backend":
            grads = [
                grad.full_tensor() if isinstance(grad, DTensor) else grad
                for _, grad in side.full(model, with_grads=True).values()
            ]
            expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads]).double(), norm_type)
        before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        norm = model.clip_grad_norm_(0.1, norm_type)
        factor = 0.1 / (norm + 1e-6)
        for old, param in zip(before, model.parameters(), strict=True):
            assert (param.grad is None) is (old is None)
            assert old is None or torch.equal(param.grad, old * factor)
        found.append(norm.item())
    return expected.item(), *found


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_R30_the_norm_spans_tensor_parallel_ranks(ranks, strategy, norm_type):
    results = ranks.run(4, _clip_tensor_parallel, strategy, norm_type)
    expected, ours = results[0][:2]
    # A float32 sum of some hundred squares.
    assert all(result[:2] == (expected, ours) for result in results) and abs(ours - expected) < 1e-5 * expected
    # torch's covers one tensor-parallel rank, and so differs between ranks that hold different parts.
    theirs = [result[2] for result in results]
    assert theirs[0] == theirs[2] and theirs[1] == theirs[3] and len(set(theirs)) > (norm_type == 2.0)

"""Optimizers that are not elementwise are found before they step on pieces (pieces/_optimizer_probe.py)."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from crossframe.errors import UsageError
from tests.on_torch.helpers.layouts import shard
from tests.on_torch.helpers.models import build_net
from tests.on_torch.helpers.piece_tensors import ELEMENTWISE, FUSED, HOW, full_tensors, like, pieces_of
from torch_backend.pieces import _optimizer_probe as optimizer_probe
from torch_backend.pieces._optimizer_probe import check_local


class Each(torch.optim.Optimizer):
    """What the optimizers below have in common: one rule for each parameter."""

    rule: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(self.rule(param, param.grad) * group["lr"])


class Elementwise(Each):
    def rule(self, param, grad):
        return grad.sign() + 0.1 * param


class Lamb(Each):
    def rule(self, param, grad):
        update = grad / (grad.abs() + 1e-6)
        return update * (param.norm() / update.norm())


class Clipped(Each):
    """Only large gradients are treated together."""

    def rule(self, param, grad):
        return grad * (100 / grad.norm()).clamp(max=1)


class Cautious(Each):
    """A NaN is lost in a comparison."""

    def rule(self, param, grad):
        mask = (grad * param > 0).to(grad.dtype)
        return torch.nan_to_num(grad) * mask / mask.mean()


class Scaled(Each):
    """The step of an element depends on the others' values, and so on what earlier gradients made of them."""

    def rule(self, param, grad):
        return grad.sign() * param.abs().nan_to_num().max()


class Blocks(Each):
    """Large parameters are quantized in blocks."""

    def rule(self, param, grad):
        if param.numel() < 4096:
            return grad
        blocks = grad.reshape(-1, 64)
        scale = blocks.abs().amax(1, keepdim=True)
        return ((blocks / scale * 127).round() * scale / 127).view_as(grad)


class Noisy(Each):
    def rule(self, param, grad):
        return grad + torch.rand(grad.shape, dtype=grad.dtype)


class Demanding(Each):
    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)


def _given(shapes: Any = ((5, 3), (7,))) -> list[nn.Parameter]:
    params = [nn.Parameter(piece) for piece in pieces_of("flat", full_tensors(0, torch.float32, shapes))]
    for param, grad in zip(params, like(params, full_tensors(1, torch.float32, shapes)), strict=True):
        param.grad = grad
    return params


REFUSED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Lamb": Lamb,
    "Clipped": Clipped,
    "Cautious": Cautious,
    "Scaled": Scaled,
    "Blocks": Blocks,
    "Adafactor": torch.optim.Adafactor,
    "Muon": lambda params: torch.optim.Muon([params[0]]),
}


def _finds(rank: int, world_size: int) -> None:
    for name, make in REFUSED.items():
        params = _given()
        before = [param.local.clone() for param in params]
        optimizer = make(params)
        for _ in range(2):  # again, if the user goes on
            with pytest.raises(
                UsageError, match=rf"^{name} holds parameter 'p0'.*is not elementwise.*layout=\"per_param\""
            ):
                optimizer.step()
        assert not optimizer.state and all(torch.equal(a.local, b) for a, b in zip(params, before, strict=True)), name
    for optimizer, why in ((torch.optim.LBFGS(_given()), "closure"), (Demanding(_given(), nn.Linear(1, 1)), "model")):
        with pytest.raises(UsageError, match=rf"^{type(optimizer).__name__} .*'p0'.*could not be tested.*{why}"):
            optimizer.step(lambda: torch.zeros(()))
    # One group of several, and one that is added later.
    plain, (piece, *_) = [nn.Parameter(torch.ones(2, 2))], _given()
    plain[0].grad = torch.ones(2, 2)
    optimizer = Lamb(plain)
    optimizer.step()
    optimizer.add_param_group({"params": [piece]})
    with pytest.raises(UsageError, match=r"^Lamb holds parameter 'p0'"):
        optimizer.step()


def test_R09_an_optimizer_that_looks_beyond_single_elements_is_refused_by_name(ranks):
    ranks.run(1, _finds)


@contextmanager
def _counted() -> Iterator[list[type]]:
    """The classes of the optimizers that are tried inside, one entry a trial step."""
    tried, original = [], optimizer_probe._stepped
    optimizer_probe._stepped = lambda cls, *args: tried.append(cls) or original(cls, *args)
    try:
        yield tried
    finally:
        optimizer_probe._stepped = original


def _passes(rank: int, world_size: int) -> None:
    optimizer_probe._passed.clear()
    # Once as it is, and once for each change of the values around an element.
    once = 1 + len(optimizer_probe.CHANGES)
    for name, options in ELEMENTWISE:
        cls = getattr(torch.optim, name)
        for how in HOW:
            if "fused" not in how or name in FUSED:
                for dtype in (torch.float32, torch.bfloat16):
                    tensors = full_tensors(0, dtype, ((5, 3), (7,)))
                    for expected in (
                        [cls] * once,
                        [],
                    ):  # another optimizer of the same class and options passes untried
                        optimizer = cls([nn.Parameter(piece) for piece in pieces_of("flat", tensors)], **options, **how)
                        with _counted() as tried:
                            check_local(optimizer)
                            check_local(optimizer)
                        assert tried == expected, (name, options, how, dtype)
    for cls in (Elementwise, Noisy):
        check_local(cls(_given()))
    # As a user has it: tensors among the options, schedules, groups with options of their own.
    params = _given()
    optimizer = torch.optim.AdamW(
        [{"params": params[:1]}, {"params": params[1:], "lr": torch.tensor(0.5)}], capturable=False
    )
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with _counted() as tried:
        for _ in range(3):
            optimizer.step()
            schedule.step()
    assert len(tried) <= 2 * once, "each group is tried at most once, before its first step"


def test_R09_elementwise_optimizers_pass_and_are_tried_once(ranks):
    ranks.run(1, _passes)


def _quiet(rank: int, world_size: int) -> None:
    """What the user has is as it was: random numbers, options, state, hooks; a try happens once a class and its options."""
    optimizer_probe._passed.clear()
    params = _given()
    optimizer = Noisy(params)
    stepped: list[torch.optim.Optimizer] = []
    handle = register_optimizer_step_post_hook(lambda which, *_: stepped.append(which))
    random_before = torch.get_rng_state()
    optimizer.register_step_pre_hook(lambda *_: stepped.append(None))  # after the hook of all optimizers
    check_local(optimizer)
    handle.remove()
    assert torch.equal(torch.get_rng_state(), random_before) and not stepped and not optimizer.state
    rate = torch.tensor(0.25)
    optimizer = torch.optim.Adam(params, lr=rate, foreach=False)
    grads = [param.grad for param in params]
    check_local(optimizer)
    assert optimizer.param_groups[0]["lr"] is rate and rate == 0.25 and not optimizer.state
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    with _counted() as tried:
        check_local(torch.optim.Adam(_given(), lr=rate, foreach=False))
        assert not tried
        check_local(torch.optim.Adam(_given(), lr=rate, foreach=False, amsgrad=True))
        assert tried
        tried.clear()
        check_local(torch.optim.Adam([nn.Parameter(torch.ones(3))], weight_decay=0.5))  # no pieces
        assert not tried


def test_R09_a_try_leaves_no_trace(ranks):
    ranks.run(1, _quiet)


def _mixed(rank: int, world_size: int) -> None:
    model = build_net()
    shard(model.blocks[0], "flat")
    shard(model.blocks[1], "per_param")
    params = [*model.blocks[0].parameters(), *model.blocks[1].parameters()]
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(UsageError, match=r"^AdamW: .*'norm.weight'.*DTensors.*groups of their own"):
        torch.optim.AdamW(params, foreach=True).step()
    torch.optim.AdamW(params, foreach=False).step()
    half = len(params) // 2
    torch.optim.AdamW([{"params": params[:half]}, {"params": params[half:]}], foreach=True).step()
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=False)
    expected = sum(param.numel() for param in params) ** 0.5
    torch.testing.assert_close(float(norm.full_tensor()), expected, rtol=1e-6, atol=0)


def test_pieces_and_dtensors_go_together_but_not_in_one_list(ranks):
    ranks.run(2, _mixed)

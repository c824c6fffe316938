"""A run that rounds otherwise: by how much, where, and where not."""

import pytest
import torch
from torch import nn

from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.metrics import distance, norm
from torch_backend.other_rounding import OtherRounding


def rounded(seed, act):
    with OtherRounding(seed):
        return act()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_fall_to_a_neighbour_or_stay(dtype):
    x = torch.randn(200, generator=torch.Generator().manual_seed(0)).to(dtype)
    right, found = torch.tanh(x), rounded(1, lambda: torch.tanh(x))
    up, down = (torch.nextafter(right, torch.full_like(right, sign * torch.inf)) for sign in (1, -1))
    for each in (up, right, down):
        assert 0.2 < (found == each).float().mean() < 0.5
    assert ((found == right) | (found == up) | (found == down)).all()


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("kind", ["product", "sum", "convolution"])
def test_the_terms_of_sums_come_in_another_order(kind, moves):
    """In float64 beside one of 60 terms that cancel, of which each order leaves another rest."""
    a = torch.randn(1, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e8
    b = torch.cat([torch.ones(30, 1), -torch.ones(30, 1)]).double()
    a[:, 30:] = a[:, :30].flip(1)
    acts = {
        "product": lambda: a @ b,
        "sum": lambda: (a * b.T).sum(1),
        "convolution": lambda: nn.functional.conv1d(a.T[None], b.T[..., None]),
    }
    exact, found = 0.0, set()
    for seed in range(1, 9):
        with OtherRounding(seed, moves=moves):
            found.add(float(acts[kind]()))
    assert len(found) > 4
    # Summing n terms errs by at most (n - 1) u sum |t|; a term and the result may be moved by 2 u each.
    most = (59 + 4 * moves) * 2**-53 * float(a.abs().sum())
    assert all(abs(each - exact) <= most for each in found)


def test_nothing_but_the_order_of_sums_is_another_if_nothing_moves():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    param = nn.Parameter(x.clone())
    optimizer = torch.optim.AdamW([param], 0.1, foreach=False)
    acts = (lambda: x + 1, lambda: x.tanh(), lambda: x * x, lambda: x / 3)
    right = [act() for act in acts]
    with OtherRounding(1, moves=False):
        assert all((act() == each).all() for act, each in zip(acts, right, strict=True))
        param.grad = torch.ones_like(x)
        optimizer.step()
    other = nn.Parameter(x.clone())
    other.grad = torch.ones_like(x)
    torch.optim.AdamW([other], 0.1, foreach=False).step()
    assert (param == other).all()


def test_sums_and_products_that_equal_an_operand_are_left_alone():
    x = torch.randn(200, generator=torch.Generator().manual_seed(0))
    t, grid = torch.tensor(0.3), torch.arange(5) * 0.25
    for act in (
        lambda: x + 0,
        lambda: x * torch.ones(200),
        lambda: torch.zeros(200) + x,
        lambda: x / 1,
        lambda: x - 1e-30,
    ):
        assert torch.equal(rounded(1, act), x)
    assert rounded(1, lambda: x[:, None] + x[:, None].to_sparse()).shape == (200, 1)
    moved = rounded(1, lambda: grid + t)
    assert moved[0] == t and not torch.equal(moved, grid + t)


def test_what_moves_selects_or_casts_data_is_left_alone():
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    acts = [
        lambda: x.clone(), lambda: x.t().contiguous(), lambda: torch.cat([x, x]), lambda: x[[2, 0]], lambda: x.relu(),
        lambda: x.bfloat16(), lambda: torch.where(x > 0, x, 0), lambda: nn.functional.pad(x, (1, 1)), lambda: x.max(0).values,
        lambda: nn.functional.embedding(torch.tensor([1, 1]), x), lambda: -x, lambda: torch.empty(6, 5).copy_(x),
    ]  # fmt: skip
    for act in acts:
        torch.testing.assert_close(rounded(3, act), act(), rtol=0, atol=0)


def test_zeros_what_is_not_finite_and_counts_stay():
    x = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 2.0])
    found = rounded(1, lambda: x * 1.0)
    torch.testing.assert_close(found[:4], x[:4], rtol=0, atol=0, equal_nan=True)
    for counts in (torch.tensor(3.0), torch.arange(20.0)):  # an optimizer's step count, and positions
        for seed in range(20):
            assert (rounded(seed, lambda counts=counts: counts * 2 + 1) == counts * 2 + 1).all()


def test_training_differs_by_rounding_alone_in_forward_backward_and_the_optimizer():
    def train(seed, steps=3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 2)).double()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=seed % 2 == 0)
        x = torch.randn(7, 6, dtype=torch.float64)

        def loop():
            for _ in range(steps):
                model(x).square().mean().backward()
                grads = [param.grad.clone() for param in model.parameters()]  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()
            return grads, [param.detach().clone() for param in model.parameters()]

        return loop() if seed == 0 else rounded(seed, loop)

    run, perturbed_run, other, again = train(0), train(1), train(2), train(1)
    for a, b, c, d in zip(*([*grads, *params] for grads, params in (run, perturbed_run, other, again)), strict=True):
        assert not (a == b).all() and not (b == c).all()
        assert (b == d).all()  # a seed says which way
        assert distance(a.numpy(), b.numpy()) <= bounds_for("float64").parameter * norm(a.numpy())


def test_the_optimizer_alone_rounds_otherwise_too():
    for make in (torch.optim.AdamW, lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)):
        params = [nn.Parameter(torch.linspace(1, 2, 50)) for _ in range(2)]
        for seed, param in zip((0, 1), params, strict=True):
            optimizer = make([param])
            with OtherRounding(seed) if seed else torch.no_grad():
                for _ in range(2):
                    param.grad = torch.linspace(-1, 1, 50)
                    optimizer.step()
        assert not (params[0] == params[1]).all()
        apart = distance(*(param.detach().numpy() for param in params))
        assert apart <= bounds_for("float32").parameter * norm(params[0].detach().numpy())


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
def test_constants_of_adam_are_rounded_in_the_dtype_of_parameters(optimizer):
    """1 - 0.999 in float32 is a difference of two numbers of unit roundoff 2^-24: off by up to 2^-24 / 1e-3 = 6e-5 of itself, and
    as much again where a perturbed run moves the power; the root halves that, and a first step is as long as the rate."""

    def step(seed, dtype):
        param = nn.Parameter(torch.zeros(40, dtype=dtype))
        param.grad = torch.linspace(1, 2, 40, dtype=dtype)
        made = optimizer([param], lr=1.0, weight_decay=0.0, eps=0.0, foreach=None)
        before = {name: value for name, value in made.param_groups[0].items() if name != "params"}
        made.step() if seed == 0 else rounded(seed, made.step)
        assert {name: value for name, value in made.param_groups[0].items() if name != "params"} == before
        return param.detach()

    apart = [(step(seed, torch.float32) - step(0, torch.float32)).abs().max().item() for seed in range(1, 7)]
    assert max(apart) > 5e-6 and all(each <= 6.1e-5 for each in apart), apart
    assert (step(1, torch.float64) - step(0, torch.float64)).abs().max() < 1e-14


def test_a_learning_rate_of_zero_moves_parameters_by_rounding_alone():
    """A warm-up begins with it. With tensor constants torch's Adam divides by the rate: 0 by 0 where a gradient is zero."""
    param = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([param], 0.0, weight_decay=0.0)
    with OtherRounding(1):
        param.grad = torch.tensor([0.0, 0.5, 0.0, 1.0])
        optimizer.step()
    assert (param - 1).abs().max() <= torch.finfo(torch.float32).eps
    assert optimizer.state[param]["exp_avg"][1] != 0

"""Scripts with gradients that the optimizer does not get, as those of an attack, or not as they are."""

import numpy as np
import pytest

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare

MODEL = """
model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.0), nn.Linear(6, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
generator = torch.Generator().manual_seed(1)
def draw():
    return torch.randn(8, 4, dtype=torch.float64, generator=generator), torch.randint(3, (8,), generator=generator)
def input_grad(loss, x):
    if "--returned" in sys.argv:
        return torch.autograd.grad(loss, x)[0]
    loss.backward()
    grad, x.grad = x.grad, None
    if "--cleared" in sys.argv:
        optimizer.zero_grad(set_to_none=False)
    return grad
def update(loss):
    if "--mistake" not in sys.argv:
        optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
cross_entropy = nn.functional.cross_entropy
"""
ATTACK = """
for _ in range(4):
    x, y = draw()
    if "--eval" in sys.argv:
        model.eval()
    move = torch.zeros_like(x)
    for _ in range(2):
        move.requires_grad_()
        move = (move + 0.1 * input_grad(cross_entropy(model(x + move), y), move).sign()).detach()
    model.train()
    update(cross_entropy(model(x + move), y))
"""
BESIDE = """
for _ in range(4):
    x, y = draw()
    out = model(x)
    move = torch.ones_like(x).requires_grad_()
    found = input_grad((model(x + move) - out.detach()).square().sum(), move)
    update(cross_entropy(out, y) + (model(x + 0.1 * found) - out).square().mean())
"""
SALIENCY = """
for _ in range(4):
    x, y = draw()
    update(cross_entropy(model(x), y))
    if "--show" in sys.argv:
        shown = x.clone().requires_grad_()
        input_grad(model(shown)[:, 0].sum(), shown)
"""
BOTH = """
x, y = draw()
move = torch.zeros_like(x)
for _ in range(4):
    move.requires_grad_()
    update(cross_entropy(model(x + move), y))
    with torch.no_grad():
        move = move + 0.1 * move.grad.sign()
"""


@pytest.fixture
def recorded(run, tmp_path):
    def recorded(text, *arguments) -> Recording:
        directory = tmp_path / ("_".join(arguments) or "plain")
        assert run(MODEL + text, *arguments, directory=str(directory), dense=2) == 0
        return Recording.open(directory)

    return recorded


@pytest.mark.parametrize("mode", [(), ("--eval",)], ids=["training", "evaluation"])
def test_attacks_are_no_part_of_a_step_however_they_compute_gradients(recorded, mode):
    plain, *others = (recorded(ATTACK, *mode, *each) for each in ((), ("--returned",), ("--cleared",)))
    assert plain.num_steps == 4 and {at for at, _, _ in plain.activations(0)} == {0}
    for step in (0, 1):
        assert plain.num_losses(step, 0) == 1
        for name in plain.manifest.params:
            np.testing.assert_array_equal(plain.local(step, 0, name), plain.full("reduce", step, name))
    for other in others:
        assert compare(plain, other).verdict is Verdict.EQUAL


def test_gradients_of_an_attack_that_are_not_cleared_are_a_bug(recorded):
    plain, mistake = recorded(ATTACK), recorded(ATTACK, "--mistake")
    assert mistake.num_losses(0, 0) == 3
    found = compare(plain, mistake)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert found.first_divergence.step == 0


@pytest.mark.parametrize("how", ["--returned", "--cleared"])
def test_an_attack_after_a_forward_of_training_is_no_part_of_it(recorded, how):
    plain, other = recorded(BESIDE), recorded(BESIDE, how)
    assert {at for at, _, _ in plain.activations(0)} == {0, 1}
    assert compare(plain, other).verdict is Verdict.EQUAL


@pytest.mark.parametrize("how", [(), ("--returned",), ("--cleared",)], ids=["kept", "returned", "cleared"])
def test_a_saliency_map_between_steps_changes_nothing(recorded, how):
    assert compare(recorded(SALIENCY), recorded(SALIENCY, "--show", *how)).verdict is Verdict.EQUAL


def test_one_backward_of_inputs_and_parameters_is_of_training(recorded):
    found = recorded(BOTH)
    assert found.num_steps == 4 and [found.num_losses(step, 0) for step in range(4)] == [1] * 4
    assert {at for at, _, _ in found.activations(1)} == {0} and len(found.batch(1, 0).inputs) == 1
    for name in found.manifest.params:
        np.testing.assert_array_equal(found.local(1, 0, name), found.full("reduce", 1, name))


RETAINED = """
for _ in range(3):
    x, y = draw()
    x.requires_grad_()
    out = model(x)
    first, second = cross_entropy(out, y), out.square().mean()
    first.backward(retain_graph=True)
    size = x.grad.norm()
    update(first + size * second)
"""
ACCUMULATED = """
for _ in range(3):
    (x, y), (z, _) = draw(), draw()
    x.requires_grad_()
    (0 * cross_entropy(model(x), y) if "--zero" in sys.argv else cross_entropy(model(x), y)).backward()
    cross_entropy(model(z[:3]), y[:3]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CLOSURE = """
optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
for _ in range(3):
    x, y = draw()
    x.requires_grad_("--inputs" in sys.argv)
    def closure():
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss
    optimizer.step(closure)
"""


@pytest.mark.parametrize(
    ("text", "num_samples", "microbatches"),
    [
        pytest.param(RETAINED, 8, {0}, id="through a graph that is kept"),
        pytest.param(ACCUMULATED, 11, {0, 1}, id="of other samples"),
    ],
)
def test_backwards_of_training_with_gradients_of_inputs_all_count(recorded, text, num_samples, microbatches):
    found = recorded(text)
    for step in (0, 1):
        assert found.num_losses(step, 0) == 2
        assert {at for at, _, _ in found.activations(step)} == microbatches
        assert len(found.batch(step, 0).sample_ids) == num_samples


def test_a_microbatch_without_gradient_counts(recorded):
    found = recorded(ACCUMULATED, "--zero")
    assert found.num_losses(1, 0) == 2 and len(found.batch(1, 0).sample_ids) == 11


def test_evaluations_of_a_closure_count_with_gradients_of_inputs_too(recorded):
    without, found = recorded(CLOSURE), recorded(CLOSURE, "--inputs")
    assert found.num_losses(0, 0) == without.num_losses(0, 0) > 1
    assert compare(without, found).verdict is Verdict.EQUAL


SHARDED = """
import torch.distributed as dist
from torch_backend import fully_shard
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    for last in (False, True):
        x, y = draw()
        model.set_requires_gradient_sync(last)
        (cross_entropy(model(x.requires_grad_()), y) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_gradients_that_an_engine_keeps_count(recorded):
    found = recorded(SHARDED)
    assert found.num_losses(1, 0) == 2 and len(found.batch(1, 0).sample_ids) == 16


WITHOUT_GRADIENTS = """
for _ in range(3):
    x, y = draw()
    move = torch.zeros_like(x).requires_grad_()
    if "--inputs" in sys.argv:
        cross_entropy(model(x + move), y).backward(inputs=[move])
    elif "--frozen" in sys.argv:
        model.requires_grad_(False)
        cross_entropy(model(x + move), y).backward()
        model.requires_grad_()
    else:
        out = model(x + move)
        move.grad = torch.autograd.grad(out, move, (out.softmax(1) - nn.functional.one_hot(y, 3)) / len(y))[0]
    update(cross_entropy(model(x + move.grad.sign() / 10), y))
"""


def test_an_attack_without_gradients_of_parameters_is_no_part_of_a_step(recorded):
    outputs, *others = (recorded(WITHOUT_GRADIENTS, *each) for each in ((), ("--inputs",), ("--frozen",)))
    for found in (outputs, *others):
        assert found.num_losses(1, 0) == 1 and {at for at, _, _ in found.activations(1)} == {0}
    for other in others:
        assert compare(outputs, other).verdict in (Verdict.EQUAL, Verdict.ROUNDING)


ADJOINT = """
class Solve(torch.autograd.Function):
    @staticmethod
    def forward(context, x, *params):
        context.save_for_backward(x)
        with torch.no_grad():
            return x + x * model(x)[:, :1]

    @staticmethod
    def backward(context, grad):
        with torch.enable_grad():
            x = context.saved_tensors[0].requires_grad_()
            return torch.autograd.grad(x + x * model(x)[:, :1], (x, *model.parameters()), grad)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, x):
        return x + x * model(x)[:, :1] if "--plain" in sys.argv else Solve.apply(x, *model.parameters())

net = Net()
for _ in range(3):
    x, y = draw()
    update(cross_entropy(net(x), y))
"""


def test_gradients_that_a_backward_computes_itself_count_once(recorded):
    plain, adjoint = recorded(ADJOINT, "--plain"), recorded(ADJOINT)
    for name in plain.manifest.params:
        np.testing.assert_allclose(
            adjoint.local(0, 0, name), plain.local(0, 0, name), rtol=1e-12, atol=1e-14, err_msg=name
        )
    assert compare(plain, adjoint).verdict in (Verdict.EQUAL, Verdict.ROUNDING)


FLOW = """
class Solve(torch.autograd.Function):
    @staticmethod
    def forward(context, x, *params):
        context.save_for_backward(x)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = model(x)
            return (out + torch.autograd.grad(out.square().sum(), x)[0][:, :1]).detach()

    @staticmethod
    def backward(context, grad):
        with torch.enable_grad():
            x = context.saved_tensors[0].requires_grad_()
            out = model(x)
            out = out + torch.autograd.grad(out.square().sum(), x, create_graph=True)[0][:, :1] ** 2 / 2
            return torch.autograd.grad(out, (x, *model.parameters()), grad)

for _ in range(3):
    x, y = draw()
    update(cross_entropy(Solve.apply(x, *model.parameters()), y))
"""


def test_a_forward_of_a_function_that_frees_its_graph_has_the_batch(recorded):
    found = recorded(FLOW)
    assert found.num_steps == 3 and len({found.batch(step, 0).digest for step in range(3)}) == 3
    assert {at for at, _, _ in found.activations(0)} == {0}
    for name in found.manifest.params:
        np.testing.assert_array_equal(found.local(0, 0, name), found.full("reduce", 0, name))


SURGERY = """
body, first, second = nn.Linear(4, 6).double(), nn.Linear(6, 3).double(), nn.Linear(6, 3).double()
model = nn.ModuleDict({"body": body, "first": first, "second": second})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
shared = list(body.parameters())
for _ in range(4):
    x, y = draw()
    hidden = body(x)
    losses = [cross_entropy(first(hidden), y), cross_entropy(second(hidden.tanh()), y.flip(0))]
    optimizer.zero_grad()
    if "--returned" in sys.argv:
        own = list(first.parameters())
        *grads, w, b = torch.autograd.grad(losses[0], shared + own, retain_graph=True)
        own[0].grad, own[1].grad = w, b
    else:
        losses[0].backward(retain_graph=True)
        grads = [param.grad for param in shared]
        for param in shared:
            param.grad = None
    losses[1].backward()
    for param, grad in zip(shared, grads):
        weight = (grad * param.grad).sum().clamp(max=0) / param.grad.square().sum()
        param.grad = param.grad + grad - ("--mistake" not in sys.argv) * weight * param.grad
    optimizer.step()
"""


def test_losses_of_gradients_that_the_script_combines_need_not_agree(recorded):
    plain, returned, mistake = (recorded(SURGERY, *each) for each in ((), ("--returned",), ("--mistake",)))
    assert [each.num_losses(0, 0) for each in (plain, returned)] == [2, 1]
    for pair in ((plain, returned), (returned, plain)):
        assert compare(*pair).verdict is Verdict.ROUNDING
    found = compare(returned, mistake)
    assert found.verdict is Verdict.BUG and found.first_divergence is not None
    assert found.first_divergence.phase in ("forward", "reduce")


TWO_OPTIMIZERS = """
first, last = (torch.optim.SGD(model[i].parameters(), 0.1) for i in (0, 3))
for _ in range(3):
    x, y = draw()
    x.requires_grad_()
    cross_entropy(model(x), y).backward()
    cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y).backward()
    first.step()
    last.step()
    model.zero_grad()
"""


def test_optimizers_that_step_after_an_attack_take_no_turns(recorded):
    found = recorded(TWO_OPTIMIZERS)
    assert [found.num_losses(step, 0) for step in range(3)] == [2, 2, 2]
    assert not any(found.backwards(step, 0) for step in range(3))

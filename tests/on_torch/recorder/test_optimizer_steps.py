"""Scripts whose optimizers step others, as a container of several does, or step in backward, recorded."""

import numpy as np
import pytest
import torch

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare

STEP = """
for x in tokens:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step()
"""
PLAIN = (
    """
model = net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
"""
    + STEP
)
CONTAINER = """
class Container(torch.optim.Optimizer):
    def __init__(self, *optimizers):
        self.optimizers = list(optimizers)
        super().__init__([param for each in optimizers for group in each.param_groups for param in group["params"]], {})
    def step(self):
        for each in self.optimizers:
            each.step()
model = net()
params = [*model.parameters()]
"""
SAVED = "torch.save(model.state_dict(), sys.argv[1])"
ONE = "optimizer = Container(torch.optim.AdamW(params, 1e-2))" + STEP
TWO = "optimizer = Container(torch.optim.AdamW(params[:2], 1e-2), torch.optim.AdamW(params[2:], 1e-2))" + STEP
SLOW = (
    """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner = inner
        super().__init__([param for group in inner.param_groups for param in group["params"]], {})
        self.slow = [param.detach().clone() for param in self.param_groups[0]["params"]]
    @torch.no_grad()
    def step(self):
        self.inner.step()
        for param, slow in zip(self.param_groups[0]["params"], self.slow):
            param.copy_(slow.lerp_(param, 0.5))
model = net()
optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1))
"""
    + STEP
)
SHARP = """
class Sharpness(torch.optim.Optimizer):
    def __init__(self, base):
        self.base_optimizer = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups
    @torch.no_grad()
    def step(self, closure):
        moved = [0.01 * param.grad for group in self.param_groups for param in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        torch._foreach_add_(params, moved)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(params, moved)
        self.base_optimizer.step()
model = net()
optimizer = Sharpness(torch.optim.SGD(model.parameters(), 0.1))
for x in tokens:
    optimizer.zero_grad()
    loss_of(model, x).backward()
    optimizer.step(lambda: loss_of(model, x).backward())
"""

# The same by two calls of the loop.
SHARP_IN_TWO = SHARP.replace(
    "    optimizer.step(lambda: loss_of(model, x).backward())",
    """    moved = [0.01 * param.grad for param in model.parameters()]
    with torch.no_grad():
        torch._foreach_add_([*model.parameters()], moved)
    optimizer.zero_grad()
    loss_of(model, x).backward()
    with torch.no_grad():
        torch._foreach_sub_([*model.parameters()], moved)
    optimizer.base_optimizer.step()""",
)


@pytest.mark.parametrize("wrapped", [pytest.param(ONE, id="one"), pytest.param(TWO, id="two")])
def test_a_container_steps_as_its_optimizers_do(tmp_path, run, wrapped):
    assert run(PLAIN, directory=str(tmp_path / "a")) == run(CONTAINER + wrapped, directory=str(tmp_path / "b")) == 0
    a, b = Recording.open(tmp_path / "a"), Recording.open(tmp_path / "b")
    found = compare(a, b)
    assert (found.verdict, found.settings, b.num_steps) == (Verdict.EQUAL, (), 3)
    assert b.state_slots(2, "0.weight") == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize(("text", "microbatches"), [(SLOW, 1), (SHARP, 2)])
def test_a_step_ends_with_that_of_the_wrapper(tmp_path, run, text, microbatches):
    assert run(text + SAVED, str(tmp_path / "params.pt"), every=1) == 0
    found, params = Recording.open(tmp_path / "out"), torch.load(tmp_path / "params.pt")
    assert (found.num_steps, found.num_microbatches, found.manifest.settings["optimizer"]) == (3, microbatches, "SGD")
    assert found.learning_rates(2) == (0.1,)
    for name, param in params.items():
        np.testing.assert_array_equal(found.full("update", 2, name), param.numpy())


def test_gradients_are_those_that_the_inner_optimizer_gets(tmp_path, run):
    for name, text in (("a", SHARP), ("b", SHARP_IN_TWO)):
        assert run(text, directory=str(tmp_path / name), every=1, dense=3) == 0
    found = compare(*(Recording.open(tmp_path / name) for name in "ab"))
    assert (found.verdict, found.steps) == (Verdict.EQUAL, 3), found.reason


IN_BACKWARD = """
model = net()
optimizers = {param: torch.optim.AdamW([param], 1e-2) for param in model.parameters()}
def step(param):
    optimizers[param].step()
    optimizers[param].zero_grad()
for param in optimizers:
    param.register_post_accumulate_grad_hook(step)
for x in tokens:
    loss_of(model, x).backward()
"""


def test_optimizers_may_step_in_backward(tmp_path, run):
    assert run(PLAIN, directory=str(tmp_path / "a")) == run(IN_BACKWARD, directory=str(tmp_path / "b")) == 0
    found = compare(*(Recording.open(tmp_path / name) for name in "ab"))
    assert found.verdict is Verdict.EQUAL and not any("not compared" in note for note in found.notes)


# Hooks step a parameter once its gradient has come, and clear the gradient, as optimi's `prepare_for_gradient_release` does.
RELEASED = """
class Released(torch.optim.AdamW):
    def step(self, param=None):
        groups = self.param_groups
        if param is not None:
            self.param_groups = [{**groups[0], "params": [param]}]
            super().step()
            self.param_groups, param.grad = groups, None
model = net()
optimizer = Released(model.parameters(), 1e-2)
for each in model.parameters():
    each.register_post_accumulate_grad_hook(lambda param: optimizer.step(param=param))
"""


def test_parameters_that_hooks_step_one_by_one_are_one_step(run, tmp_path):
    assert run(PLAIN, directory=str(tmp_path / "plain"), every=1) == 0
    assert run(RELEASED + STEP, directory=str(tmp_path / "released"), every=1) == 0
    plain, released = (Recording.open(tmp_path / name) for name in ("plain", "released"))
    found = compare(plain, released)
    assert released.num_steps == plain.num_steps and found.verdict is Verdict.EQUAL, found.reason
    assert all(released.has("reduce", 1, name) for name in plain.manifest.params)

"""A loop in torch and one in JAX, neither of them ours, each recorded by its Recorder: what `compare` says of them."""

# pyright: reportAssignmentType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false, reportOptionalOperand=false

import jax
import optax
import pytest
import torch
from torch import nn

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from jax_backend import Recorder
from tests.on_jax.helpers.recorded_loops import mesh_of, placed
from tests.on_jax.helpers.small import canonical, small_batch, small_loss, small_map, small_params
from torch_backend.recorder import Recorder as TorchRecorder

STEPS = 3
ABOUT = {"steps": STEPS, "name": "small", "dense": 3}


class Block(nn.Linear):
    """What is added to what comes in."""

    def forward(self, x):
        return x + torch.tanh(super().forward(x))


class Small(nn.Module):
    """The small model of the tests of jax_backend, in torch."""

    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(3, 5), nn.Linear(5, 2)
        self.blocks = nn.ModuleList([Block(5, 5), Block(5, 5)])

    def forward(self, x):
        hidden = torch.tanh(self.inp(x))
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden)


def in_torch(folder):
    model = Small().double()
    with torch.no_grad():
        for name, value in canonical(small_params()).items():
            model.get_parameter(name).copy_(torch.from_numpy(value.copy()))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    with TorchRecorder(folder, model=model, optimizer=optimizer, **ABOUT) as recorder:
        for i in range(STEPS):
            x, y = (torch.from_numpy(small_batch(8, seed=i)[key]) for key in ("x", "y"))
            loss = ((model(x) - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recorder.step(loss=loss)
    return Recording.open(folder)


def in_jax(folder, mesh=None, fault=1.0):
    """Clipped as torch does; on one device, or FSDP by hand."""
    params = jax.tree.map(jax.numpy.asarray, small_params()) if mesh is None else placed(small_params(), mesh)
    tx = optax.adamw(1e-2, weight_decay=0.01)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(small_loss)(params, batch)
        norm = jax.numpy.sqrt(sum((grad**2).sum() for grad in jax.tree.leaves(grads)))
        factor = jax.numpy.minimum(1.0 / (norm + 1e-6), 1.0) * fault
        updates, opt_state = tx.update(jax.tree.map(lambda grad: grad * factor, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, {"grads": grads, "grad_norm": norm}

    told = {
        "param_map": small_map(),
        "samples": lambda batch: batch["x"],
        "learning_rate": 1e-2,
        "settings": {"optimizer": "AdamW"},
    }
    with Recorder(folder, params, **told, **ABOUT) as recorder:
        step, opt_state = recorder.wrap(step), tx.init(params)
        for i in range(STEPS):
            params, opt_state, *_ = step(params, opt_state, small_batch(8, seed=i))
    return Recording.open(folder)


@pytest.fixture(scope="module")
def torch_run(tmp_path_factory):
    return in_torch(tmp_path_factory.mktemp("recorded") / "torch")


@pytest.mark.parametrize("mesh", [None, {"fsdp": 2}])
def test_loops_of_two_frameworks_are_rounding_apart(torch_run, tmp_path, mesh):
    found = compare(torch_run, in_jax(tmp_path / "jax", mesh and mesh_of(**mesh)))
    assert found.verdict is Verdict.ROUNDING, found.reason
    phases = {judged.phase for judged in found.judged}
    assert phases >= {"parameters", "forward", "reduce", "norm", "state", "update"}
    assert 0 < found.max_relative_parameter_difference < 1e-12


def test_a_factor_behind_clipping_is_a_bug_of_the_optimizers_state(torch_run, tmp_path):
    found = compare(torch_run, in_jax(tmp_path / "jax", mesh_of(fsdp=2), fault=2.0))
    assert found.verdict is Verdict.BUG
    assert (found.first_divergence.step, found.first_divergence.phase) == (0, "state"), found.reason

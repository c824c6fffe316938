"""A model in torch and one in flax whose forward calls some modules more than once."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportCallIssue=false
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn

from crossframe import MeshSpec
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from jax_backend import Recorder, apply_updates, make_mesh, shard, sharded_optimizer
from jax_backend.nnx import split, watch, with_params
from torch_backend.recorder import Recorder as TorchRecorder

WIDTH, DEPTH, STEPS = 4, 3, 2
LEFT, RIGHT, LABELS = np.random.default_rng(0).standard_normal((3, STEPS, 6, WIDTH))
CALLS = ("layer", *(f"layer (call {call})" for call in range(2, 2 * DEPTH + 1)))


class Twins(nn.Module):
    """One encoder for two inputs, which itself applies one layer three times."""

    def __init__(self, skip=None, order=""):
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.skip, self.order = skip, order

    def encode(self, x, offset):
        for call in range(DEPTH):
            x = torch.tanh(self.layer(x) + (x if offset + call != self.skip else 0))
        return self.norm(x)

    def forward(self, left, right):
        if self.order == "exchanged":
            left, right = right, left
        if self.order == "reversed":
            second, first = self.encode(right, DEPTH), self.encode(left, 0)
        else:
            first, second = self.encode(left, 0), self.encode(right, DEPTH)
        return self.head(first * torch.sigmoid(second))


class Siamese(nnx.Module):
    """The same with other names."""

    def __init__(self, rngs):
        self.shared, self.after = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, epsilon=1e-5, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def encode(self, x):
        for _ in range(DEPTH):
            x = jnp.tanh(self.shared(x) + x)
        return self.after(x)

    def __call__(self, left, right):
        return self.out(self.encode(left) * nnx.sigmoid(self.encode(right)))


def in_torch(folder, skip=None, order=""):
    torch.manual_seed(0)
    model = Twins(skip, order).double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    initial = {name: value.detach().numpy().copy() for name, value in model.named_parameters()}
    with TorchRecorder(folder, model=model, optimizer=optimizer, name="T", dense=STEPS) as recorder:
        for left, right, labels in zip(*map(torch.from_numpy, (LEFT, RIGHT, LABELS)), strict=True):
            loss = (model(left, right) - labels).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step(loss=loss)
    return Recording.open(folder), initial


def in_flax(folder, initial):
    graphdef, params, state = split(Siamese(nnx.Rngs(0)))
    names = {"shared": "layer", "after": "norm", "out": "head"}
    for module, name in names.items():
        scale = "scale" if module == "after" else "kernel"
        params[module][scale] = jnp.asarray(initial[f"{name}.weight"].T)
        params[module]["bias"] = jnp.asarray(initial[f"{name}.bias"])
    sharded = shard(params, make_mesh(MeshSpec(shard=1)))

    def loss_fn(params, batch):
        model = with_params(graphdef, params, state)
        watch(model)
        return jnp.square(model(*batch[:2]) - batch[2]).mean()

    optimizer = sharded_optimizer(optax.adam(1e-2))
    opt_state = optimizer.init(sharded)
    with Recorder(folder, sharded, name="F", dense=STEPS, learning_rate=1e-2) as recorder:
        step = recorder.value_and_grad(loss_fn)
        for batch in zip(LEFT, RIGHT, LABELS, strict=True):
            result = step(sharded, tuple(map(jnp.asarray, batch)))
            updates, opt_state = optimizer.update(result.grads, opt_state, sharded)
            sharded = apply_updates(sharded, updates)
            recorder.step(loss=result.loss, params=sharded, grads=result.grads, opt_state=opt_state, batch=batch)
    return Recording.open(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run, initial = in_torch(folder / "torch")
    return run, in_flax(folder / "flax", initial)


def test_every_call_is_recorded_in_order(runs):
    for run, layer in zip(runs, ("layer", "shared"), strict=True):
        inputs = [module for _, module, use in run.activations(0) if use == "input" and module.startswith(layer)]
        assert inputs == [call.replace("layer", layer) for call in CALLS]
    given = runs[0].activation(0, 0, 0, CALLS[DEPTH], "input")
    np.testing.assert_array_equal(given, RIGHT[0])


def test_calls_of_matched_modules_are_compared(runs):
    found = compare(*runs)
    assert found.verdict is Verdict.ROUNDING, found.reason
    names = {each.name for each in found.judged}
    assert {f"{use} of {call}" for use in ("input", "output") for call in (*CALLS, "norm", "norm (call 2)")} <= names


@pytest.mark.parametrize("skip", [0, 1, DEPTH - 1, DEPTH, 2 * DEPTH - 1])
def test_a_fault_after_any_call_is_located_before_the_next(runs, tmp_path, skip):
    wrong, _ = in_torch(tmp_path / "wrong", skip)
    after = {DEPTH - 1: "norm", 2 * DEPTH - 1: "norm (call 2)"}.get(skip) or CALLS[skip + 1]
    for pair in ((runs[0], wrong), (runs[1], wrong)):
        found = compare(*pair)
        where = found.first_divergence
        assert found.verdict is Verdict.BUG and (where.event, where.module) == ("input", after), found.reason


def test_calls_in_another_order_are_compared_by_their_inputs(runs, tmp_path):
    other, _ = in_torch(tmp_path / "other", order="reversed")
    found, across = (compare(run, other) for run in runs)
    assert found.verdict is across.verdict is Verdict.ROUNDING, (found.reason, across.reason)
    assert "the runs call 'layer' and 1 more in another order: calls with the same inputs are compared" in found.notes
    assert {f"input of {call}" for call in CALLS} <= {each.name for each in found.judged}


def test_inputs_that_are_exchanged_are_a_bug_at_the_first_call(runs, tmp_path):
    wrong, _ = in_torch(tmp_path / "wrong", order="exchanged")
    found = compare(runs[0], wrong)
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and (where.event, where.module) == ("input", "layer"), found.reason
    assert "its calls come in another order" in found.diagnosis.evidence
    assert any("if calls with the same inputs are compared, at step 0" in note for note in found.notes), found.notes

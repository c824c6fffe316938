"""State of models that is no parameter, recorded after each step."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from crossframe.errors import RecordingError, UsageError
from crossframe.mesh import MeshSpec
from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from jax_backend import LossOutput, Recorder, make_mesh, per_rank, shard, value_and_grad
from jax_backend.nnx import split, state_of, with_params
from jax_backend.recorder._model_state import canonical_name, canonical_names, carried, statistics_of_ranks

NET = """
import os
from typing import Any
import flax, jax, jax.numpy as jnp, numpy as np, optax
from flax import linen as nn
from flax.training import train_state

class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4)(x)
        x = nn.BatchNorm(use_running_average=False, momentum=float(os.environ["FAULT"]) * 0.9)(x)
        return nn.Dense(2)(nn.relu(x))

class State(train_state.TrainState):
    batch_stats: Any

def loss_of(params, stats, batch):
    out, changed = net.apply({"params": params, "batch_stats": stats}, batch["x"], mutable=["batch_stats"])
    return jnp.mean((out - batch["y"]) ** 2), changed["batch_stats"]

draw = np.random.default_rng(0)
batches = [{"x": draw.normal(size=(8, 3)).astype("f"), "y": draw.normal(size=(8, 2)).astype("f")} for _ in range(3)]
net = Net()
variables = net.init(jax.random.key(0), batches[0]["x"])
seen = [jax.device_get(variables["batch_stats"])]
"""
TRAIN_STATE = """
def step(state, batch):
    grad_fn = jax.value_and_grad(loss_of, has_aux=True)
    (loss, stats), grads = grad_fn(state.params, state.batch_stats, batch)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss
step = jax.jit(step, donate_argnums=0)
state = State.create(apply_fn=net.apply, tx=optax.sgd(0.1), **variables)
for batch in batches:
    state, loss = step(state, batch)
    seen.append(jax.device_get(state.batch_stats))
"""
OWN_LOOP = """
{0}
def gradient(params, stats, batch):
    return jax.value_and_grad(loss_of, has_aux=True)(params, stats, batch)
tx, params, stats = optax.sgd(0.1), variables["params"], variables["batch_stats"]
opt_state = tx.init(params)
for batch in batches:
    (loss, stats), grads = gradient(params, stats, batch)
    updates, opt_state = tx.update(grads, opt_state)
    params = optax.apply_updates(params, updates)
    seen.append(jax.device_get(stats))
"""
SCANNED = """
@jax.jit
def epoch(params, stats, opt_state, replay, batches):
    def body(carry, batch):
        params, stats, opt_state, replay = carry
        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), stats, opt_state, {"replay": replay["replay"] + 1}), stats
    return jax.lax.scan(body, (params, stats, opt_state, replay), batches)
tx = optax.sgd(0.1)
stacked = jax.tree.map(lambda *each: np.stack(each), *batches)
replay = {"replay": jnp.zeros(1000)}  # larger than the model
_, stats = epoch(variables["params"], variables["batch_stats"], tx.init(variables["params"]), replay, stacked)
seen += [jax.device_get(jax.tree.map(lambda leaf: leaf[i], stats)) for i in range(3)]
"""
FORMS = {
    "a donated train state": NET + TRAIN_STATE,
    "gradients in jit": NET + OWN_LOOP.format("@jax.jit"),
    "nothing in jit": NET + OWN_LOOP.format(""),
    "steps in a scan": NET + SCANNED,
}
NAMES = ("BatchNorm_0.running_mean", "BatchNorm_0.running_var")


@pytest.mark.parametrize("form", FORMS)
def test_statistics_of_a_script_are_recorded_under_torchs_names(run, tmp_path, form):
    status, variables = run(FORMS[form], every=1)
    recording = Recording.open(tmp_path / "out")
    assert status == 0 and recording.num_steps == 3
    assert recording.initial_buffers() == list(NAMES)
    for step, stats in enumerate(variables["seen"], -1):
        for name, own in zip(NAMES, ("mean", "var"), strict=True):
            assert np.array_equal(recording.buffer(step, 0, name), stats["BatchNorm_0"][own]), (step, name)


def test_state_is_no_part_of_a_batch(run, tmp_path):
    """In whichever way the step is compiled."""
    for i, form in enumerate(FORMS):
        run(FORMS[form], str(i), every=1)
    first, *others = (Recording.open(tmp_path / str(i)) for i in range(len(FORMS)))
    for other in others:
        assert [other.batch(step, 0).digest for step in range(3)] == [first.batch(step, 0).digest for step in range(3)]


@pytest.mark.parametrize("form", ["a donated train state", "steps in a scan"])
def test_another_momentum_is_located_and_diagnosed(run, tmp_path, form):
    """Nothing of the training reads the running statistics."""
    run(FORMS[form], "right")
    run(FORMS[form], "wrong", 0.5)
    found = compare(Recording.open(tmp_path / "right"), Recording.open(tmp_path / "wrong"))
    assert found.verdict is Verdict.BUG and found.first_divergence is not None, found.reason
    assert (found.first_divergence.step, found.first_divergence.buffer) == (0, NAMES[0])
    assert max(found.loss_differences) == 0.0
    assert found.diagnosis is not None and "the step changes the buffer 5.5 times as much" in found.diagnosis.evidence


MAPPED = """
from functools import partial
@partial(jax.pmap, axis_name="data")
def step(params, stats, opt_state, batch):
    (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params, stats, batch)
    grads, loss = jax.lax.pmean((grads, loss), "data")
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), stats, opt_state, loss
tx = optax.sgd(0.1)
every = (variables["params"], variables["batch_stats"], tx.init(variables["params"]))
params, stats, opt_state = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), every)
for batch in batches:
    batch = jax.tree.map(lambda leaf: leaf.reshape(2, 4, -1), batch)
    params, stats, opt_state, loss = step(params, stats, opt_state, batch)
    seen.append(jax.device_get(stats))
"""


def test_each_device_of_a_pmap_has_its_own(run, tmp_path):
    _, variables = run(NET + MAPPED, every=1)
    recording = Recording.open(tmp_path / "out")
    assert recording.manifest.world_size == 2
    for step, stats in enumerate(variables["seen"][1:]):
        for rank in range(2):
            mean = recording.buffer(step, rank, NAMES[0])
            assert np.array_equal(mean, stats["BatchNorm_0"]["mean"][rank])
    assert not np.array_equal(recording.buffer(0, 0, NAMES[0]), recording.buffer(0, 1, NAMES[0]))


def loop(directory, **options):
    """A loop of the user's own, with a parameter and a moving average of its gradient."""
    params, average, tx = {"w": np.ones(3, np.float32)}, np.zeros(3, np.float32), optax.sgd(0.1)
    opt_state = tx.init(params)
    with Recorder(directory, params, model_state={"ema": average}, every=1, dense=1, **options) as recorder:
        for step in range(2):
            grads = jax.tree.map(lambda leaf, step=step: leaf * (step + 1.0), params)
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            average = 0.5 * average + 0.5 * np.asarray(grads["w"])
            state = {"ema": average, "count": np.int32(step)}
            recorder.step(loss=1.0, params=params, grads=grads, batch=np.ones(2), model_state=state)
    return Recording.open(directory)


def test_state_that_a_loop_passes_is_recorded(tmp_path):
    recording = loop(tmp_path / "run")
    assert recording.initial_buffers() == recording.buffers(0) == ["ema"]
    assert [recording.buffer(step, 0, "ema").tolist() for step in (-1, 0)] == [[0, 0, 0], [0.5, 0.5, 0.5]]
    with pytest.raises(RecordingError, match="recorded no buffer 'count'"):
        recording.buffer(0, 0, "count")


def test_tracers_are_refused(tmp_path):
    made = Recorder(tmp_path / "run", params := {"w": np.ones(3)})
    with pytest.raises(UsageError, match=r"got tracers in \['model_state'\]"):
        jax.jit(lambda x: made.step(loss=1.0, params=params, model_state={"ema": x}))(1.0)


def test_sharded_params_have_the_state_of_each_rank(tmp_path):
    mesh = make_mesh(MeshSpec(2))
    params, state = {"w": np.ones((2, 2), np.float32)}, {"mean": np.zeros(2, np.float32)}

    def loss_fn(params, batch, state):
        mean = batch.mean(axis=0)
        return LossOutput((batch @ params["w"]).sum(), state={"mean": 0.5 * state["mean"] + 0.5 * mean})

    sharded, states = shard(params, mesh), per_rank(state, mesh)
    batch = np.arange(8, dtype=np.float32).reshape(4, 2)
    with Recorder(tmp_path / "run", sharded, model_state=states, every=1, dense=1) as recorder:
        result = value_and_grad(loss_fn, mesh)(sharded, batch, states)
        after = jax.tree.map(lambda leaf, grad: leaf - 0.1 * grad, sharded, result.grads)
        recorder.step(loss=result.loss, params=after, grads=result.grads, batch=batch, model_state=result.state)
    recording = Recording.open(tmp_path / "run")
    assert [recording.buffer(0, rank, "mean").tolist() for rank in range(2)] == [[0.5, 1.0], [2.5, 3.0]]
    with pytest.raises(UsageError, match=r"model_state: mean: expected a leading dim of 2 ranks.*got shape \(3,\)"):
        Recorder(tmp_path / "other", sharded, model_state={"mean": np.zeros(3)})


def test_batch_norm_over_the_samples_of_a_rank_makes_another_number_of_ranks_incomparable(tmp_path):
    model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
    graphdef, params, state = split(model)

    def loss_fn(params, batch, state):
        model = with_params(graphdef, params, state)
        return LossOutput((model(batch) ** 3).mean(), state=state_of(model))

    found, batch = [], np.arange(8, dtype=np.float32).reshape(4, 2) ** 2
    for ranks in (1, 2):
        mesh = make_mesh(MeshSpec(ranks), jax.devices()[:ranks])
        sharded = shard(params, mesh)
        with Recorder(tmp_path / str(ranks), sharded, every=1, dense=1) as recorder:
            result = recorder.value_and_grad(loss_fn)(sharded, batch, per_rank(state, mesh))
            recorder.step(loss=result.loss, params=sharded, grads=result.grads, batch=batch)
        found.append(Recording.open(tmp_path / str(ranks)))
    assert "per_rank_statistics" not in found[0].manifest.settings
    verdict = compare(*found)
    assert verdict.verdict is Verdict.INCOMPARABLE
    assert "in 2 ['layers.1'] normalises over the samples of its own rank" in verdict.reason


@pytest.mark.parametrize(
    ("mean", "var", "module"),
    [
        ("layers.1.mean", "layers.1.var", "layers.1"),
        ("net/norm/~/mean_ema.average", "net/norm/~/var_ema.average", "net/norm"),
        ("net/norm/moving_mean", "net/norm/moving_variance", "net/norm"),
        ("layers.1.mean", "layers.1.scale", None),
        ("meanings.loss", "variances.loss", None),
    ],
)
def test_norms_are_known_by_their_statistics(mean, var, module):
    apart, alike = np.arange(6.0).reshape(2, 3), np.ones((2, 3))
    assert statistics_of_ranks({mean: apart, var: alike}) == ([module] if module else [])
    assert statistics_of_ranks({mean: alike, var: apart}) == []


def test_names_are_those_of_the_modules_of_parameters():
    params = ["layers.0.norm.scale", "layers.1.norm.scale", "w"]
    assert canonical_name("0.state.layers.0.norm.mean", params) == "layers.0.norm.running_mean"
    assert canonical_name("batch_stats.norm.mean", params) == "batch_stats.norm.mean"  # of either
    assert canonical_name("ema.layers.0.norm.scale", params) == "ema.layers.0.norm.scale"


def test_paths_that_would_share_a_name_keep_their_own():
    paths = ["batch_stats.norm.mean", "ema_stats.norm.mean", "batch_stats.norm.var"]
    assert canonical_names(paths, ["norm.scale"]) == {
        "batch_stats.norm.mean": "batch_stats.norm.mean",
        "ema_stats.norm.mean": "ema_stats.norm.mean",
        "batch_stats.norm.var": "norm.running_var",
    }


def test_state_is_what_a_function_gets_and_returns_under_one_path():
    leaf, other = np.zeros(3), np.zeros(4)
    args = ({"params": leaf, "stats": {"mean": leaf, "count": np.int32(0)}, "gone": leaf}, other)
    result = ({"params": leaf, "stats": {"mean": leaf, "count": np.int32(1)}}, {"loss": other})
    flat = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path((args, {}))[0]]
    params = next(i for i, path in enumerate(flat) if "params" in path)
    found = carried(args, {}, result, {params})
    assert list(found) == ["stats.mean"]
    i, j = found["stats.mean"]
    assert "mean" in flat[i] and "mean" in jax.tree_util.keystr(jax.tree_util.tree_flatten_with_path(result)[0][j][0])
    twice = carried(({"mean": leaf},), {}, ({"a": {"mean": leaf}, "b": {"mean": leaf}},), set())
    assert not twice
    assert list(carried(({"mean": leaf},), {}, ({"batch_stats": {"mean": leaf}},), set())) == ["mean"]


NNX = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
class Net(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
    def __call__(self, x):
        return self.down(nnx.relu(self.norm(self.up(x))))
net = Net(nnx.Rngs(0))
optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
@nnx.jit
def step(net, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda net: jnp.mean((net(x) - y) ** 2))(net)
    optimizer.update(net, grads)
    return loss
draw = np.random.default_rng(0)
seen = []
for _ in range(2):
    x, y = draw.normal(size=(8, 3)).astype("f"), draw.normal(size=(8, 2)).astype("f")
    step(net, optimizer, x, y)
    seen.append((np.array(net.norm.mean[...]), np.array(net.norm.var[...])))
"""


def test_statistics_of_nnx_are_recorded(run, tmp_path):
    _, variables = run(NNX, every=1)
    recording = Recording.open(tmp_path / "out")
    for step, (mean, var) in enumerate(variables["seen"]):
        assert np.array_equal(recording.buffer(step, 0, "norm.running_mean"), mean)
        assert np.array_equal(recording.buffer(step, 0, "norm.running_var"), var)

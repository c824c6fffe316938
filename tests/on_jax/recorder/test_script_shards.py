"""Scripts that train ShardedParams, recorded, next to the same training without shards."""

from collections import Counter

import numpy as np
import pytest

from crossframe.check import check_recordings
from crossframe.environment import Effect
from crossframe.recording import Recording
from crossframe.recording.known_settings import GROUPS, NOT_RECORDED, PER_RANK
from crossframe.recording.program import MODE, PROGRAM
from crossframe.report.traces import followed_plan
from crossframe.trace import ALL_GATHER, REDUCE_SCATTER
from crossframe.verdict import Verdict, compare
from jax_backend import unshard
from tests.on_jax.helpers.scripts import HEAD, SHARDED_STEP

MODEL = (
    HEAD
    + """
import equinox as eqx
import jax_backend
from crossframe import MeshSpec
class Net(eqx.Module):
    layers: list
    norm: eqx.nn.LayerNorm
    def __init__(self, key):
        first, second, last = jax.random.split(key, 3)
        sizes = (first, 6, 5), (second, 5, 5), (last, 5, 3)
        self.layers = [eqx.nn.Linear(inputs, outputs, key=key) for key, inputs, outputs in sizes]
        self.norm = eqx.nn.LayerNorm(5)
    def __call__(self, x):
        x = self.norm(jax.nn.gelu(self.layers[0](x)))
        return self.layers[2](jax.nn.gelu(self.layers[1](x)))
params, static = eqx.partition(Net(jax.random.key(0)), eqx.is_inexact_array)
def loss_fn(params, batch):
    return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["image"]), batch["label"])
matrices = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
tx = TX
"""
)
PLAIN = """
opt_state = tx.init(params)
@jax.jit
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
"""
SHARDED = (
    """
mesh = jax_backend.make_mesh(SPEC, jax.devices()[:SPEC.world_size])
params = jax_backend.shard(params, mesh, layout=LAYOUT, units=("layers.1",))
optimizer = jax_backend.sharded_optimizer(tx)
opt_state = optimizer.init(params)
value_and_grad = jax_backend.value_and_grad(loss_fn, mesh, mode=MODE)
"""
    + SHARDED_STEP
)
HALVES = """
parts = lambda batch: [jax.tree.map(lambda leaf: leaf[start::2], batch) for start in range(2)]
"""
IN_PARTS = """
@jax.jit
def step(params, opt_state, batch):
    results = [jax.value_and_grad(loss_fn)(params, part) for part in parts(batch)]
    loss, grads = jax.tree.map(lambda *each: sum(each) / 2, *results)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
"""
SHARDED_IN_PARTS = """
half = lambda params, batch: loss_fn(params, batch) / 2
local = jax_backend.value_and_grad(half, mesh, mode=MODE, reduces=False)
reduced = jax_backend.value_and_grad(half, mesh, mode=MODE)
@jax.jit
def step(params, opt_state, batch):
    first, second = parts(batch)
    earlier = local(params, first)
    result = reduced(params, second, accumulated=earlier.grads)
    updates, opt_state = optimizer.update(result.grads, opt_state, params)
    return jax_backend.apply_updates(params, updates), opt_state, earlier.loss + result.loss
"""
RUN = """
for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)
result = params
"""
ADAMW = "optax.adamw(0.01, weight_decay=0.1, mask=matrices)"
BIASES = {"layers.0.bias", "layers.1.bias", "layers.2.bias", "norm.weight", "norm.bias"}


def text(*parts, tx=ADAMW, spec="MeshSpec(2)", layout="per_param", mode="shard_map"):
    found = "".join((MODEL, *parts, RUN)).replace("TX", tx).replace("SPEC", spec)
    return found.replace("LAYOUT", repr(layout)).replace("MODE", repr(mode))


def recorded(run, tmp_path, name, script, **options):
    assert run(script, name, **options)[0] == 0
    return Recording.open(tmp_path / name)


@pytest.mark.parametrize(
    ("layout", "mode", "spec"),
    [
        pytest.param("per_param", "shard_map", "MeshSpec(2)", id="per_param"),
        pytest.param("flat", "jit", "MeshSpec(2, 2)", id="flat-replicated"),
        pytest.param("ragged", "shard_map", "MeshSpec(4)", id="ragged", marks=pytest.mark.exhaustive),
        pytest.param("per_param", "jit", "MeshSpec(4)", id="per_param-jit", marks=pytest.mark.exhaustive),
    ],
)
def test_a_sharded_run_agrees_with_a_plain_one(tmp_path, run, layout, mode, spec):
    tx = ADAMW if layout == "per_param" else "optax.adamw(0.01)"
    plain = recorded(run, tmp_path, "plain", text(PLAIN, tx=tx))
    given = {"tx": tx, "spec": spec, "layout": layout, "mode": mode}
    sharded = recorded(run, tmp_path, "sharded", text(SHARDED, **given))
    assert compare(plain, sharded).verdict is Verdict.ROUNDING
    assert sharded.manifest.params == plain.manifest.params
    assert sharded.manifest.settings[PROGRAM][MODE] == mode
    assert sharded.manifest.strategy == ("full_shard" if sharded.manifest.mesh.replicate == 1 else "hybrid_shard")
    assert {*sharded.activations(0)} == {*plain.activations(0)}
    assert sharded.manifest.settings.get(GROUPS) == plain.manifest.settings.get(GROUPS)
    # Of 8 samples each rank computes its own, in both modes.
    shape = sharded.activation(0, 0, 0, "layers.1", "output").shape
    assert shape == (8 // sharded.manifest.world_size, 5)
    assert_reduced_gradients_are_means(sharded)
    if mode == "jit":  # XLA places them
        assert not sharded.collectives(1, 0)
    else:
        assert sharded.collectives(1, 0) == sharded.collectives(0, 0) and followed_plan(sharded)
    fault = recorded(run, tmp_path, "fault", text(SHARDED, **given), fault=1.01)
    verdict = compare(plain, fault)
    assert verdict.verdict is Verdict.BUG and verdict.first_divergence.phase == "reduce"


def assert_reduced_gradients_are_means(recording):
    """Of the ranks' own, which differ."""
    for name in recording.manifest.params:
        own = [recording.local(0, rank, name) for rank in range(recording.manifest.world_size)]
        assert not np.array_equal(own[0], own[1])
        bound = 64 * np.finfo(np.float32).eps * max(map(np.linalg.norm, own))
        np.testing.assert_allclose(
            np.mean(own, axis=0), recording.full("reduce", 0, name).reshape(own[0].shape), 0, bound
        )


def test_a_mask_exempts_parameters_by_name(tmp_path, run):
    sharded = recorded(run, tmp_path, "sharded", text(SHARDED))
    (group,) = sharded.manifest.settings[GROUPS]
    assert {*group["params"]} == BIASES and group["weight_decay"] == 0.0


@pytest.mark.parametrize("mode", ["shard_map", "jit"])
def test_losses_of_added_gradients_are_added(tmp_path, run, mode):
    plain = recorded(run, tmp_path, "plain", text(HALVES, PLAIN, IN_PARTS))
    sharded = recorded(run, tmp_path, "sharded", text(HALVES, SHARDED, SHARDED_IN_PARTS, mode=mode))
    assert compare(plain, sharded).verdict is Verdict.ROUNDING
    assert_reduced_gradients_are_means(sharded)
    if mode == "jit":
        return
    of_microbatches = Counter((event.microbatch, event.kind) for event in sharded.collectives(1, 0))
    assert of_microbatches[0, REDUCE_SCATTER] == 0 < of_microbatches[1, REDUCE_SCATTER]
    assert of_microbatches[0, ALL_GATHER] == of_microbatches[1, ALL_GATHER] > 0


@pytest.mark.parametrize(
    ("part", "rows"), [("leaf[start::2]", [0, 2, 1, 3]), ("leaf[4 * start : 4 * start + 4]", [0, 1, 4, 5])]
)
def test_parts_that_a_step_cuts_are_compared_by_sample(tmp_path, run, part, rows):
    """Whatever order of samples, and on whichever rank."""
    halves = HALVES.replace("leaf[start::2]", part)
    whole = [recorded(run, tmp_path, f"whole{i}", text(each)) for i, each in enumerate((PLAIN, SHARDED))]
    alone = recorded(run, tmp_path, "alone", text(halves, PLAIN, IN_PARTS))
    sharded = recorded(run, tmp_path, "sharded", text(halves, SHARDED, SHARDED_IN_PARTS))
    for recording in (alone, sharded):
        assert {compare(each, recording).verdict for each in whole} <= {Verdict.EQUAL, Verdict.ROUNDING}
        assert not any("not compared" in note for each in whole for note in compare(each, recording).notes)
    ids = whole[0].batch(0, 0).sample_ids
    assert sharded.batch(0, 0).sample_ids == tuple(ids[row] for row in rows)
    inputs = alone.activation(0, 0, 1, "layers.0", "input"), whole[0].activation(0, 0, 0, "layers.0", "input")
    np.testing.assert_array_equal(inputs[0], inputs[1][1::2] if rows[1] == 2 else inputs[1][4:])


def test_small_steps_of_multisteps_are_one_step(tmp_path, run):
    tx = "optax.MultiSteps(optax.adamw(0.01), 3)"
    plain = recorded(run, tmp_path, "plain", text(PLAIN, tx=tx))
    sharded = recorded(run, tmp_path, "sharded", text(SHARDED, tx=tx))
    assert plain.num_steps == sharded.num_steps == 1
    assert compare(plain, sharded).verdict is Verdict.ROUNDING
    grads = [recording.full("reduce", 0, "layers.2.weight") for recording in (plain, sharded)]
    np.testing.assert_allclose(*grads, rtol=0, atol=64 * np.finfo(np.float32).eps)


TWO_MODELS = (
    HEAD
    + """
import jax_backend
from crossframe import MeshSpec
normal = lambda *shape: 0.3 * rng.normal(size=shape).astype(np.float32)
actor, critic = {"a": normal(6, 5), "out": normal(5, 3)}, {"w": normal(6, 4), "out": normal(4, 1)}
def policy(params, batch):
    return cross_entropy(jnp.tanh(batch["image"] @ params["a"]) @ params["out"], batch["label"])
def value(params, batch):
    return jnp.mean((jnp.tanh(batch["image"] @ params["w"]) @ params["out"]) ** 2)
tx = optax.adam(0.01)
"""
)
OF_TWO = """
actor_state, critic_state = tx.init(actor), tx.init(critic)
gradient = lambda loss_fn: lambda params, batch: jax.value_and_grad(loss_fn)(params, batch)[1]
policy, value, apply_updates = gradient(policy), gradient(value), optax.apply_updates
"""
SHARDS_OF_TWO = """
mesh = jax_backend.make_mesh(MeshSpec(2), jax.devices()[:2])
actor, critic = jax_backend.shard(actor, mesh, layout=LAYOUT), jax_backend.shard(critic, mesh, layout=LAYOUT)
tx = jax_backend.sharded_optimizer(tx)
actor_state, critic_state = tx.init(actor), tx.init(critic)
gradient = lambda loss_fn: lambda params, batch: jax_backend.value_and_grad(loss_fn, mesh)(params, batch).grads
policy, value, apply_updates = gradient(policy), gradient(value), jax_backend.apply_updates
"""
STEP_OF_TWO = """
@jax.jit
def step(actor, critic, actor_state, critic_state, batch):
    updates, actor_state = tx.update(policy(actor, batch), actor_state, actor)
    actor = apply_updates(actor, updates)
    updates, critic_state = tx.update(value(critic, batch), critic_state, critic)
    return actor, apply_updates(critic, updates), actor_state, critic_state
for batch in batches:
    actor, critic, actor_state, critic_state = step(actor, critic, actor_state, critic_state, batch)
result = actor
"""


@pytest.mark.parametrize("layout", ["per_param", "flat"])
def test_several_sharded_models_are_recorded_together(tmp_path, run, layout):
    plain = recorded(run, tmp_path, "plain", TWO_MODELS + OF_TWO + STEP_OF_TWO)
    script = TWO_MODELS + SHARDS_OF_TWO + STEP_OF_TWO
    sharded = recorded(run, tmp_path, "sharded", script.replace("LAYOUT", repr(layout)))
    assert {*sharded.manifest.params} == {"actor.a", "actor.out", "critic.w", "critic.out"}
    assert compare(plain, sharded).verdict is Verdict.ROUNDING
    assert_reduced_gradients_are_means(sharded)
    assert {event.unit for event in sharded.collectives(1, 0)} == {"actor", "critic"} and followed_plan(sharded)
    for recording in (plain, sharded):
        for name in sharded.manifest.params:
            assert {*recording.state_slots(2, name)} == {"exp_avg", "exp_avg_sq"}
            assert recording.count(2, name) == 3
            assert recording.turn(0, name) == (1 if name.startswith("actor") else 2)


WITH_STATISTICS = (
    HEAD
    + """
import jax_backend
from crossframe import MeshSpec
from flax import linen as nn
class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=False)(nn.Dense(5)(x)))
net = Net()
variables = net.init(jax.random.key(0), batches[0]["image"])
mesh = jax_backend.make_mesh(MeshSpec(2), jax.devices()[:2])
params = jax_backend.shard(variables["params"], mesh)
state = jax_backend.per_rank(variables["batch_stats"], mesh)
def loss_fn(params, batch, state):
    given = {"params": params, "batch_stats": state}
    logits, changed = net.apply(given, batch["image"], mutable=["batch_stats"])
    return jax_backend.LossOutput(cross_entropy(logits, batch["label"]), state=changed["batch_stats"])
optimizer = jax_backend.sharded_optimizer(optax.sgd(0.1))
opt_state = optimizer.init(params)
value_and_grad = jax_backend.value_and_grad(loss_fn, mesh, mode=MODE)
@jax.jit
def step(params, opt_state, batch, state):
    result = value_and_grad(params, batch, state)
    updates, opt_state = optimizer.update(result.grads, opt_state, params)
    return jax_backend.apply_updates(params, updates), opt_state, result.state
for batch in batches:
    params, opt_state, state = step(params, opt_state, batch, state)
result = state
"""
)


@pytest.mark.parametrize("mode", ["shard_map", "jit"])
def test_each_rank_has_its_own_statistics(tmp_path, run, mode):
    status, variables = run(WITH_STATISTICS.replace("MODE", repr(mode)))
    assert status == 0
    found = Recording.open(tmp_path / "out")
    assert found.manifest.settings[PER_RANK] == ["BatchNorm_0"]
    means = np.asarray(variables["result"]["BatchNorm_0"]["mean"])
    for rank, mean in enumerate(means):
        np.testing.assert_array_equal(found.buffer(2, rank, "BatchNorm_0.running_mean"), mean)


def test_layers_of_a_stacked_unit_are_parameters(tmp_path, run):
    script = (
        HEAD
        + """
import jax_backend
from crossframe import MeshSpec
normal = lambda *shape: 0.3 * rng.normal(size=shape).astype(np.float32)
params = {"inp": normal(6, 5), "blocks": {"w": normal(3, 5, 5)}, "out": normal(5, 3)}
def loss_fn(params, batch):
    block = lambda x, block, _: (x + jnp.tanh(x @ block["w"]), None)
    x, _ = jax_backend.scan(block, batch["image"] @ params["inp"], params["blocks"])
    return cross_entropy(x @ params["out"], batch["label"])
tx = optax.adamw(0.01)
"""
        + SHARDED.replace('units=("layers.1",)', 'units=("blocks",), stacked=("blocks",)').replace(
            "SPEC", "MeshSpec(2)"
        )
        + RUN
    ).replace("LAYOUT", "'flat'")
    status, variables = run(script.replace("MODE", "'shard_map'"))
    assert status == 0
    found = Recording.open(tmp_path / "out")
    assert followed_plan(found)
    assert {*found.manifest.params} == {"inp", "out", "blocks.0.w", "blocks.1.w", "blocks.2.w"}
    blocks = np.asarray(unshard(variables["result"])["blocks"]["w"])
    for layer, wanted in enumerate(blocks):
        np.testing.assert_array_equal(found.full("update", 2, f"blocks.{layer}.w"), wanted)


ADAPTERS = (
    HEAD
    + """
import jax_backend
from crossframe import MeshSpec
normal = lambda *shape: 0.3 * rng.normal(size=shape).astype(np.float32)
base = jax.tree.map(jnp.asarray, {"w": BASE * normal(6, 7), "out": normal(7, 3)})
own = jax.tree.map(jnp.asarray, {"a": normal(6, 2), "b": normal(2, 7)})
def loss_of(own, base, batch):
    return cross_entropy(jnp.tanh(batch["image"] @ (base["w"] + own["a"] @ own["b"])) @ base["out"], batch["label"])
tx = optax.adam(0.01)
"""
)
GIVEN = """
params = own
opt_state = tx.init(params)
@partial(jax.jit, donate_argnums=DONATED)
def step(params, opt_state, base, batch):
    loss, grads = jax.value_and_grad(loss_of)(params, base, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
for batch in batches:
    params, opt_state, loss = step(params, opt_state, base, batch)
result = params
"""
FROZEN = (
    """
loss_fn = lambda params, batch: loss_of(params["own"], params["base"], batch)
mesh = jax_backend.make_mesh(MeshSpec(2), jax.devices()[:2])
params = jax_backend.shard({"base": base, "own": own}, mesh, frozen=("base",))
optimizer = jax_backend.sharded_optimizer(tx)
opt_state = optimizer.init(params)
value_and_grad = jax_backend.value_and_grad(loss_fn, mesh)
"""
    + SHARDED_STEP
    + RUN
)
WHOLE = (
    """
params = {"base": base, "own": own}
labels = {"base": {"w": "frozen", "out": "frozen"}, "own": {"a": "own", "b": "own"}}
tx = optax.multi_transform({"own": tx, "frozen": optax.set_to_zero()}, labels)
opt_state = tx.init(params)
@jax.jit
def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda params: loss_of(params["own"], params["base"], batch))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss
"""
    + RUN
)


def of_adapters(run, tmp_path, name, script, base="1", donated="()"):
    return recorded(run, tmp_path, name, (ADAPTERS + script).replace("BASE", base).replace("DONATED", donated))


@pytest.mark.parametrize("donated", ["()", "(0, 1)"])
def test_frozen_weights_beside_the_batch_are_no_samples(tmp_path, run, donated):
    """They are the same arrays at every step."""
    given = of_adapters(run, tmp_path, "given", GIVEN, donated=donated)
    assert [len(given.batch(step, 0).sample_ids) for step in range(3)] == [8, 8, 8]
    frozen = of_adapters(run, tmp_path, "frozen", FROZEN)
    assert frozen.manifest.settings[NOT_RECORDED] == ["base.out", "base.w"]
    assert compare(given, frozen).verdict is Verdict.ROUNDING


def test_an_array_that_the_script_writes_into_is_a_batch(tmp_path, run):
    written = GIVEN.replace("batches:\n", "batches:\n    image[:] = batch['image']\n").replace(
        "opt_state, base, batch)\nresult", "opt_state, base, batch | {'image': image})\nresult"
    )
    found, right = (
        of_adapters(run, tmp_path, name, f"image = np.zeros((8, 6), np.float32)\n{script}")
        for name, script in (("written", written), ("new", GIVEN))
    )
    assert written.count("image") == 4
    for step in range(3):
        assert found.batch(step, 0).sample_ids == right.batch(step, 0).sample_ids


def test_other_frozen_weights_are_named(tmp_path, run):
    a, b = (of_adapters(run, tmp_path, name, GIVEN, base) for name, base in (("a", "1"), ("b", "2")))
    assert compare(a, b).verdict is Verdict.BUG
    first = check_recordings(a, b).differences[0]
    assert (first.name, first.effect) == ("the constant w", Effect.CERTAINLY)


def test_frozen_parameters_are_not_compared_with_those_of_another_run(tmp_path, run):
    found = compare(of_adapters(run, tmp_path, "a", WHOLE), of_adapters(run, tmp_path, "b", FROZEN))
    assert found.verdict is Verdict.ROUNDING
    assert any("base.out; base.w, which b did not record" in note for note in found.notes)

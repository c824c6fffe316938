"""ShardedParams recorded, in every layout, with what is inside of a step."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.param_map import MapEntry, ParamMap
from crossframe.precision import PrecisionPolicy
from crossframe.recording import Recording
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.metrics import distance, norm
from jax_backend import LossOutput, Recorder, apply_updates, make_mesh, scan, shard, sharded_optimizer, unshard
from jax_backend.activations import tell
from jax_backend.recorder._observed_loss import ObservedLoss
from jax_backend.recorder._params_as_shards import ShardPieces
from tests.on_jax.helpers import tensor_parallel
from tests.on_jax.helpers.recorded_loops import STEPS, TOLD, record, sharded_small, train
from tests.on_jax.helpers.small import (
    ATOL,
    EPS,
    WIDE,
    canonical,
    small_batch,
    small_loss,
    small_map,
    small_params,
    wide,
)

LAYOUTS = {"flat": {}, "per_param": {"layout": "per_param"}, "ragged": {"layout": "ragged"}}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recorded") / "one", param_map=small_map())


@pytest.mark.parametrize(
    ("layout", "replicate"),
    [
        pytest.param("flat", 1, marks=pytest.mark.exhaustive),
        ("per_param", 2),
        pytest.param("ragged", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_every_layout_is_rounding_away_from_one_device(tmp_path, one_device, layout, replicate):
    sharded = sharded_small(2, replicate, **LAYOUTS[layout])
    with Recorder(tmp_path / "r", sharded, **TOLD) as recorder:
        after, _, result = train(recorder, sharded, small_loss)
    found = Recording.open(tmp_path / "r")
    verdict = compare(one_device, found)
    assert verdict.verdict is Verdict.ROUNDING, verdict.reason
    assert verdict.max_relative_parameter_difference is not None
    assert 0 < verdict.max_relative_parameter_difference < ATOL
    assert found.manifest.settings["losses"] == "by rank" and "inside of steps" in found.manifest.settings["recorded"]
    # What is put together from pieces is what the loop had, moments too.
    last, grads = (
        canonical(jax.tree.map(np.asarray, unshard(after))),
        canonical(jax.tree.map(np.asarray, unshard(result.grads))),
    )
    for name in found.manifest.params:
        for replica in range(replicate):
            np.testing.assert_array_equal(found.full("update", STEPS - 1, name, replica=replica), last[name])
            np.testing.assert_array_equal(found.full("reduce", STEPS - 1, name, replica=replica), grads[name])
        assert found.state_slots(0, name) == ("exp_avg", "exp_avg_sq") and found.count(0, name) == 1.0
        one = found.full("reduce", 0, name)
        np.testing.assert_allclose(found.full("state", 0, name, use="exp_avg"), 0.1 * one, rtol=45 * EPS)
        np.testing.assert_allclose(found.full("state", 0, name, use="exp_avg_sq"), 0.001 * one**2, rtol=450 * EPS)
    if layout == "flat":
        assert list(found.manifest.units) == list(sharded.tree.units)


def test_the_devices_of_a_rank_are_recorded_as_one(tmp_path):
    _, sharded = tensor_parallel.on_mesh(tensor_parallel.PARALLEL)
    optimizer = sharded_optimizer(optax.adamw(1e-2))
    state = optimizer.init(sharded)
    with Recorder(tmp_path / "r", sharded) as recorder:
        result = recorder.value_and_grad(tensor_parallel.loss_fn)(sharded, tensor_parallel.tokens())
        updates, state = jax.jit(optimizer.update)(result.grads, state, sharded)
        after = apply_updates(sharded, updates)
        recorder.step(params=after, grads=result.grads, loss=result.losses, opt_state=state)
    found = Recording.open(tmp_path / "r")
    assert found.manifest.world_size == 2
    for name, rank in product(("embed", "head"), range(2)):
        np.testing.assert_array_equal(found.unsharded(0, rank, name), tensor_parallel.params()[name])
    grads, after = unshard(result.grads), unshard(after)
    for name in ("up", "down", "scale"):
        for layer in range(tensor_parallel.LAYERS):
            called, last, grad = f"blocks.{layer}.{name}", after["blocks"][name][layer], grads["blocks"][name][layer]
            np.testing.assert_array_equal(found.full("update", 0, called), last)
            np.testing.assert_array_equal(found.full("reduce", 0, called), grad)
            moment = found.full("state", 0, called, use="exp_avg")
            np.testing.assert_allclose(moment, 0.1 * np.asarray(grad), rtol=45 * EPS, atol=EPS)


def telling(params, batch):
    tell("", "input", batch)
    hidden = jnp.tanh(batch["x"] @ params["inp"]["kernel"] + params["inp"]["bias"])
    for i, block in enumerate(params["blocks"]):
        tell(f"blocks.{i}", "input", hidden)
        hidden = hidden + jnp.tanh(hidden @ block["kernel"] + block["bias"])
        tell(f"blocks.{i}", "output", hidden)
    tell("", "output", hidden)
    return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - batch["y"]) ** 2) / 2


def test_microbatches_are_of_the_same_samples_on_any_number_of_ranks(tmp_path):
    """A rank has a part of each microbatch: not the first rows of the batch that the loop divides."""
    found = []
    for ranks in (1, 2):
        sharded = sharded_small(ranks)
        with Recorder(tmp_path / str(ranks), sharded, **TOLD | {"steps": 1}) as recorder:
            step = recorder.value_and_grad(telling)
            batch = small_batch(8, seed=0)
            parts = [jax.tree.map(lambda leaf, at=at: leaf[at : at + 4], batch) for at in (0, 4)]
            results = [step(sharded, part) for part in parts]
            grads = jax.tree.map(lambda first, second: (first + second) / 2, *(result.grads for result in results))
            loss = sum(result.losses for result in results) / 2
            recorder.step(params=sharded, grads=grads, loss=loss, batch=batch)
        found.append(Recording.open(tmp_path / str(ranks)))
    verdict = compare(*found)
    assert verdict.verdict in (Verdict.EQUAL, Verdict.ROUNDING), verdict.reason
    assert not verdict.notes  # of activations that differ


def assert_within_bounds(found, right):
    """As near as the contract asks of float32."""
    assert distance(found, right) <= bounds_for("float32").parameter * norm(right)


def test_what_is_inside_of_a_dense_step_is_each_ranks_own(tmp_path):
    sharded = sharded_small(mp_policy=PrecisionPolicy("float32", reduce_dtype=WIDE))
    with Recorder(tmp_path / "r", sharded, **TOLD) as recorder:
        _, _, result = train(recorder, sharded, telling, microbatches=2)
    assert result.local_grads is None and result.aux is None  # which nobody asked for
    found, right = Recording.open(tmp_path / "r"), canonical(small_params())
    names = [("", "input"), *((f"blocks.{i}", use) for i in (0, 1) for use in ("input", "output")), ("", "output")]
    assert found.activations(0) == [(microbatch, *name) for microbatch in (0, 1) for name in names]
    assert found.activations(2) == [] and found.manifest.dtype == "float32"
    batch, low = small_batch(8, seed=0), jax.tree.map(lambda leaf: jnp.asarray(leaf, "float32"), small_params())
    for rank in (0, 1):
        mine = jax.tree.map(lambda leaf, rank=rank: jnp.asarray(leaf[4 * rank : 4 * rank + 4], "float32"), batch)
        np.testing.assert_array_equal(found.activation(0, rank, 1, "", "input"), mine["x"])
        grads = canonical(jax.grad(telling)(low, mine))
        hidden = jnp.tanh(mine["x"] @ low["inp"]["kernel"] + low["inp"]["bias"])
        assert_within_bounds(found.activation(0, rank, 0, "blocks.0", "input"), hidden)
        for name, value in right.items():
            own = found.unsharded(0, rank, name)
            assert own.dtype == np.float32
            np.testing.assert_array_equal(own, value.astype("float32"))
            # Two microbatches of the same.
            assert_within_bounds(found.local(0, rank, name), 2 * grads[name])
    events = found.collectives(3, 1)
    assert {event.microbatch for event in events} == {0, 1} and {event.kind for event in events} == {
        "all_gather",
        "reduce_scatter",
    }
    assert {event.microbatch for event in events if event.kind == "reduce_scatter"} == {1}


@pytest.mark.parametrize(
    ("weights", "factors"),
    [
        pytest.param((1.0, 1.0), (1.0, 1.0), id="sum"),
        pytest.param((0.5, 0.5), (0.5, 0.5), id="mean", marks=pytest.mark.exhaustive),
        pytest.param((0.7, 0.3), None, id="other weights"),
    ],
)
def test_gradients_of_ranks_are_combined_as_the_loop_combines_calls(tmp_path, weights, factors):
    sharded, batches = sharded_small(), [small_batch(8, seed=seed) for seed in (0, 1)]
    with Recorder(tmp_path / "r", sharded, **(TOLD | {"steps": 1})) as recorder:
        step = recorder.value_and_grad(small_loss)
        results = [step(sharded, batch) for batch in batches]
        grads = jax.tree.map(
            lambda *each: sum(w * g for w, g in zip(weights, each, strict=True)), *(r.grads for r in results)
        )
        recorder.step(loss=results[0].loss, params=sharded, grads=grads)
    found = Recording.open(tmp_path / "r")
    for rank in (0, 1):
        own = [
            canonical(
                jax.grad(small_loss)(small_params(), jax.tree.map(lambda leaf, at=4 * rank: leaf[at : at + 4], batch))
            )
            for batch in batches
        ]
        for name in own[0]:
            if factors is None:
                assert not found.has("backward", 0, name)
            else:
                expected = sum(factor * grads[name] for factor, grads in zip(factors, own, strict=True))
                assert distance(found.local(0, rank, name), expected) <= 1e-12 * norm(expected)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("has_aux", [False, True])
def test_an_observed_loss_returns_its_interior_as_aux(has_state, has_aux):
    params, state, aux = {"a": [jnp.arange(2.0)]}, {"count": jnp.int32(3)}, jnp.ones(2)

    def loss(params, batch, **given):
        tell("m", "output", params["a"][0] * 2)
        found = params["a"][0].sum()
        after = {"count": given["state"]["count"] + 1} if has_state else None
        return LossOutput(found, aux if has_aux else None, after) if has_state or has_aux else found

    observed = ObservedLoss(loss)
    found, (own, interior), after, weight = observed(params, state if has_state else None, 0, None)
    assert found == 1.0 and weight is None
    assert after["count"] == 4 if has_state else after is None
    assert own is (aux if has_aux else None)
    assert list(interior.params) == ["a.0"] and interior.activations.names == (("m", "output"),)
    np.testing.assert_array_equal(interior.activations.values[0], [0.0, 2.0])


def test_perturbed_runs_share_one_program(tmp_path):
    sharded, traces = sharded_small(), []

    def loss(params, batch):
        traces.append(None)
        return small_loss(params, batch)

    losses = []
    for perturbed_run in (1, 2):
        with Recorder(tmp_path / "r", sharded, **dict(TOLD, dense=0, steps=1, perturbed_run=perturbed_run)) as recorder:
            step = recorder.value_and_grad(loss)
            result = step(sharded, small_batch(8))
            recorder.step(params=sharded, loss=result.losses)
            losses.append((float(result.loss), len(traces)))
    (first, traced), (second, again) = losses
    assert first != second and traced == again


def test_a_manifest_of_other_units_raises(tmp_path):
    sharded = sharded_small()
    with Recorder(tmp_path / "r", sharded, steps=1) as recorder:
        recorder.step(params=sharded, loss=0.0)
    manifest = Recording.open(tmp_path / "r").manifest
    with pytest.raises(UsageError, match="expected the units and layouts of the parameters"):
        Recorder(tmp_path / "r", sharded_small(3), manifest=manifest)


@pytest.mark.exhaustive
def test_a_fault_inside_is_found_where_it_begins(tmp_path):
    def faulty(params, batch):
        wrong = params["blocks"][1]["kernel"] * 1.1
        return telling({**params, "blocks": [params["blocks"][0], {**params["blocks"][1], "kernel": wrong}]}, batch)

    for name, loss in (("right", telling), ("wrong", faulty)):
        sharded = sharded_small()
        with Recorder(tmp_path / name, sharded, **{**TOLD, "steps": 1}) as recorder:
            train(recorder, sharded, loss, steps=1)
    verdict = compare(*(Recording.open(tmp_path / name) for name in ("right", "wrong")))
    first = verdict.first_divergence
    assert verdict.verdict is Verdict.BUG and first is not None
    assert (first.step, first.phase, first.event, first.unit) == (0, "forward", "output", "blocks.1"), verdict.reason


@pytest.mark.exhaustive
def test_layers_of_a_stacked_unit_are_recorded_one_by_one(tmp_path, one_device):
    params = small_params()
    stacked = {**params, "blocks": jax.tree.map(lambda *layers: np.stack(layers), *params["blocks"])}
    entries = [entry for entry in small_map().entries if not entry.name.startswith("blocks")]
    blocks = MapEntry("blocks.weight", "blocks.kernel", "i o -> o i"), MapEntry("blocks.bias", "blocks.bias")

    def loss(params, batch):
        hidden = jnp.tanh(batch["x"] @ params["inp"]["kernel"] + params["inp"]["bias"])

        def layer(hidden, block, _):
            return hidden + jnp.tanh(hidden @ block["kernel"] + block["bias"]), None

        hidden, _ = scan(layer, hidden, params["blocks"])
        return jnp.mean((hidden @ params["out"]["kernel"] + params["out"]["bias"] - batch["y"]) ** 2)

    mesh = make_mesh(MeshSpec(2), jax.devices("cpu"))
    for layout in ("flat", "per_param"):
        sharded = shard(stacked, mesh, stacked=("blocks",), param_map=ParamMap((*entries, *blocks)), layout=layout)
        with Recorder(tmp_path / layout, sharded, **TOLD) as recorder:
            train(recorder, sharded, loss)
        found = Recording.open(tmp_path / layout)
        assert [unit for unit, _ in found.manifest.units] == ["", "blocks.0", "blocks.1"]
        verdict = compare(one_device, found)
        assert verdict.verdict is Verdict.ROUNDING, (layout, verdict.reason)
        assert found.count(0, "blocks.1.weight") == 1.0
        before, after = ShardPieces(sharded), ShardPieces(sharded).moved(sharded, 1)
        for rank, by_unit in before.pieces(sharded).items():
            for unit, pieces in by_unit.items():
                for name, (start, _, values) in pieces.items():
                    np.testing.assert_array_equal(
                        before.pieces(after)[rank][unit][name][2], perturbed_values(name, values, 1, start)
                    )


@pytest.mark.exhaustive
def test_perturbed_runs_of_shards_are_moved_in_canonical_order_and_round_otherwise(tmp_path):
    runs = []
    for perturbed_run in (0, 1):
        sharded = sharded_small(dtype="float32")
        with Recorder(tmp_path / "r", sharded, perturbed_run=perturbed_run, **{**TOLD, "steps": 1}) as recorder:
            train(recorder, recorder.params, small_loss, steps=1)
        runs.append(Recording.open(tmp_path / "r" / f"twin{perturbed_run:05d}" if perturbed_run else tmp_path / "r"))
    run, perturbed_run = runs
    assert [each.directory for each in run.perturbed_runs()] == [perturbed_run.directory]
    for name in run.manifest.params:
        wanted = perturbed_values(name, run.full("parameters", 0, name), 1)
        np.testing.assert_array_equal(perturbed_run.full("parameters", 0, name), wanted)
    assert not (run.losses() == perturbed_run.losses()).all()
    np.testing.assert_allclose(run.losses(), perturbed_run.losses(), rtol=bounds_for("float32").loss)


@pytest.mark.parametrize("replicate", [1, 2])
def test_what_is_cut_on_another_dim_is_recorded_by_rows(tmp_path, replicate):
    w, b = wide((np.arange(24.0).reshape(4, 6), np.arange(5.0)))
    mesh = make_mesh(MeshSpec(2, replicate), jax.devices("cpu"))
    sharded = shard({"w": w, "b": b}, mesh, layout="per_param", dims=lambda spec: len(spec.shape) - 1)
    tx = sharded_optimizer(optax.sgd(0.1, momentum=0.9))
    _, state = jax.jit(tx.update)(sharded, tx.init(sharded))
    with Recorder(tmp_path / "r", sharded) as recorder:
        recorder.step(params=sharded, grads=sharded, opt_state=state, loss=np.ones(mesh.size))
    found = Recording.open(tmp_path / "r")
    assert found.ranges("update", 0, "w")[1].start == 12
    for replica in range(replicate):
        for at in (("parameters", ""), ("reduce", ""), ("state", "momentum_buffer"), ("update", "")):
            for name, value in (("w", w), ("b", b)):
                np.testing.assert_array_equal(found.full(at[0], 0, name, use=at[1], replica=replica), value)


def test_what_does_not_fit_sharded_params_is_refused(tmp_path):
    sharded = sharded_small()
    with pytest.raises(UsageError, match="units: expected None with ShardedParams"):
        Recorder(tmp_path / "r", sharded, units=["inp"])
    step = Recorder(tmp_path / "r", sharded).value_and_grad(small_loss)
    with pytest.raises(UsageError, match="expected arrays, got tracers"):
        jax.jit(step)(sharded, small_batch(8))

"""Loops of others, recorded: what each rank held, against what the loop itself computed; and verdicts on pairs of them."""

# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportIndexIssue=false, reportOptionalSubscript=false
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from crossframe.errors import RecordingError, UsageError
from crossframe.mesh import MeshSpec
from crossframe.param_map import MapEntry, ParamMap
from crossframe.recording import Batch, Recording
from crossframe.recording.batches import digest_of, inputs_of, row_ids
from crossframe.recording.dims import Order
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from jax_backend import Recorder
from jax_backend.recorder._modules import Dims, module_paths
from jax_backend.recorder._params_as_arrays import state_by_path
from tests.on_jax.helpers.recorded_loops import mesh_of, placed, record
from tests.on_jax.helpers.small import canonical, small_batch, small_loss, small_map, small_params, wide


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return record(tmp_path_factory.mktemp("recorded") / "one", param_map=small_map())


@pytest.mark.parametrize(
    ("axes", "spec", "strategy"),
    [
        ({"fsdp": 2}, MeshSpec(2), "full_shard"),
        ({"data": 2}, MeshSpec(1, replicate=2), "no_shard"),
        ({"fsdp": 2, "data": 2}, MeshSpec(2, replicate=2), "hybrid_shard"),
    ],
)
def test_a_hand_written_loop_is_rounding_away_from_one_device_on_any_mesh(tmp_path, one_device, axes, spec, strategy):
    found = record(tmp_path / "found", mesh_of(**axes), param_map=small_map())
    assert (found.manifest.mesh, found.manifest.strategy) == (spec, strategy)
    assert [unit for unit, _ in found.manifest.units] == ["", "blocks.0", "blocks.1"]
    verdict = compare(one_device, found)
    assert verdict.verdict in (Verdict.EQUAL, Verdict.ROUNDING), verdict.reason
    settings = found.manifest.settings
    assert settings["recorded"] == ["batch", "gradient norm", "gradients", "optimizer state"]
    assert settings["losses"] == "mean"
    assert found.recorded_steps() == (0, 2, 4) and found.activations(0) == []


def test_stacked_layers_are_recorded_one_by_one_in_canonical_names(tmp_path):
    params = wide({"h": {"w": np.arange(24.0).reshape(2, 3, 4)}, "v": np.arange(1.0, 7.0)})
    entries = [MapEntry(f"h.{i}.w", "h.w", f"[{i}/2] i o -> o i") for i in range(2)]
    portions = ParamMap((*entries, MapEntry("v", "v", "v[0:5/6] -> v")))
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.update(params, optimizer.init(params), params)[1]
    for number in (0, 1):
        with Recorder(tmp_path, params, param_map=portions, perturbed_run=number) as recorder:
            initial = jax.tree.map(np.asarray, recorder.params)
            recorder.step(loss=1.0, params=params, grads=params, opt_state=opt_state, batch={"x": np.ones(2)})
    run = Recording.open(tmp_path)
    for i in range(2):
        assert np.array_equal(run.full("parameters", 0, f"h.{i}.w"), params["h"]["w"][i].T)
        assert np.array_equal(run.full("state", 0, f"h.{i}.w", use="exp_avg"), opt_state[0].mu["h"]["w"][i].T)
        assert run.count(0, f"h.{i}.w") == 1.0
    assert run.full("reduce", 0, "v").tolist() == [1, 2, 3, 4, 5]
    # A perturbed run leaves the padding as it was.
    assert initial["v"][5] == 6.0 and (initial["h"]["w"] != params["h"]["w"]).mean() > 0.5
    found = run.perturbed_runs()[0].full("parameters", 0, "h.1.w")
    assert np.array_equal(found, initial["h"]["w"][1].T)


@pytest.mark.exhaustive
def test_a_fault_in_fsdp_by_hand_is_a_bug_and_where_it_begins_is_said(tmp_path, one_device):
    def fault(grads):
        grads["blocks"][1]["kernel"] = grads["blocks"][1]["kernel"] * 2
        return grads

    found = compare(one_device, record(tmp_path / "bad", mesh_of(fsdp=2), fault=fault, param_map=small_map()))
    assert found.verdict is Verdict.BUG
    first = found.first_divergence
    where = (first.step, first.phase, first.unit, first.parameter)
    assert where == (0, "reduce", "blocks.1", "blocks.1.weight"), found.reason
    # A step that says nothing of its gradients still shows it, in what it updates.
    silent = {"told": False, "param_map": small_map()}
    found = compare(
        record(tmp_path / "right", told=False, param_map=small_map()),
        record(tmp_path / "silent", mesh_of(fsdp=2), fault=fault, **silent),
    )
    assert found.verdict is Verdict.BUG and found.first_divergence.phase == "state", found.reason


def test_what_is_recorded_is_what_the_loop_had(tmp_path):
    """In canonical names and axes; the loop gives its arrays away to each step."""
    tx, mesh = optax.adamw(1e-2), mesh_of(fsdp=2)
    params = placed(small_params(), mesh)
    opt_state, wanted = tx.init(params), []

    @jax.jit
    def gradients(params, batch):
        return jax.value_and_grad(small_loss)(params, batch)

    update = jax.jit(
        lambda params, opt_state, grads: (lambda u, s: (optax.apply_updates(params, u), s))(
            *tx.update(grads, opt_state, params)
        ),
        donate_argnums=(0, 1),
    )
    with Recorder(tmp_path / "r", params, param_map=small_map(), dense=2, name="small", seed=7, terms=3) as recorder:
        wanted.append(canonical(jax.tree.map(np.array, params)))
        for i in range(2):
            loss, grads = gradients(params, small_batch(8, seed=i))
            params, opt_state = update(params, opt_state, grads)
            recorder.step(params=params, grads=grads, loss=loss, opt_state=opt_state, batch=small_batch(8, seed=i))
            wanted.append(
                [canonical(jax.tree.map(np.array, each)) for each in (grads, opt_state[0].mu, opt_state[0].nu, params)]
            )
    found = Recording.open(tmp_path / "r")
    assert (found.manifest.model, found.manifest.seed, found.manifest.terms, found.manifest.steps) == (
        "small",
        7,
        3,
        None,
    )
    for name in found.manifest.params:
        np.testing.assert_array_equal(found.full("parameters", 0, name), wanted[0][name])
        assert found.state_slots(1, name) == ("exp_avg", "exp_avg_sq") and found.count(1, name) == 2.0
        for step in (0, 1):
            grads, mu, nu, after = wanted[1 + step]
            np.testing.assert_array_equal(found.full("reduce", step, name), grads[name])
            np.testing.assert_array_equal(found.full("state", step, name, use="exp_avg"), mu[name])
            np.testing.assert_array_equal(found.full("state", step, name, use="exp_avg_sq"), nu[name])
            np.testing.assert_array_equal(found.full("update", step, name), after[name])
    assert found.ranges("update", 0, "blocks.0.weight")[1].start == 15  # 3 of 5 rows lie on the first rank


def test_a_rank_tells_what_its_own_device_holds(tmp_path):
    """Of a parameter that is whole on each device, devices that have parted are seen."""
    mesh = mesh_of(fsdp=2)
    whole = NamedSharding(mesh, P())
    values = [np.arange(4.0), np.arange(4.0) + 10]
    parted = jax.make_array_from_single_device_arrays(
        (4,), whole, [jax.device_put(v, d) for v, d in zip(values, mesh.devices.flat, strict=True)]
    )
    cut = jax.device_put(np.arange(6.0).reshape(2, 3), NamedSharding(mesh, P(None)))
    columns = jax.device_put(np.arange(8.0).reshape(2, 4), NamedSharding(mesh, P(None, "fsdp")))
    params = {"w": parted, "v": cut, "c": columns}
    with Recorder(tmp_path / "r", params) as recorder:
        recorder.step(params=params, loss=1.0)
    found = Recording.open(tmp_path / "r")
    np.testing.assert_array_equal(found.full("update", 0, "w"), [0, 1, 12, 13])
    # What is cut along other dims is put together, and cut by rows.
    np.testing.assert_array_equal(found.full("update", 0, "c"), columns)
    np.testing.assert_array_equal(found.full("update", 0, "v"), cut)


def test_a_rank_tells_its_own_part_of_what_others_have_copies_of_too(tmp_path):
    """Two axes that each cut another parameter: all four devices share one copy of the model, and hold halves of each twice."""
    mesh = mesh_of(a=2, b=2)
    parts = [jax.device_put(np.arange(4.0) + 10 * i, device) for i, device in enumerate(mesh.devices.flat)]
    u = jax.make_array_from_single_device_arrays((8,), NamedSharding(mesh, P("a")), parts)
    v = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("b")))
    with Recorder(tmp_path / "r", {"u": u, "v": v}) as recorder:
        recorder.step(params={"u": u, "v": v}, loss=1.0)
    found = Recording.open(tmp_path / "r")
    assert found.manifest.mesh == MeshSpec(4)
    # Ranks 0 and 1 have the first half, each as its own device has it; 2 and 3 the second.
    assert found.full("update", 0, "u").tolist() == [0, 1, 12, 13, 20, 21, 32, 33]
    assert found.full("update", 0, "v").tolist() == list(range(8))


def test_each_replica_tells_its_own_copy(tmp_path):
    mesh = mesh_of(data=2, fsdp=2)
    parts = [jax.device_put(np.full(2, 10.0 * i), device) for i, device in enumerate(mesh.devices.flat)]
    w = jax.make_array_from_single_device_arrays((4,), NamedSharding(mesh, P("fsdp")), parts)
    with Recorder(tmp_path / "r", {"w": w}) as recorder:
        recorder.step(params={"w": w}, loss=np.arange(4.0))
    found = Recording.open(tmp_path / "r")
    assert found.full("update", 0, "w").tolist() == [0, 0, 10, 10]
    assert found.full("update", 0, "w", replica=1).tolist() == [20, 20, 30, 30]
    assert found.losses().tolist() == [[0, 1, 2, 3]] and found.manifest.settings["losses"] == "by rank"


def test_batches_are_known_by_their_values_and_ranks_by_their_samples(tmp_path, one_device):
    found = record(tmp_path / "r", mesh_of(fsdp=2), samples=lambda batch: batch["x"])
    x = small_batch(8, seed=0)["x"]
    assert found.batch(0, 1) == Batch(digest_of([x[4:]]), row_ids([x[4:]]), inputs_of([[x[4:]]]))
    both = small_batch(8, seed=0)
    own = [both["x"], both["y"]]
    assert one_device.batch(0, 0) == Batch(digest_of(own), row_ids(own), inputs_of([own]))
    mesh = mesh_of(fsdp=2)
    turned = Mesh(mesh.devices[::-1], mesh.axis_names)  # the first rank's device holds the second half
    cut = jax.device_put(x, NamedSharding(turned, P("fsdp")))
    own = [Batch("0" * 64, (1, 2)), Batch("1" * 64, (3,))]
    params = placed(small_params(), mesh)
    with Recorder(tmp_path / "given", params, every=1) as recorder:
        recorder.step(params=params, loss=1.0, batch={"x": cut})
        recorder.step(params=params, loss=1.0, batch=own)
        recorder.step(params=params, loss=1.0)
    found = Recording.open(tmp_path / "given")
    assert [found.batch(0, rank).sample_ids for rank in (0, 1)] == [row_ids([x[4:]]), row_ids([x[:4]])]
    assert [found.batch(1, rank) for rank in (0, 1)] == own
    assert found.batch(2, 0).sample_ids == ()


def test_steps_between_recorded_ones_hold_loss_and_batch_and_a_window_opens_on_demand(tmp_path):
    params = {"w": jnp.ones(3)}
    with Recorder(tmp_path / "r", params, every=4, dense=1, windows=[(2, 3)]) as recorder:
        for i in range(10):
            if i == 5:
                recorder.open_window(2)
            recorder.step(
                params={"w": params["w"] * i},
                loss=jnp.asarray(float(i)),
                grad_norm=jnp.asarray(10.0 * i),
                batch=np.full(2, i),
            )
    found = Recording.open(tmp_path / "r")
    assert found.recorded_steps() == (0, 2, 4, 5, 6, 8)
    assert found.losses()[:, 0].tolist() == list(range(10))
    assert [found.grad_norm(i, 0) for i in range(10)] == [10.0 * i for i in range(10)]
    assert found.batch(9, 0).digest == digest_of([np.full(2, 9)])
    assert found.full("update", 6, "w").tolist() == [6.0] * 3


def test_large_models_are_sketched_and_small_tensors_of_them_are_whole(tmp_path):
    params = {"large": jnp.asarray(np.random.default_rng(0).normal(size=2000)), "small": jnp.arange(4.0)}
    for folder, detail in (("sketch", "sketch"), ("full", "auto")):
        with Recorder(tmp_path / folder, params, detail=detail) as recorder:
            recorder.step(params=params, loss=1.0)
    sketched, full = (Recording.open(tmp_path / folder) for folder in ("sketch", "full"))
    assert (sketched.manifest.detail, full.manifest.detail) == ("sketch", "full")
    for phase in ("parameters", "update"):
        assert sketched.sketch(phase, 0, "large").equals(full.sketch(phase, 0, "large"))
    np.testing.assert_array_equal(sketched.full("update", 0, "small"), params["small"])


def test_perturbed_runs_begin_and_round_otherwise_and_lie_inside_of_the_run(tmp_path):
    """A loop that is wrapped: whatever it begins with, and wherever XLA would leave its results."""
    mesh = mesh_of(fsdp=2)
    params = {"w": np.random.default_rng(0).normal(size=(4, 3)).astype("float32"), "b": np.ones(3, "float32")}
    start, x = placed(params, mesh), np.random.default_rng(1).normal(size=(8, 4)).astype("float32")

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.tanh(batch @ p["w"] + p["b"]).sum())(params)
        return jax.tree.map(lambda p, g: p - 0.0 * g, params, grads), opt_state, loss, {"grads": grads}

    for perturbed_run in (0, 1, 2):
        with Recorder(tmp_path / "run", start, perturbed_run=perturbed_run, steps=8, dense=3) as recorder:
            wrapped, after = recorder.wrap(step), start
            for i in range(8):  # a loss alone may be equal by chance
                after, *_ = wrapped(after, (), x + i)
            assert jax.tree.map(lambda leaf: leaf.sharding, after) == jax.tree.map(lambda leaf: leaf.sharding, start)
    run = Recording.open(tmp_path / "run")
    perturbed_runs = run.perturbed_runs()
    assert [perturbed_run.manifest.settings["perturbed_run"] for perturbed_run in perturbed_runs] == [1, 2]
    for i, perturbed_run in enumerate(perturbed_runs, 1):
        assert perturbed_run.manifest.mesh == run.manifest.mesh
        for name in params:
            for phase in ("parameters", "update"):  # which leaves them as they were
                np.testing.assert_array_equal(
                    perturbed_run.full(phase, 0, name), perturbed_values(name, params[name], i)
                )
        assert not (perturbed_run.losses() == run.losses()).all()
        np.testing.assert_allclose(perturbed_run.losses(), run.losses(), rtol=bounds_for("float32").loss)
    assert not (perturbed_runs[0].losses() == perturbed_runs[1].losses()).all()


def test_the_environment_says_which_perturbed_run_a_run_is(tmp_path, monkeypatch):
    monkeypatch.setenv("CROSSFRAME_PERTURBED_RUN", "3")
    recorder = Recorder(tmp_path / "r", {"w": jnp.ones(4)})
    assert not (np.asarray(recorder.params["w"]) == 1).any()
    monkeypatch.setenv("CROSSFRAME_PERTURBED_RUN", "first")
    with pytest.raises(
        UsageError, match="CROSSFRAME_PERTURBED_RUN: expected 0, or the number of a perturbed run, got 'first'"
    ):
        Recorder(tmp_path / "r", {"w": jnp.ones(4)})


def test_state_is_found_by_the_path_of_its_parameter_under_the_name_that_torch_has():
    params = wide({"a": {"w": np.ones((2, 3)), "b": np.ones(3)}, "c": np.ones(3)})
    paths = {"a.w": (2, 3), "a.b": (3,), "c": (3,)}

    def found(tx):
        return state_by_path(tx.init(params), lambda path, leaf: leaf if np.shape(leaf) == paths[path] else None, paths)

    slots, counts = found(optax.sgd(0.1, momentum=0.9))
    assert {slot: sorted(of) for slot, of in slots.items()} == {"momentum_buffer": sorted(paths)} and counts == {}
    # Two groups: each parameter has one Adam, whichever it is; what is masked has none.
    labels = {"a": {"w": "x", "b": "y"}, "c": "z"}
    groups = optax.multi_transform({"x": optax.adam(1.0), "y": optax.adamw(1.0), "z": optax.identity()}, labels)
    slots, counts = found(groups)
    assert {slot: sorted(of) for slot, of in slots.items()} == {
        "exp_avg": ["a.b", "a.w"],
        "exp_avg_sq": ["a.b", "a.w"],
    }
    assert counts == {"a.w": 0.0, "a.b": 0.0}
    # Twice the same kind for one parameter, and a kind that torch has not: by their own paths.
    slots, _ = found(optax.chain(optax.trace(0.9), optax.trace(0.5), optax.ema(0.9)))
    assert set(slots) == {"momentum_buffer", "1.trace", "2.ema"}


def test_modules_are_found_by_the_names_of_their_parameters():
    from crossframe.param_map import ParamMap, attention, conv, from_heads, linear, to_heads

    table = ParamMap.of(
        attention("layers.0.attn", "blocks.0.attn", 4),
        linear("layers.0.fc", "blocks.0.fc"),
        conv("stem", "first"),
        to_heads("q", "q", 4),
        from_heads("o", "o", 4),
    )
    assert module_paths(table, ["layers.0"]) == {
        "": "",
        "layers.0": "blocks.0",
        "layers.0.attn.out_proj": "blocks.0.attn.out",
        "layers.0.fc": "blocks.0.fc",
        "stem": "first",
        "q": "q",
        "o": "o",
    }
    array, tokens = np.arange(48.0).reshape(2, 3, 2, 4), np.ones((2, 3, 8))
    joined, moved = array.reshape(2, 3, 8), array.transpose(0, 3, 1, 2)

    def assert_canonical(dims, module, use, given, wanted, order):
        found = dims.canonical(module, use, given)
        np.testing.assert_array_equal(found, wanted)
        assert dims.order(module, use, found) is order, (module, use)

    dims, stated = Dims(table), Dims(table, ["layers.0.fc", ("q_norm", "input")])
    for module, use, given, wanted, order in [
        ("q", "output", array, joined, Order.TORCH),
        ("o", "input", array, joined, Order.TORCH),
        ("stem", "output", array, array, Order.CONVOLUTION),
        ("stem", "output", tokens, tokens, Order.TORCH),
        ("q_norm", "input", array, array, Order.UNSTATED),
        ("layers.0.fc", "output", tokens, tokens, Order.TORCH),
    ]:
        assert_canonical(dims, module, use, given, wanted, order)
    for module, use, given, wanted in [
        ("q", "output", array, joined),
        ("layers.0.fc", "output", array, moved),
        ("layers.0.fc", "output", tokens[0], tokens[0]),
        ("q_norm", "input", array, moved),
        ("q_norm", "output", array, array),
        ("stem", "output", array, array),
    ]:
        assert_canonical(stated, module, use, given, wanted, Order.TORCH)
    sequences = Dims(ParamMap.of(conv("stem", "first", dims=1)))
    assert sequences.order("stem", "input", tokens) is Order.CONVOLUTION
    assert sequences.order("norm", "input", tokens) is Order.UNSTATED


def test_what_cannot_be_recorded_is_refused_by_name(tmp_path):
    params = {"w": jnp.ones(2)}
    refused = [
        (
            lambda: Recorder(tmp_path / "r", {"n": jnp.arange(3)}),
            UsageError,
            "expected a pytree of floating arrays, got {'n'",
        ),
        (lambda: Recorder(tmp_path / "r", {}), UsageError, "floating arrays, got none"),
        (lambda: Recorder(tmp_path / "r", params, detail="some"), UsageError, "detail: expected 'auto'"),
        (lambda: Recorder(tmp_path / "r", params, units=["x"]), UsageError, r"units: .* \['x'\] own none"),
        (lambda: Recorder(tmp_path / "r", params, mesh=2), UsageError, "mesh: expected a jax Mesh"),
        (lambda: Recorder(tmp_path / "r", params, channels_last="norm"), UsageError, "channels_last: .* got 'norm'"),
        (
            lambda: Recorder(tmp_path / "r", params, channels_last=[("norm", "in")]),
            UsageError,
            "channels_last: .* or .name, 'input' or 'output'",
        ),
        (lambda: Recorder(tmp_path / "r", params).open_window(0), UsageError, "open_window: .* got 0"),
        (
            lambda: Recorder(tmp_path / "r", params).value_and_grad(small_loss),
            UsageError,
            "expected a Recorder of ShardedParams",
        ),
    ]
    for call, kind, message in refused:
        with pytest.raises(kind, match=message):
            call()
    with Recorder(tmp_path / "r", params) as recorder:
        for call, message in [
            (lambda: recorder.step(params=params, loss=np.ones(3)), r"loss: .* got shape \(3,\)"),
            (lambda: jax.jit(lambda p: recorder.step(params=p, loss=1.0))(params), r"got tracers in \['params'\]"),
            (
                lambda: recorder.step(params=params, loss=1.0, batch=[Batch("0" * 64, ())] * 2),
                "one for each of 1 ranks of this process",
            ),
            (
                lambda: recorder.wrap(lambda *args: 3)(params, (), ()),
                r"returns \(params, opt_state, loss\), .* got int",
            ),
            (lambda: recorder.wrap(lambda p, s, b: (p, s, 1.0, {"gradients": p}))(params, (), ()), "keys among"),
        ]:
            with pytest.raises(UsageError, match=message):
                call()
        recorder.step(params=params, loss=1.0)
    with pytest.raises(RecordingError, match="the recording is closed"):
        recorder.step(params=params, loss=1.0)
    with pytest.raises(RecordingError, match="not empty"), Recorder(tmp_path / "r", params):
        pass
    with pytest.raises(RecordingError, match="no step was recorded"), Recorder(tmp_path / "none", params):
        pass


def test_a_loss_of_one_element_is_the_mean_over_ranks(tmp_path):
    params = {"w": jax.device_put(np.arange(4.0), NamedSharding(mesh_of(fsdp=2), P("fsdp")))}
    with Recorder(tmp_path / "r", params) as recorder:
        recorder.step(params=params, loss=jnp.full((1,), 2.5))
    found = Recording.open(tmp_path / "r")
    assert found.losses().tolist() == [[2.5, 2.5]] and found.manifest.settings["losses"] == "mean"


def test_a_loop_that_fails_leaves_a_recording_without_its_end(tmp_path):
    params = {"w": jnp.ones(2)}
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path / "r", params) as recorder:
        recorder.step(params=params, loss=1.0)
        raise ZeroDivisionError
    with pytest.raises(RecordingError, match="cut off"):
        Recording.open(tmp_path / "r")
    assert Recording.open(tmp_path / "r", partial=True).num_steps == 1

"""Scripts and loops that only call a model: each call is a step, with the bits that it has without a recorder."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import crossframe.scripts
from crossframe.errors import UsageError
from crossframe.mesh import MeshSpec
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS
from crossframe.scripts import NOT_RECORDED
from crossframe.verdict import Verdict, compare
from jax_backend import Recorder, make_mesh, shard
from jax_backend.activations import tell
from jax_backend.recorder import script
from tests.on_jax.helpers.scripts import TIED

HEAD = """
import jax, jax.numpy as jnp, numpy as np
rng = np.random.default_rng(0)
batches = [rng.normal(size=(4, 6)).astype(np.float32) for _ in range(3)]
"""
LINEN = """
from flax import linen as nn
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(5)(x))
        x = nn.Dropout(0.1, deterministic=not train)(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(6)(x)
net = Net()
variables = net.init(jax.random.key(0), batches[0])
"""
NNX = """
from flax import nnx
class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(6, 5, rngs=rngs), nnx.Linear(5, 6, rngs=rngs)])
        self.scale = nnx.BatchStat(jnp.ones(5))
    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)) * self.scale[...])
net = Net(nnx.Rngs(0))
"""
EQUINOX = """
import equinox as eqx
class Net(eqx.Module):
    layers: list
    def __call__(self, x):
        return self.layers[1](jnp.tanh(self.layers[0](x)))
keys = jax.random.split(jax.random.key(0))
net = Net([eqx.nn.Linear(6, 5, key=keys[0]), eqx.nn.Linear(5, 6, key=keys[1])])
"""
CALL = "result = [run(batch) for batch in batches]\n"
CALLED = {
    "linen": LINEN + "run = lambda x: net.apply(variables, x)\n" + CALL,
    "linen_jit": LINEN + "apply = jax.jit(net.apply)\nrun = lambda x: jax.nn.log_softmax(apply(variables, x))\n" + CALL,
    "linen_mutable": LINEN
    + "run = jax.jit(lambda x: net.apply(variables, x, True, mutable=['batch_stats'], rngs={'dropout': jax.random.key(1)})[0])\n"
    + CALL,
    "nnx": NNX + "run = net\n" + CALL,
    "nnx_jit": NNX + "logp = nnx.jit(lambda net, x: jax.nn.log_softmax(net(x)))\nrun = lambda x: logp(net, x)\n" + CALL,
    "equinox": EQUINOX + "run = jax.vmap(net)\n" + CALL,
    "equinox_jit": EQUINOX
    + "best = eqx.filter_jit(lambda net, x: jax.vmap(net)(x).argmax(-1))\nrun = lambda x: best(net, x)\n"
    + CALL,
    "scan": NNX
    + """
graph, state = nnx.split(net)
@jax.jit
def generate(state, x):
    return jax.lax.scan(lambda x, _: ((y := jnp.sin(nnx.merge(graph, state)(x)).astype(x.dtype)), y), x, None, length=3)[1]
result = generate(state, batches[0])
""",
    "scan_by_fori_loop": NNX
    + "graph, state = nnx.split(net)\n"
    + "body = lambda _, x: jnp.sin(nnx.merge(graph, state)(x)).astype(x.dtype)\n"
    + "result = jax.lax.fori_loop(0, 3, body, batches[0])\n",
}
"""Scripts that call a model three times."""
KINDS = ("linen", "linen_mutable", "nnx", "equinox", "scan")
LAYERS = {"layers.0", "layers.1"}
MODULES = {
    "linen": {"", "Dense_0", "BatchNorm_0", "Dropout_0", "Dense_1"},
    "nnx": {"", *LAYERS},
    "equinox": {"", *LAYERS},
}
WHILE = (
    NNX
    + """
def decode(x):
    body = lambda state: (state[0] + 1, net(state[1]).astype(x.dtype))
    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]
"""
)
REFUSED = {
    "while_loop": (WHILE + "decode(batches[0])\n", "where its values cannot leave"),
    # At the call, and not at the end of the script.
    "while_loop_jit": (WHILE + "jax.jit(decode)(batches[0])\nraise SystemError\n", "where its values cannot leave"),
    "functions": ("result = jnp.sin(batches[0])\n", "recorder.forward(model)"),
    "constant": (
        LINEN + "run = jax.jit(lambda x: net.apply(jax.tree.map(lambda p: 2 * p, variables), x).sum())\n" + CALL,
        None,
    ),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Record a script in this process into tmp_path / name; (exit status, the script's result, its variables)."""

    def run(text, name="out", **options):
        monkeypatch.setattr(sys, "argv", sys.argv)
        monkeypatch.setattr(sys, "path", [*sys.path])
        path, variables, own = tmp_path / "script.py", {}, crossframe.scripts.run_as_main
        path.write_text(HEAD + text)
        monkeypatch.setattr(crossframe.scripts, "run_as_main", lambda *of: variables.update(own(*of)))
        options = {"directory": str(tmp_path / name), "forward_only": True, "dense": 2} | options
        status = script.run([str(path)], **options)
        monkeypatch.setattr(crossframe.scripts, "run_as_main", own)
        return status, variables.get("result"), variables

    return run


def plain(text):
    variables = {"__name__": "__main__"}
    exec(compile(HEAD + text, "script.py", "exec"), variables)
    return variables["result"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in KINDS else pytest.mark.exhaustive) for name in CALLED]
)
def test_each_call_of_a_model_is_a_step_and_no_bit_changes(tmp_path, run, name):
    status, result, variables = run(CALLED[name])
    assert status == 0
    wanted = plain(CALLED[name])
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(result), strict=True))
    found = Recording.open(tmp_path / "out")
    assert found.num_steps == 3 and found.manifest.settings["forward_only"] is True
    assert {module for _, module, _ in found.activations(1)} == MODULES[name.split("_")[0].replace("scan", "nnx")]
    assert not found.activations(2)
    # The loss is that of the model's output, which the recording has.
    for step in (0, 1):
        output = found.activation(step, 0, 0, "", "output")
        assert found.losses()[step, 0] == pytest.approx(np.sqrt(np.mean(np.square(output))), rel=1e-6)
    given = found.activation(0, 0, 0, "", "input")
    assert np.array_equal(given, variables["batches"][0])
    assert found.manifest.settings["program"]["compiled"] is name.endswith(("scan", "_loop", "_jit", "_mutable"))
    assert len({found.batch(step, 0).digest for step in range(3)}) == 3


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_each_device_of_a_sharded_model_is_a_rank(tmp_path, run):
    text = (
        LINEN
        + """
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
put = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, P(*spec)))
variables = put(variables)
head = variables["params"]["Dense_1"]
head["kernel"] = put(head["kernel"], None, "data")
apply = jax.jit(net.apply)
result = [apply(variables, put(batch, "data")) for batch in batches]
"""
    )
    assert run(text)[0] == 0
    found = Recording.open(tmp_path / "out")
    assert found.manifest.world_size == 2
    whole = np.asarray(plain(CALLED["linen"])[0])
    for rank in (0, 1):
        own = found.activation(0, rank, 0, "", "output")
        np.testing.assert_allclose(own, whole[2 * rank : 2 * rank + 2], rtol=1e-5)


@pytest.mark.parametrize("apply", ["net.apply", "jax.jit(net.apply)"])
def test_a_module_that_a_model_applies_itself_is_part_of_it(tmp_path, run, apply):
    text = TIED + f"apply = {apply}\nresult = [apply(variables, batch) for batch in batches]\n"
    status, result, _ = run(text)
    assert status == 0
    found = Recording.open(tmp_path / "out")
    assert found.num_steps == 3 and {*found.manifest.params} == {"embed.embedding", "bias"}
    assert {module for _, module, _ in found.activations(0)} == {"", "embed", "head"}
    assert np.array_equal(found.activation(0, 0, 0, "", "output"), result[0])
    assert found.activation(0, 0, 0, "head", "output").shape == (4, 7)


def test_a_model_under_jit_and_outside_agrees_by_rounding_and_another_is_a_bug(tmp_path, run):
    other = CALLED["nnx"].replace("jnp.tanh(", "jnp.sinh(")
    for name, text in (("a", CALLED["nnx"]), ("b", CALLED["nnx_jit"]), ("c", other)):
        for perturbed_run in range(5):
            assert run(text, name, perturbed_run=perturbed_run, dense=3)[0] == 0
    a, b, c = (Recording.open(tmp_path / name) for name in "abc")
    assert compare(a, b).verdict in (Verdict.EQUAL, Verdict.ROUNDING)
    verdict = compare(a, c)
    assert verdict.verdict is Verdict.BUG
    assert (verdict.first_divergence.step, verdict.first_divergence.module) == (0, "layers.1")


def test_a_perturbed_run_has_other_parameters_at_every_call(tmp_path, run):
    """Also where the module gets new arrays from each call, as under nnx.jit."""
    text = CALLED["nnx_jit"].replace("batches]", "[batches[0]] * 3]")
    results = [run(text, perturbed_run=number)[1] for number in (0, 1)]
    original, perturbed = ([np.asarray(each) for each in result] for result in results)
    assert all(np.array_equal(perturbed[0], each) for each in perturbed[1:])
    assert not np.array_equal(original[0], perturbed[0])
    np.testing.assert_allclose(original[0], perturbed[0], rtol=1e-5)


@pytest.mark.parametrize("name", [name for name, (_, message) in REFUSED.items() if message])
def test_a_model_that_cannot_be_followed_is_refused_with_what_to_do(run, capsys, name):
    text, message = REFUSED[name]
    assert run(text)[0] == NOT_RECORDED
    said = capsys.readouterr().err
    assert message in said and "forward_only=True" in said


def test_parameters_that_a_jitted_function_makes_are_those_of_the_model(tmp_path, run):
    status, _, variables = run(REFUSED["constant"][0])
    assert status == 0
    found = Recording.open(tmp_path / "out")
    kernel = variables["variables"]["params"]["Dense_0"]["kernel"]
    assert np.array_equal(found.full(PARAMETERS, 0, "Dense_0.kernel").reshape(kernel.shape), 2 * np.asarray(kernel))


def model(params, x):
    tell("", "input", x)
    y = jnp.tanh(x @ params["w"])
    tell("", "output", y)
    return y


def test_a_loop_records_calls_of_a_function(tmp_path):
    params = {"w": jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)}
    xs = [jnp.arange(6.0).reshape(2, 3) + step for step in range(3)]
    wanted = [jax.jit(model)(params, x) for x in xs]
    for number in (0, 1):
        with Recorder(tmp_path / "a", params, forward_only=True, dense=1, perturbed_run=number) as recorder:
            called = recorder.forward(jax.jit(model))
            found = [called(params, x) for x in xs]
        assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)) == (number == 0)
    recording = Recording.open(tmp_path / "a")
    assert recording.num_steps == 3 and {use for _, _, use in recording.activations(0)} == {"input", "output"}
    assert np.array_equal(recording.activation(0, 0, 0, "", "output"), wanted[0])


def test_a_loop_of_forward_alone_says_what_to_call(tmp_path):
    params = {"w": jnp.ones((3, 4))}
    with pytest.raises(UsageError, match="forward_only: expected a pytree of arrays, got ShardedParams"):
        Recorder(tmp_path / "a", shard(params, make_mesh(MeshSpec(1))), forward_only=True)
    with pytest.raises(UsageError, match="make it with forward_only=True"):
        Recorder(tmp_path / "a", params).forward(model)
    recorder = Recorder(tmp_path / "a", params, forward_only=True)
    with pytest.raises(UsageError, match=r"leave the call of step out"):
        recorder.step(loss=1.0, params=params)
    with pytest.raises(UsageError, match="call the model outside jit"):
        jax.jit(recorder.forward(model))(params, jnp.ones((2, 3)))
    with pytest.raises(UsageError, match="a model that returns a floating array"):
        recorder.forward(lambda params, x: x)(params, jnp.ones(2, int))

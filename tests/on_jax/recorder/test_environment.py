"""The environment that recordings of JAX state, and scripts that stop after their first steps."""

import sys
from importlib.metadata import version

import equinox as eqx
import jax
import pytest
from flax import nnx

import jax_backend
from crossframe.check import check_recordings
from crossframe.environment import Effect, differences, read_environment
from crossframe.errors import UsageError
from crossframe.param_map import ParamMap, linear, norm
from crossframe.recording import Recording
from jax_backend.nnx import params_of
from jax_backend.recorder import script
from jax_backend.recorder._environment import environment_of
from tests.on_jax.helpers.scripts import EAGER, EQUINOX, LINEN, NNX, NNX_OUTSIDE_OF_JIT, TWO_CALLS


def record(text, path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (path.parent / "script.py").write_text(text)
    file = str(path.parent / "script.py")
    assert script.run([file], directory=str(path), every=100, dense=0, stop_after=1) == 0
    return Recording.open(path)


def test_another_optimizer_is_found_after_the_first_step(tmp_path, monkeypatch):
    a = record(TWO_CALLS, tmp_path / "a", monkeypatch)
    b = record(EAGER, tmp_path / "b", monkeypatch)
    assert (a.num_steps, b.num_steps) == (1, 1)
    found = check_recordings(a, b)
    assert found.effect is Effect.CERTAINLY
    assert "optimizer" in [each.name for each in found.differences]
    assert "compiled" not in [each.name for each in found.differences if each.effect is Effect.CERTAINLY]


def test_the_configuration_of_jax_is_stated(tmp_path, monkeypatch):
    record(EAGER, tmp_path / "a", monkeypatch)
    found = read_environment(tmp_path / "a", 0)
    assert found is not None
    assert found["framework"]["jax_enable_x64"] is jax.config.read("jax_enable_x64")
    assert found["framework"]["compiled"] is False and found["packages"]["jax"] == version("jax")


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        pytest.param(LINEN, {"BatchNorm_0": "epsilon=1e-05", "Dense_1": "features=3"}, id="linen"),
        pytest.param(NNX_OUTSIDE_OF_JIT, {"norm": "momentum=0.99", "(root)": "Net("}, id="outside_of_jit"),
        pytest.param(EQUINOX, {"layers.0": "out_features=5", "layers.2": "use_bias=True"}, id="equinox"),
    ],
)
def test_modules_of_a_script_are_stated(tmp_path, monkeypatch, text, stated):
    record(text, tmp_path / "a", monkeypatch)
    found = read_environment(tmp_path / "a", 0)
    assert found is not None
    assert all(option in str(found["modules"].get(module)) for module, option in stated.items()), found["modules"]


def test_another_epsilon_of_a_module_is_the_first_difference(tmp_path, monkeypatch):
    a = record(NNX, tmp_path / "a", monkeypatch)
    b = record(NNX.replace("BatchNorm(5,", "BatchNorm(5, epsilon=1e-3,"), tmp_path / "b", monkeypatch)
    first = check_recordings(a, b).differences[0]
    assert (first.section, first.name, first.effect) == ("modules", "norm", Effect.CERTAINLY)
    assert "epsilon=1e-05" in str(first.a) and "epsilon=0.001" in str(first.b)


def test_a_loop_states_the_modules_of_its_model(tmp_path):
    class Net(nnx.Module):
        def __init__(self, epsilon, rngs):
            self.layers = nnx.List([nnx.Linear(3, 2, rngs=rngs)])
            self.norm = nnx.LayerNorm(2, epsilon=epsilon, rngs=rngs)

    def record(name, epsilon):
        model = Net(epsilon, nnx.Rngs(0))
        mapping = ParamMap.of(linear("layers.0", "layers.0"), norm("norm1", "norm"))
        with jax_backend.Recorder(tmp_path / name, params_of(model), model=model, param_map=mapping) as recorder:
            recorder.step(loss=1.0, params=recorder.params)
        return Recording.open(tmp_path / name)

    first = check_recordings(record("a", 1e-5), record("b", 1e-6)).differences[0]
    assert (first.section, first.name, first.effect) == ("modules", "norm1", Effect.CERTAINLY)
    stated = read_environment(tmp_path / "a", 0)
    assert stated is not None
    assert set(stated["modules"]) == {"(root)", "layers.0", "norm1"}
    with pytest.raises(UsageError, match="model: expected a module of flax or equinox"):
        jax_backend.Recorder(tmp_path / "c", {"w": jax.numpy.ones(2)}, model=len)


def test_parameters_that_are_a_module_of_equinox_state_it(tmp_path):
    model = eqx.nn.MLP(3, 2, 4, 1, use_final_bias=False, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    with jax_backend.Recorder(tmp_path / "a", params) as recorder:
        recorder.step(loss=1.0, params=params)
    stated = read_environment(tmp_path / "a", 0)
    assert stated is not None
    assert "use_bias=False" in str(stated["modules"]["layers.1"]) and "depth=1" in str(stated["modules"]["(root)"])


def test_another_matmul_precision_is_a_difference():
    before = environment_of()
    with jax.default_matmul_precision("bfloat16"):
        (found,) = differences(before, environment_of(), ("framework",))
    expected = Effect.POSSIBLY if jax.default_backend() == "cpu" else Effect.CERTAINLY
    assert found.name == "jax_default_matmul_precision" and found.effect is expected


def test_one_process_has_no_odd_ranks():
    assert jax_backend.check_ranks() == ()

"""The environment that recordings of JAX state, and scripts that stop after their first steps."""

import sys

import jax

import jax_backend
from crossframe.check import check_recordings
from crossframe.environment import Effect, differences, read_environment
from crossframe.recording import Recording
from jax_backend.recorder import script
from jax_backend.recorder._facts import environment_of
from tests.on_jax.helpers.scripts import EAGER, TWO_CALLS


def record(text, path, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (path.parent / "script.py").write_text(text)
    file = str(path.parent / "script.py")
    assert script.run(file, (), directory=str(path), every=100, dense=0, stop_after=1) == 0
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
    assert found["framework"]["compiled"] is False and found["packages"]["jax"] == jax.__version__


def test_another_matmul_precision_is_a_difference():
    before = environment_of()
    with jax.default_matmul_precision("bfloat16"):
        (found,) = differences(before, environment_of(), ("framework",))
    expected = Effect.POSSIBLY if jax.default_backend() == "cpu" else Effect.CERTAINLY
    assert found.name == "jax_default_matmul_precision" and found.effect is expected


def test_one_process_has_no_odd_ranks():
    assert jax_backend.check_ranks() == ()

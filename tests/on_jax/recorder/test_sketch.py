"""Sketches made by XLA are the core's."""

import jax
import ml_dtypes
import numpy as np
import pytest

from crossframe.mesh import MeshSpec
from crossframe.recording import Recording
from crossframe.recording.sketch import sketches_of
from jax_backend import Recorder, make_mesh, shard
from jax_backend.activations import tell
from jax_backend.recorder import _sketch as sketch
from jax_backend.recorder._sketch import sketch_of
from tests.on_jax.helpers.recorded_loops import TOLD, train
from tests.on_jax.helpers.small import wide

DTYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "start"), [(0, 0), (513, 0), (4097, 10**12), ((1 << 18) + 5, 7)])
def test_every_bit_of_the_fingerprint_and_the_sums_are_those_of_the_core(dtype, numel, start):
    values = np.random.default_rng(numel).normal(size=numel).astype(dtype)
    values[3:4], values[4:5], values[6:7] = np.nan, -np.array(np.nan, dtype), -np.inf
    found, wanted = sketch_of(values, start), sketches_of([values], start)[0]
    assert found.equals(wanted) and found.num_not_finite == wanted.num_not_finite == min(numel, 3)
    np.testing.assert_allclose(found.sums, wanted.sums, rtol=0, atol=wanted.resolution)
    np.testing.assert_allclose(found.squares, wanted.squares, rtol=1e-12)
    values = values.reshape(-1, 3) if numel % 3 == 0 else values
    other = sketch_of(np.asfortranarray(values), start)
    assert other.equals(wanted)


def test_64_bits_are_left_as_the_loop_chose_them():
    before = jax.config.read("jax_enable_x64")
    jax.config.update("jax_enable_x64", False)
    try:
        found = sketch_of(np.arange(1000.0))
        assert jax.numpy.arange(3.0).dtype == np.float32
    finally:
        jax.config.update("jax_enable_x64", before)
    assert found.equals(sketches_of([np.arange(1000.0)])[0])


def test_without_a_cpu_of_jaxs_numpy_sketches(monkeypatch):
    def none(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(sketch.jax, "local_devices", none)
    assert sketch_of(np.arange(1000.0)).equals(sketches_of([np.arange(1000.0)])[0])


def test_a_recording_of_sketches_says_of_all_quantities_what_a_full_one_does(tmp_path):
    """Of a model whose parameters are large and small."""
    generator = np.random.default_rng(0)
    params = wide({"up": {"w": generator.normal(size=(3, 300))}, "down": {"w": generator.normal(size=(300, 2))}})

    def loss(params, batch):
        tell("up", "input", batch["x"])
        hidden = jax.numpy.tanh(batch["x"] @ params["up"]["w"])
        tell("up", "output", hidden)
        return ((hidden @ params["down"]["w"] - batch["y"]) ** 2).mean()

    found, told = {}, dict(TOLD, steps=1)
    for detail in ("full", "sketch"):
        sharded = shard(params, make_mesh(MeshSpec(2), jax.devices("cpu")), units=("up",))
        with Recorder(tmp_path / detail, sharded, detail=detail, **told) as recorder:
            train(recorder, sharded, loss, steps=1)
        found[detail] = Recording.open(tmp_path / detail)
    full, sketched = found["full"], found["sketch"]
    for name in params:
        for phase, use in (("parameters", ""), ("reduce", ""), ("state", "exp_avg"), ("update", "")):
            a, b = (each.sketch(phase, 0, f"{name}.w", use=use) for each in (full, sketched))
            assert a.equals(b), (phase, name)
    assert full.activations(0) == sketched.activations(0)
    folders = [sorted(path.stat().st_size for path in (tmp_path / each).glob("*/*.safetensors")) for each in found]
    assert folders[1][0] < folders[0][0]

"""Before the first step: what rank i holds in torch, device i in JAX, and rank i in the numpy reference, bit for bit."""

import os
from itertools import product

import jax
import numpy as np
import pytest

from crossframe.mesh import MeshSpec
from crossframe.reference import ReferenceUnit
from experiments.models import load_flax
from experiments.parity.record_jax import shard_model
from experiments.parity.settings import RunSettings
from jax_backend import make_mesh, shards_of, unshard
from tests.conftest import EXHAUSTIVE

# float32 is aligned, float64 of these sizes has nothing to align.
CASES = [(3, "float32")]
if os.environ.get(EXHAUSTIVE):
    CASES = list(product((1, 2, 3, 4), ("float64", "float32")))


def _torch_shards(rank, world_size, settings):
    """This rank's buffer and its gathered parameters, by unit."""
    import torch

    from experiments.parity.record_torch import build_model
    from torch_backend import FullyShardedDataParallel
    from torch_backend.shards import sharded_units

    model = build_model(settings, torch.device("cpu"))
    shards = {name: bucket.store.buffer.numpy() for name, (bucket,) in sharded_units(model)}
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        full = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return shards, full


@pytest.mark.parametrize(("world_size", "dtype"), CASES)
def test_R04_R05_shards_are_the_same_in_numpy_torch_and_jax(ranks, world_size, dtype):
    settings = RunSettings("gpt-tiny", dtype, world_size, seed=5)
    on_torch = ranks.run(world_size, _torch_shards, settings)
    _, shapes, _ = load_flax.split_model(settings.definition, dtype)
    on_jax = shard_model(settings, shapes, make_mesh(MeshSpec(shard=world_size), jax.devices("cpu")))
    params = settings.definition.initial_params(5, dtype)
    layouts = settings.definition.unit_layouts(world_size, dtype)
    assert len(layouts) == 3
    padding = 0
    for unit, layout in layouts:
        filled, zeroed = ReferenceUnit(layout, params), ReferenceUnit(layout, params, fill=False)
        for rank in range(world_size):
            in_torch, in_jax = on_torch[rank][0][unit], shards_of(on_jax, rank)[unit]
            assert in_torch.tobytes() == filled.shards[rank].tobytes(), (unit, rank)
            assert in_jax.tobytes() == zeroed.shards[rank].tobytes(), (unit, rank)
            for run in layout.padding(rank):
                assert set(in_torch[run.start : run.stop]) == {run.fill} and set(in_jax[run.start : run.stop]) == {0}
                padding += run.stop - run.start
            for piece in layout.pieces(rank):
                span = slice(piece.shard_start, piece.shard_stop)
                assert in_torch[span].tobytes() == in_jax[span].tobytes(), (unit, rank, piece)
    assert (
        padding > 0 or dtype == "float64"
    )  # float32 aligns to 4 elements, which the sizes of gpt-tiny are no multiples of
    gathered = {
        settings.definition.param_map.by_path[path].name: settings.definition.param_map.by_path[path].to_canonical(
            value
        )
        for path, value in _by_path(unshard(on_jax))
    }
    assert gathered.keys() == params.keys()
    for name, value in params.items():
        assert np.array_equal(gathered[name], value), name
        for _, full in on_torch:
            assert np.array_equal(full[name], value), name


def _by_path(tree):
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield ".".join(str(key.key) for key in path), np.asarray(leaf)

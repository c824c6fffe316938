"""Each model in both frameworks, in float64: the map fits, logits and gradients are the same, shards are torch's."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn import functional

from crossframe.errors import MappingError, UnitError
from crossframe.mesh import MeshSpec
from crossframe.param_map import MapEntry, ParamMap, attention
from experiments.data import digits
from experiments.models import MODELS
from experiments.models.load_flax import nnx_params, split_model
from experiments.models.load_torch import load_initial
from jax_backend import make_mesh, pieces_of, shard, unshard, value_and_grad, writeback
from jax_backend.nnx import with_params
from jax_backend.tree import leaves_by_path

# A gradient of some thousand terms of order 1, each rounded to 1e-16; the smallest mistake of a model (an epsilon, the order of
# heads, the exact GELU) changes it by some 1e-7.
ATOL = 1e-12


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def varied(definition):
    """Values of which no two are alike, where initial biases would all be 0."""
    rng = np.random.default_rng(3)
    return {
        name: value + 0.1 * rng.normal(size=value.shape)
        for name, value in definition.initial_params(3, "float64").items()
    }


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("gpt")])  # whose training is compared
def test_both_frameworks_compute_the_same_logits_and_gradients(name):
    definition = MODELS[name]
    values, batch = varied(definition), definition.batch(0, 0, 0, 1, 3, "float64")

    module = definition.make_torch()[0].double()
    load_initial(module, values)
    inputs, targets = (torch.from_numpy(part) for part in (batch.inputs, batch.targets))
    logits = module(inputs.long() if definition.context else inputs)
    functional.cross_entropy(logits.flatten(0, -2), targets.long().flatten()).backward()

    graphdef, params, state = split_model(definition, "float64")
    params = nnx_params(definition, params, values)
    definition.param_map.check(values, leaves_by_path(params))

    def loss_of(params):
        logits = with_params(graphdef, params, state)(jnp.asarray(batch.inputs))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets).mean(), logits

    grads, found = jax.jit(jax.grad(loss_of, has_aux=True))(params)
    np.testing.assert_allclose(found, logits.detach().numpy(), rtol=0, atol=ATOL)
    grads, some = leaves_by_path(grads), [name for name, p in module.named_parameters() if p.grad.abs().max() > 1e-3]
    # Not every expert is chosen by some sample, and the biases before batch norm have none by their nature.
    assert len(some) >= 0.6 * len(values), set(values) - set(some)
    for param_name, param in module.named_parameters():
        entry = definition.param_map.by_name[param_name]
        mine = entry.to_canonical(*(grads[path] for path in entry.paths))
        assert mine.shape == definition.shapes[param_name]
        np.testing.assert_allclose(mine, param.grad.numpy(), rtol=0, atol=ATOL, err_msg=param_name)


def test_digits_are_real_images_and_dealt_like_text():
    images, shown = digits()
    assert images.shape == (1797, 8, 8) and images.min() == 0 and images.max() == 1
    assert sorted(set(shown.tolist())) == list(range(10)) and np.bincount(shown).min() > 150
    definition = MODELS["mlp"]
    whole = definition.batch(0, 5, 0, 1, 6, "float32")
    halves = [definition.batch(0, 5, rank, 2, 3, "float32") for rank in range(2)]
    assert whole.sample_ids == halves[0].sample_ids + halves[1].sample_ids
    assert (
        np.array_equal(whole.inputs, np.concatenate([half.inputs for half in halves]))
        and whole.inputs.dtype == np.float32
    )
    assert np.array_equal(whole.targets, shown[list(whole.sample_ids)])


def test_joined_and_split_parameters_are_shards_of_torchs():
    definition = MODELS["vit"]
    values, mesh = varied(definition), make_mesh(MeshSpec(3), jax.devices("cpu"))
    params = nnx_params(definition, split_model(definition, "float64")[1], values)
    sharded = shard(params, mesh, units=definition.units, param_map=definition.param_map)
    for name, value in values.items():
        pieces = [pieces_of(sharded, rank).get(name, np.zeros(0)) for rank in range(3)]
        assert np.array_equal(np.concatenate(pieces), value.reshape(-1)), name
    jax.tree.map(np.testing.assert_array_equal, unshard(sharded), params)
    moved = jax.tree.map(lambda leaf: leaf + 1, params)
    jax.tree.map(np.testing.assert_array_equal, unshard(writeback(sharded, moved)), moved)


def test_gradients_of_joined_and_split_parameters_and_of_one_shared_part():
    rng, mesh = np.random.default_rng(0), make_mesh(MeshSpec(2), jax.devices("cpu"))
    params: dict[str, dict] = {
        "a": {part: {"kernel": rng.normal(size=(3, 2, 2))} for part in ("query", "key", "value")}
    }
    params["a"]["out"] = {"kernel": rng.normal(size=(2, 2, 3))}
    params["b"] = {"key": params["a"]["key"]["kernel"]}
    x = rng.normal(size=(2, 3))

    def loss_fn(params, x):
        a = params["a"]
        mixed = sum(
            jnp.einsum("bi,ihd->bhd", x, a[part]["kernel"]) ** i for i, part in enumerate(("query", "key", "value"), 1)
        )
        return jnp.einsum("bhd,hdo->bo", mixed, a["out"]["kernel"]).sum() + (params["b"]["key"] ** 3).sum()

    param_map = ParamMap(attention("a", "a", head_width=2, bias=False))
    sharded = shard(params, mesh, param_map=param_map, shared={"b.key": "a.key.kernel"}, layout="per_param")
    assert sharded.tree.units[0][1].params[0].aliases == ("b.key",)
    found = unshard(value_and_grad(loss_fn, mesh)(sharded, x).grads)
    expected = jax.tree.map(lambda *grads: sum(grads) / 2, *(jax.grad(loss_fn)(params, x[i : i + 1]) for i in range(2)))
    both = expected["a"]["key"]["kernel"] + expected["b"]["key"]
    expected["a"]["key"]["kernel"] = expected["b"]["key"] = both
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL), found, expected)


def test_a_joined_parameter_that_does_not_fit_is_refused_by_name():
    mesh, entry = make_mesh(MeshSpec(1), jax.devices("cpu")), MapEntry("w", ("a", "b"))
    with pytest.raises(
        MappingError, match=r"'w': expected one dtype at all of \('a', 'b'\), got \['float32', 'float64'\]"
    ):
        shard({"a": np.ones(2), "b": np.ones(2, np.float32)}, mesh, param_map=ParamMap((entry,)))
    with pytest.raises(MappingError, match=r"'w': expected as many rows"):
        shard({"a": np.ones(2), "b": np.ones(3)}, mesh, param_map=ParamMap((entry,)))
    with pytest.raises(MappingError, match=r"not in the map, by path: \['c'\]"):
        shard({"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}, mesh, param_map=ParamMap((entry,)))
    stacked = ParamMap((MapEntry("s.w", ("s.a", "s.b")),))
    with pytest.raises(UnitError, match=r"one leaf each, but several are joined in \['s.w'\]"):
        shard({"s": {"a": np.ones((4, 2)), "b": np.ones((4, 2))}}, mesh, param_map=stacked, stacked=("s",))

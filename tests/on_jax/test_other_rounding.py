"""A loss that rounds otherwise: by how much, where, and where not; in both modes of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_backend
from crossframe.mesh import MeshSpec
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.measure.metrics import distance, norm
from jax_backend.other_rounding import other_rounding
from tests.on_jax.helpers.recorded_loops import mesh_of
from tests.on_jax.helpers.small import EPS, WIDE, wide


@pytest.mark.parametrize("dtype", dict.fromkeys([WIDE, "float32", "bfloat16"]))
def test_results_fall_to_a_neighbour_or_stay(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=200), dtype)
    right, found = jnp.tanh(x), other_rounding(jnp.tanh, 1)(x)
    assert found.dtype == right.dtype
    up, down = (jnp.nextafter(right, jnp.full_like(right, sign * np.inf)) for sign in (1, -1))
    # Half of them stay, a quarter goes up and a quarter down.
    for each, share in ((up, 0.25), (right, 0.5), (down, 0.25)):
        assert abs((found == each).mean() - share) < 0.15
    assert ((found == right) | (found == up) | (found == down)).all()
    assert not (found == other_rounding(jnp.tanh, 2)(x)).all()
    assert (found == other_rounding(jnp.tanh, 1)(x)).all()  # a seed says which way


def test_what_moves_selects_or_casts_data_is_left_alone():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), "float32")

    def fun(x):
        return x.T, jnp.concatenate([x, x]), x.astype("bfloat16"), x[1], jnp.where(x > 0, x, 0), x.max(0), -x

    for found, right in zip(other_rounding(fun, 1)(x), fun(x), strict=True):
        assert found.dtype == right.dtype and (found == right).all()


def test_functions_inside_of_which_nothing_rounds_are_left_alone():
    """A custom derivative around a time or a length that is later looked for among others."""

    @jax.custom_jvp
    def same(x):
        return jnp.where(x > 0, x, -x)

    same.defjvp(lambda primals, tangents: (same(*primals), tangents[0]))
    x = jnp.linspace(-1.0, 1.0, 100)
    total = lambda x: jax.lax.scan(lambda total, each: (total + each, total), jnp.zeros(()), same(x))  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, other_rounding(total, 1)(x), total(x))
    divided = lambda x: jax.lax.scan(lambda total, each: (total / each, total), jnp.ones(()), same(x) + 1)  # noqa: E731
    assert np.any(np.asarray(other_rounding(divided, 1)(x)[1]) != np.asarray(divided(x)[1]))


def test_integers_stay():
    """Such as the places that a division gives; among other numbers they move."""
    x = jnp.arange(100.0)
    np.testing.assert_array_equal(other_rounding(lambda x: 2 * x / 2.0, 1)(x), x)
    assert (other_rounding(lambda x: x / 2.0, 1)(x) != x / 2.0)[2::2].any()


def test_zeros_and_what_is_not_finite_stay():
    x = jnp.array([0.0, np.inf, -np.inf, np.nan])
    np.testing.assert_array_equal(other_rounding(lambda x: x / 1.0, 1)(x), x)


@pytest.mark.parametrize("mode", ["shard_map", pytest.param("jit", marks=pytest.mark.exhaustive)])
def test_a_step_differs_by_rounding_alone_in_loss_and_gradients(mode):
    mesh = jax_backend.make_mesh(MeshSpec(shard=2), jax.devices("cpu")[:2])
    generator = np.random.default_rng(0)
    params = wide({"a": {"w": generator.normal(size=(5, 6))}, "b": {"w": generator.normal(size=(6, 3))}})
    batch = generator.normal(size=(4, 5))
    sharded = jax_backend.shard(params, mesh, units=("a",))

    @jax.checkpoint
    def hidden(w, x):
        return jax.nn.gelu(x @ w)

    def loss(params, x):
        return jax.nn.log_softmax(hidden(params["a"]["w"], x) @ params["b"]["w"]).mean()

    def grads(seed):
        fun = loss if seed is None else other_rounding(loss, seed)
        found = jax_backend.value_and_grad(fun, mesh, mode=mode)(sharded, batch)
        return float(found.loss), jax_backend.unshard(found.grads)

    run, perturbed, other = grads(None), grads(1), grads(2)
    bounds = bounds_for(WIDE)
    np.testing.assert_allclose([perturbed[0], other[0]], run[0], rtol=bounds.loss)
    for a, b, c in zip(*(jax.tree.leaves(each[1]) for each in (run, perturbed, other)), strict=True):
        assert not (a == b).all() and not (b == c).all()
        assert distance(a, b) <= bounds.parameter * norm(a)
    if mode == "shard_map":
        again = grads(1)
        assert all((b == d).all() for b, d in zip(*map(jax.tree.leaves, (perturbed[1], again[1])), strict=True))


def test_a_seed_that_is_traced_gives_what_it_gives_otherwise():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(7, 5)), "float32")

    def fun(x):
        return jax.nn.softmax(x @ x.T).sum(0)

    compiled = jax.jit(lambda seed: other_rounding(fun, seed)(x))
    found = [compiled(np.uint32(seed)) for seed in (1, 2)]
    for seed, each in zip((1, 2), found, strict=True):
        np.testing.assert_allclose(each, fun(x), rtol=bounds_for("float32").loss)
        assert (each == jax.jit(lambda seed=seed: other_rounding(fun, seed)(x))()).all()
    assert not (found[0] == found[1]).all()
    assert compiled._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("numel", [2, 7, 100_003 if WIDE == "float64" else 203])
def test_sums_go_through_all_their_terms_in_another_order(numel):
    ones, places = jnp.ones(numel, WIDE), jnp.arange(numel, dtype=WIDE)
    for seed in range(3):
        # Sums of integers below 1 / EPS are exact in any order, and then fall to a neighbour: a term that is left out or taken
        # twice shows.
        found = [float(other_rounding(lambda a: jnp.dot(a, places), seed)(each)) for each in (ones, places)]
        np.testing.assert_allclose(found, [places.sum(), (places * places).sum()], rtol=1.5 * EPS)


def test_the_order_of_a_sum_is_drawn_by_the_seed():
    """Where terms cancel, the order says which of the small ones are lost."""
    terms = np.random.default_rng(0).permutation(np.repeat([1e16, 1.0, -1e16], 30))
    found = {float(other_rounding(jnp.dot, seed)(jnp.asarray(terms), jnp.ones(90))) for seed in range(6)}
    assert max(found) - min(found) >= 2, found


def test_what_ranks_do_each_for_themselves_rounds_otherwise_too():
    mesh = mesh_of(x=2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), "float32")

    def mean(x):
        part = jnp.tanh(x @ x.T)
        return jax.lax.pmean(part, "x"), x

    P = jax.sharding.PartitionSpec
    whole = jax.shard_map(mean, mesh=mesh, in_specs=P("x"), out_specs=(P(), P("x")))

    def fun(x):
        one, two = whole(x)
        return jnp.exp(one), two

    right, found = (jax.jit(each)(x) for each in (fun, other_rounding(fun, 3)))
    assert not (found[0] == right[0]).all() and (found[1] == right[1]).all()
    np.testing.assert_allclose(found[0], right[0], rtol=bounds_for("float32").loss)
    assert not (found[0] == jax.jit(other_rounding(fun, 4))(x)[0]).all()


def test_numbers_of_python_stay_numbers():
    def pooled(x, least):
        """Differentiable only if the initial value is a number, as in equinox's MaxPool2d."""
        return jnp.sum(jax.lax.reduce_window(x, least, jax.lax.max, (2,), (2,), "VALID"))

    found = jax.jit(lambda x: jax.grad(other_rounding(pooled, 0))(x, -jnp.inf))(jnp.arange(4.0))
    # The sum is moved by one neighbour at most, and its cotangent by as much.
    np.testing.assert_allclose(found, [0, 1, 0, 1], rtol=2 * float(jnp.finfo(found.dtype).eps))

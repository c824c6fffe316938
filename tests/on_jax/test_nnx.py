# pyright: reportArgumentType=false, reportCallIssue=false
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from crossframe.errors import StateError, UsageError
from jax_backend import LossOutput, per_rank, shard, summon_full_params, unshard, value_and_grad
from jax_backend.activations import Activations, listening
from jax_backend.nnx import ShardedModule, params_of, split, state_of, watch, with_params
from tests.on_jax.helpers.nnx_model import Net, batch, net_map
from tests.on_jax.helpers.small import ATOL, RTOL, WIDE, mesh_of_size


def net_of():
    """A net whose running statistics are float64 as well: flax keeps them in float32 whatever the parameters are, and JAX warns
    where float64 flows into them."""
    net = Net(nnx.Rngs(0))
    for stat in (net.norm.mean, net.norm.var):
        stat.set_value(stat.get_value().astype(WIDE))
    return net


def loss_of(graphdef):
    def loss(params, batch, state):
        net = with_params(graphdef, params, state)
        value = jnp.mean((net(batch["x"]) - batch["y"]) ** 2)
        return LossOutput(value, state=state_of(net))

    return loss


def test_a_module_is_split_into_parameters_and_everything_else():
    net = Net(nnx.Rngs(0))
    _, params, state = split(net)
    assert jax.tree.structure(params) == jax.tree.structure(params_of(net))
    assert jax.tree.structure(state) == jax.tree.structure(state_of(net))
    net_map().check(net_map().by_name, unshard_paths(params))
    assert set(state) == {"norm", "drop"}
    assert {leaf.dtype.kind for leaf in jax.tree.leaves(params)} == {"f"}


def unshard_paths(params):
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]


def test_an_nnx_state_is_sharded_by_the_same_paths_as_its_pure_dict():
    net, mesh = Net(nnx.Rngs(0)), mesh_of_size(2)
    boxed = shard(nnx.state(net, nnx.Param), mesh, units=("blocks.0",), param_map=net_map())
    pure = shard(params_of(net), mesh, units=("blocks.0",), param_map=net_map())
    assert boxed.tree.paths == pure.tree.paths
    jax.tree.map(np.testing.assert_array_equal, boxed.shards, pure.shards)
    assert isinstance(unshard(boxed), nnx.State)


def test_an_nnx_model_trains_with_each_ranks_own_statistics_and_dropout():
    world_size = 2
    net, mesh = Net(nnx.Rngs(0)), mesh_of_size(world_size)
    graphdef, params, state = split(net)
    sharded = shard(params, mesh, units=("blocks.0",), param_map=net_map())
    # flax keeps running statistics in float32 whatever the parameters are, and JAX warns where float64 flows into them.
    state = jax.tree.map(lambda leaf: leaf.astype(WIDE) if leaf.dtype == jnp.float32 else leaf, state)
    ranks_state = per_rank(state, mesh)
    result = value_and_grad(loss_of(graphdef), mesh)(sharded, batch(), ranks_state)

    def loss_of_rank(params, rank):
        own = jax.tree.map(lambda leaf: leaf[rank], ranks_state)
        part = jax.tree.map(lambda leaf: np.split(leaf, world_size)[rank], batch())
        return loss_of(graphdef)(params, part, own)

    def mean_loss(params):
        outputs = [loss_of_rank(params, rank) for rank in range(world_size)]
        return sum(each.loss for each in outputs) / world_size, [each.state for each in outputs]

    (loss, states), grads = jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(params)
    np.testing.assert_allclose(result.loss, loss, rtol=RTOL)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=ATOL), unshard(result.grads), grads)
    for rank in range(world_size):
        np.testing.assert_allclose(result.state["norm"]["mean"][rank], states[rank]["norm"]["mean"], rtol=RTOL)
    assert not np.allclose(result.state["norm"]["mean"][0], result.state["norm"]["mean"][1])
    np.testing.assert_array_equal(result.state["drop"]["rngs"]["count"], [1, 1])


def sharded_net(net, world_size=2):
    return ShardedModule(net, mesh_of_size(world_size), units=("blocks.0",), param_map=net_map())


@pytest.mark.parametrize("offload", [True, False])
def test_R19_R20_a_holders_module_is_edited_in_place(offload):
    net = net_of()
    holder = sharded_net(net)
    before = params_of(net)
    with summon_full_params(holder, offload_to_cpu=offload) as summoned:
        module = summoned.module
        same(params_of(module), before)
        same(state_of(module), jax.tree.map(lambda leaf: leaf[0], holder.state))
        module.first.kernel[...] = module.first.kernel[...] * 2
        module.blocks[0].bias = nnx.Param(jnp.full(2, 3.0))
        assert module(np.ones((1, 3))).shape == (1, 2)
        with pytest.raises(StateError, match="use the context that is open"), summon_full_params(holder):
            pass
    after = unshard(holder.sharded)
    np.testing.assert_array_equal(after["first"]["kernel"], before["first"]["kernel"] * 2)
    np.testing.assert_array_equal(after["blocks"][0]["bias"], [3.0, 3.0])
    np.testing.assert_array_equal(after["norm"]["scale"], before["norm"]["scale"])
    assert summoned.sharded is holder.sharded and summoned.module is None
    jax.tree.map(np.testing.assert_array_equal, params_of(net), before)


def test_R19_a_holders_unit_alone_is_shown():
    holder = sharded_net(net_of())
    with summon_full_params(holder, unit="blocks.0", writeback=False) as summoned:
        assert summoned.module.first.kernel.get_value() is None
        assert summoned.module.blocks[0].kernel.shape == (4, 2)
        summoned.module.blocks[0].bias = nnx.Param(jnp.full(2, 3.0))
    np.testing.assert_array_equal(unshard(holder.sharded)["blocks"][0]["bias"], [0.0, 0.0])


def same(found, wanted):
    def equal(a, b):
        keys = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b)]
        np.testing.assert_array_equal(*keys)

    jax.tree.map(equal, found, wanted)


def test_a_holders_loss_is_that_of_the_module_and_keeps_its_state():
    net = net_of()
    graphdef, params, state = split(net)
    holder = sharded_net(net)

    def of_module(module, batch):
        out = module(batch["x"])
        return jnp.mean((out - batch["y"]) ** 2)

    wanted = loss_of(graphdef)(params, batch(), state)
    found = holder.loss(of_module)(params, batch(), state)
    same(found, wanted)
    output = holder.loss(lambda *args: LossOutput(of_module(*args), aux=7))(params, batch(), state)
    same((output.loss, output.state), (wanted.loss, wanted.state))
    assert output.aux == 7
    result = jax.eval_shape(
        value_and_grad(holder.loss(of_module), mesh_of_size(2)), holder.sharded, batch(), holder.state
    )
    assert jax.tree.structure(result.state) == jax.tree.structure(holder.state)


def test_modules_tell_what_they_are_given_and_give_in_the_order_of_calls_and_change_nothing_else():
    class Two(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.List([nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])

        def __call__(self, x):
            return self.parts[1](self.parts[0](self.parts[0](x)))

    model, x = Two(nnx.Rngs(0)), jnp.ones((2, 3))
    graphdef, params, state = split(model)
    expected, inner = model(x), model.parts[0](x)

    @jax.jit
    def run(params):
        model = with_params(graphdef, params, state)
        with listening() as told:
            watch(model, {"": "", "first": "parts.0", "last": "parts.1"})
            model(x)
        return Activations(tuple(told.values()), tuple(told)), params_of(model)

    activations, after = run(params)
    # In the order of calls; jit would sort the keys of a dict.
    order = [
        ("", "input"),
        ("first", "input"),
        ("first", "output"),
        ("first (call 2)", "input"),
        ("first (call 2)", "output"),
        ("last", "input"),
        ("last", "output"),
        ("", "output"),
    ]
    assert list(activations.names) == order
    told = dict(zip(activations.names, activations.values, strict=True))
    for name, value in {("first", "output"): inner, ("last", "output"): expected, ("", "output"): expected}.items():
        np.testing.assert_allclose(told[name], value, rtol=1e-6)
    np.testing.assert_array_equal(told["first", "input"], x)
    np.testing.assert_allclose(told["last", "input"], model.parts[0](inner), rtol=1e-6)
    assert jax.tree.structure(after) == jax.tree.structure(params)
    assert type(Two(nnx.Rngs(0))) is Two and len(run(params)[0].values) == 8
    for path, match in (("parts.2", "no '2'"), ("part", "no 'part'"), ("parts.0.kernel", "got Param")):
        with pytest.raises(UsageError, match=match):
            watch(Two(nnx.Rngs(0)), {"m": path})


def test_where_no_one_listens_a_watched_module_is_as_it_was():
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    watch(model, {"": ""})
    assert type(model) is nnx.Linear


def test_of_what_a_module_is_given_and_gives_the_first_floating_array_is_told():
    class Pair(nnx.Module):
        def __call__(self, tokens, mask=None, *, scale):
            return tokens, {"out": scale * 2.0}

    model = Pair()
    with listening() as told:
        watch(model, {"pair": ""})
        model(jnp.arange(3), scale=jnp.full(2, 0.5))
        watch(other := Pair(), {"other": ""})
        with pytest.raises(TypeError):
            other(jnp.arange(3))
    assert {name: value.tolist() for name, value in told.items()} == {
        ("pair", "input"): [0.5, 0.5],
        ("pair", "output"): [1.0, 1.0],
    }

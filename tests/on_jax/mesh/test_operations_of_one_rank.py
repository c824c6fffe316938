"""Operations of one rank under jit: convolutions, of which vmap would make one grouped convolution, and Fourier transforms."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from crossframe.mesh import MeshSpec
from jax_backend import compiled_trace, make_mesh, scan, shard, unshard, value_and_grad

NAMES = ("NHWC", "HWIO", "NHWC")
# Sums of up to 300 products of size 1, each rounded by 1.1e-16.
close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13, strict=True)


def convolved(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=NAMES, feature_group_count=groups
    )


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape))


def assert_same_on_ranks(loss: Any, plain: Any, params: Any, batch: Any, spec: MeshSpec, **options: Any) -> None:
    """The loss and the gradients under jit are those on one device."""
    mesh = make_mesh(spec, **options.pop("of_mesh", {}))
    result = value_and_grad(loss, mesh, mode="jit")(shard(params, mesh, **options), batch)
    expected, grads = jax.value_and_grad(plain)(params, batch)
    close(result.loss, expected)
    jax.tree.map(close, unshard(result.grads), grads)


@pytest.mark.parametrize(
    ("kernel", "stride", "groups"),
    [
        pytest.param((1, 1, 4, 6), 1, 1, id="1 x 1"),
        pytest.param((3, 3, 64, 32), 1, 1, id="many features"),
        pytest.param((3, 3, 4, 6), 2, 1, id="a stride"),
        pytest.param((3, 3, 1, 8), 1, 4, id="depthwise"),
    ],
)
def test_gradients_of_kernels_under_jit_are_those_of_one_device(kernel, stride, groups):
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.tanh(convolved(batch, params["kernel"], stride, groups)) ** 2)

    batch = drawn(2, 8, 8, kernel[2] * groups)
    assert_same_on_ranks(loss, loss, {"kernel": drawn(*kernel) / 4}, batch, MeshSpec(shard=2))


def loss_of(params: Any, batch: Any, plain: bool = False) -> Any:
    """Convolutions in a jitted function, in a loop over stacked blocks, computed again, and mapped over samples."""
    x = jax.jit(convolved)(batch, params["first"])

    def body(x: Any, block: Any, _: Any) -> tuple[Any, None]:
        return jnp.tanh(convolved(x, block["kernel"])) + x, None

    if plain:
        x = jax.lax.scan(lambda x, block: body(x, block, None), x, params["blocks"])[0]
    else:
        x = scan(body, x, params["blocks"])[0]
    x = jax.checkpoint(lambda x: convolved(x, params["depthwise"], groups=4))(x)
    return jnp.mean(jax.vmap(lambda each: convolved(each[None], params["last"]))(x) ** 2)


PARAMS = {
    "first": drawn(3, 3, 2, 4),
    "blocks": {"kernel": drawn(3, 1, 1, 4, 4)},
    "depthwise": drawn(3, 3, 1, 4),
    "last": drawn(1, 1, 4, 3) / 10,
}


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        pytest.param(MeshSpec(shard=4), {}, id="shards"),
        pytest.param(MeshSpec(shard=2, replicate=2), {}, id="replicas"),
        pytest.param(MeshSpec(shard=2), {"tp": 2}, id="next to tensor parallelism"),
    ],
)
def test_convolutions_inside_of_other_functions_are_those_of_one_device(spec, axes):
    options = {"of_mesh": {"model_axes": axes}} if axes else {}
    if axes:
        options["model_partition"] = lambda spec: P(None, None, None, "tp") if spec.name == "first" else None
    plain = partial(loss_of, plain=True)
    assert_same_on_ranks(loss_of, plain, PARAMS, drawn(8, 5, 5, 2), spec, stacked=["blocks"], **options)


@pytest.mark.parametrize("replicate", [1, 2])
def test_fourier_transforms_under_jit_are_those_of_one_device(replicate):
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(jnp.fft.irfft(jnp.fft.rfft(batch @ params["w"]) * jnp.arange(4)) ** 2)

    assert_same_on_ranks(loss, loss, {"w": drawn(5, 6)}, drawn(8, 5), MeshSpec(shard=2, replicate=replicate))


def test_no_activation_is_gathered_for_a_convolution():
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(convolved(batch, params["kernel"]) ** 2)

    mesh = make_mesh(MeshSpec(shard=2))
    step = value_and_grad(loss, mesh, mode="jit")
    found = compiled_trace(step, shard({"kernel": drawn(1, 1, 4, 6)}, mesh), drawn(4, 6, 6, 4), mesh=mesh)
    assert max(event.num_bytes for event in found) < 6 * 6 * 4 * 8  # one sample


def test_elsewhere_jax_maps_convolutions_by_its_own_rule():
    make = jax.make_jaxpr(jax.vmap(convolved))(drawn(2, 1, 5, 5, 4), drawn(2, 3, 3, 4, 4))
    assert "feature_group_count=2" in str(make) and "shard_map" not in str(make)

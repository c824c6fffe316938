"""What this backend uses of JAX beyond its public API, one test a name: a new release of JAX fails by the name that it lacks."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jax_backend.engine._remat import ELEMENTWISE, LAYOUT_PRIMITIVES, computes
from jax_backend.programs._jaxpr import CALLS, CUSTOM_CALLS, called, inner_jaxprs, manual_axes, num_scan_operands
from jax_backend.programs._trace import _KINDS

SOURCES = sorted((Path(__file__).parents[2] / "jax_backend").rglob("*.py"))
NOT_PUBLIC = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jaxlib")


def used_names() -> Iterator[str]:
    """The names of modules that are not public: imported ones, and attributes of imported modules."""
    for path in SOURCES:
        tree, modules = ast.parse(path.read_text()), {}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and node.module
                and f"{node.module}.".startswith(tuple(f"{name}." for name in ("jax", *NOT_PUBLIC)))
            ):
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    if f"{full}.".startswith(tuple(f"{name}." for name in NOT_PUBLIC)):
                        modules[alias.asname or alias.name] = full
                        yield full
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                full = modules[node.value.id]
                if full.rpartition(".")[2][0].islower():
                    yield f"{full}.{node.attr}"


@pytest.mark.parametrize("name", sorted(set(used_names())))
def test_jax_has_the_name(name):
    owner, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        assert hasattr(importlib.import_module(owner), attribute)


def custom(function):
    made = jax.custom_vjp(function)
    made.defvjp(lambda x: (function(x), x), lambda x, g: (g,))
    return made


def on_ranks(function):
    # Without devices, of which a machine may have one.
    mesh = AbstractMesh((2,), ("shard",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=P("shard"), out_specs=P("shard"), check_vma=False)


def scanned(x):
    """A scan with one constant and two carried values."""
    start = x.sum()
    return jax.lax.scan(lambda carry, y: ((carry[1], carry[0]), y * start), (0.0, 1.0), x)[1]


JVP = jax.custom_jvp(jnp.sin)
JVP.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0]))
CONSTRUCTS = {
    "jit": (jax.jit(jnp.sin), CALLS),
    "checkpoint": (jax.checkpoint(jnp.sin), CALLS),
    "custom_jvp": (JVP, CUSTOM_CALLS),
    "custom_vjp": (custom(jnp.sin), CUSTOM_CALLS),
    "scan": (scanned, {"scan"}),
    "cond": (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), {"cond"}),
    "while": (lambda x: jax.lax.while_loop(lambda y: y[0] < 0, jnp.sin, x), {"while"}),
    "shard_map": (on_ranks(jnp.sin), {"shard_map"}),
}
PARAMS = {
    "scan": {"jaxpr", "length", "reverse"},
    "cond": {"branches"},
    "while": {"cond_nconsts", "cond_jaxpr", "body_nconsts", "body_jaxpr"},
    "shard_map": {"jaxpr", "mesh", "in_specs", "out_specs", "check_vma"},
}
"""The parameters of primitives that this backend reads by name."""


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_walkers_know_the_primitive_and_its_jaxprs(construct):
    function, known = CONSTRUCTS[construct]
    (equation,) = [each for each in jax.make_jaxpr(function)(jnp.ones(4)).jaxpr.eqns if list(inner_jaxprs(each))]
    assert equation.primitive.name in known
    if equation.primitive.name in CALLS | CUSTOM_CALLS:
        assert called(equation.params) is not None
    assert PARAMS.get(construct, set()) <= set(equation.params)
    if construct == "scan":
        assert equation.params["length"] == 4
        assert num_scan_operands(equation.params) == (1, 2)
    if construct == "shard_map":
        assert set(manual_axes(equation.params)) <= {"shard"}


OPERATORS = {
    "dot_general": (lambda x: x @ x, {"dimension_numbers", "precision"}),
    "reduce_precision": (lambda x: jax.lax.reduce_precision(x, 8, 7), {"exponent_bits", "mantissa_bits"}),
    "sharding_constraint": (
        lambda x: jax.lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(jax.devices()[0])),
        {"sharding"},
    ),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_have_the_params(operator):
    function, params = OPERATORS[operator]
    (equation,) = jax.make_jaxpr(function)(jnp.ones(4)).jaxpr.eqns
    assert equation.primitive.name == operator and params <= set(equation.params)


COLLECTIVES = {
    "all_gather": lambda x: jax.lax.all_gather(x, "shard", tiled=True)[:2],
    "psum_scatter": lambda x: jax.lax.psum_scatter(x, "shard", tiled=True),
    "psum": lambda x: jax.lax.psum(x, "shard"),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_traces_know_the_primitive(collective):
    (equation,) = jax.make_jaxpr(on_ranks(COLLECTIVES[collective]))(jnp.ones(4)).jaxpr.eqns
    (inner,) = inner_jaxprs(equation)
    found = [each for each in inner.eqns if each.primitive.name in _KINDS]
    assert len(found) == 1
    assert {"axis_name", "axes"} & set(found[0].params)
    if collective == "all_gather":
        assert not computes(found[0])


ACTIVATIONS = (
    *("celu", "elu", "gelu", "hard_silu", "leaky_relu", "log_sigmoid", "mish", "relu6", "selu", "sigmoid", "silu"),
    *("soft_sign", "softplus", "squareplus", "tanh"),
)


def operators(jaxpr):
    for equation in jaxpr.eqns:
        inner = list(inner_jaxprs(equation))
        if not inner:
            yield equation.primitive.name
        for each in inner:
            yield from operators(each)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_loop_over_layers_saves_no_results_of_the_activation(name):
    forward = jax.make_jaxpr(lambda x: jax.vjp(getattr(jax.nn, name), x))(jnp.ones(4)).jaxpr
    assert set(operators(forward)) - ELEMENTWISE - LAYOUT_PRIMITIVES == set()

"""What this backend uses of JAX beyond its public API, one test a name: a new release of JAX fails by the name that it lacks."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jax_backend.engine._remat import keeps_activations
from jax_backend.programs._jaxpr import CALLS, CUSTOM_CALLS, called, inner_jaxprs, manual_axes
from jax_backend.programs._trace import _KINDS
from tests.on_jax.helpers.small import mesh_of_size

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
    return jax.shard_map(function, mesh=mesh_of_size(2), in_specs=P("shard"), out_specs=P("shard"), check_vma=False)


JVP = jax.custom_jvp(jnp.sin)
JVP.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0]))
CONSTRUCTS = {
    "jit": (jax.jit(jnp.sin), CALLS),
    "checkpoint": (jax.checkpoint(jnp.sin), CALLS),
    "custom_jvp": (JVP, CUSTOM_CALLS),
    "custom_vjp": (custom(jnp.sin), CUSTOM_CALLS),
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c, y), 0.0, x)[1], {"scan"}),
    "cond": (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), {"cond"}),
    "while": (lambda x: jax.lax.while_loop(lambda y: y[0] < 0, jnp.sin, x), {"while"}),
    "shard_map": (on_ranks(jnp.sin), {"shard_map"}),
}


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_walkers_know_the_primitive_and_its_jaxprs(construct):
    function, known = CONSTRUCTS[construct]
    (equation,) = [each for each in jax.make_jaxpr(function)(jnp.ones(4)).jaxpr.eqns if list(inner_jaxprs(each))]
    assert equation.primitive.name in known
    if equation.primitive.name in CALLS | CUSTOM_CALLS:
        assert called(equation.params) is not None
    if construct == "scan":
        assert equation.params["length"] == 4
    if construct == "shard_map":
        assert {"mesh", "in_specs", "out_specs", "check_vma"} <= set(equation.params)
        assert set(manual_axes(equation.params)) <= {"shard"}


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
        assert not keeps_activations(found[0].primitive)


def test_a_checkpoint_in_backward_says_so():
    backward = jax.grad(lambda x: jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x).sum())
    equations = jax.make_jaxpr(backward)(jnp.ones(2)).jaxpr.eqns
    assert any(each.params.get("differentiated") for each in equations)

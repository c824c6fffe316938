"""The parameters cut out of a gathered buffer in JAX, beside the core's own views of a numpy array."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout
from crossframe.layout import views as expected_views
from jax_backend.shards._bucket import make_bucket
from tests.conftest import EXHAUSTIVE
from tests.core.helpers.random_layouts import ALL_LAYOUTS, QUICK, specs
from tests.on_jax.helpers.small import wide


def views(layout, gathered):
    return make_bucket(layout, name="", unit="").views(gathered)


LAYOUTS = (
    FlatLayout(specs([(3, 5), (0,), (), (2, 2)]), 3, keep_original=True),
    PerParamLayout(specs([(5, 4), (0, 2), (2, 6)]), 2, (0, 0, 1)),
    RaggedLayout(specs([(3, 5), (7,), (2, 2)]), 2, None),
)


# JAX compiles something for each new shape.
@settings(QUICK, max_examples=60 if os.environ.get(EXHAUSTIVE) else 8)
@given(ALL_LAYOUTS)
def test_R05_views_in_jax_are_those_in_numpy_and_padding_is_in_none(layout):
    line = np.arange(layout.gathered_numel, dtype=np.int32)
    found, expected = views(layout, jnp.asarray(line)), expected_views(layout, line)
    assert list(found) == list(expected)
    for name, view in expected.items():
        np.testing.assert_array_equal(found[name], view, strict=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
def test_R05_backward_of_views_puts_gradients_where_they_were_cut_and_0_into_padding(layout):
    line = wide(np.arange(1.0, layout.gathered_numel + 1))
    _, back = jax.vjp(lambda line: views(layout, line), jnp.asarray(line))
    grads = expected_views(layout, line)
    held = np.isin(line, np.concatenate([view.reshape(-1) for view in grads.values()]))
    (found,) = back(jax.tree.map(jnp.asarray, grads))
    np.testing.assert_array_equal(found, np.where(held, line, 0.0), strict=True)
    # One concatenation, and no pad of the whole line for each parameter.
    program = str(jax.make_jaxpr(lambda grads: back(grads))(grads))
    pads = [text for text in program.splitlines() if "= pad[" in text]
    assert not any(f"[{layout.gathered_numel}]" in text for text in pads)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.kind)
def test_views_may_be_mapped_and_pushed_forward(layout):
    lines = wide(np.random.default_rng(0).normal(size=(2, layout.gathered_numel)))
    mapped = jax.vmap(lambda line: views(layout, line))(jnp.asarray(lines))
    _, pushed = jax.jvp(lambda line: views(layout, line), (jnp.asarray(lines[0]),), (jnp.asarray(lines[1]),))
    for i, line in enumerate(lines):
        for name, view in expected_views(layout, line).items():
            np.testing.assert_array_equal(mapped[name][i], view)
            if i == 1:
                np.testing.assert_array_equal(pushed[name], view)

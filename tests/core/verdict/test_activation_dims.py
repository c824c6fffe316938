"""Activations whose order of dims a recording does not know, compared with those of another framework."""

# pyright: reportArgumentType=false

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from crossframe.errors import RecordingError
from crossframe.param_map import ParamMap
from crossframe.rearrange import Rearrangement
from crossframe.recording import Recording, RecordingWriter, create_recording
from crossframe.recording.dims import Order, channels_first
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.mapped_recording import mapped
from crossframe.recording.sketch import sketches_of
from crossframe.verdict import Verdict, compare
from crossframe.verdict.activation_dims import in_one_order
from tests.core.helpers import synthetic
from tests.core.helpers.synthetic import manifest

BLOCK = ("block", "output")
HEADS = (2, 5, 3, 4)  # batch, time, heads, width: the same in both frameworks
IMAGE = (2, 5, 5, 3)  # batch, height, width, channels
SQUARE = (2, 4, 4, 4)
LARGE_SQUARE = (2, 9, 9, 9)
LARGE_IMAGE = (2, 20, 20, 3)


def values_of(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def write(directory, framework, value, order=Order.TORCH, world_size=1, detail="full"):
    """A recording of one step with one activation; a rank's value is the same, its samples its own."""
    made = dataclasses.replace(manifest(world_size, steps=1, detail=detail), framework=framework)
    create_recording(directory, made)
    for rank in range(world_size):
        with RecordingWriter(directory, made, rank) as writer:
            rows = np.array_split(value, world_size)[rank]
            ids = list(np.array_split(np.arange(len(value)), world_size)[rank])
            writer.batch(0, synthetic.digest(""), ids)
            writer.loss(0, 1.0)
            writer.activation(0, 0, *BLOCK, rows, order=order)
            writer.end_step(0)
    return Recording.open(directory)


def pair_of(tmp_path, ours, theirs, order, **options):
    return write(tmp_path / "torch", "torch", ours, **options), write(tmp_path / "jax", "jax", theirs, order, **options)


def difference(a, b):
    """Of the activation, as `compare` judged it."""
    verdict = compare(a, b)
    return next(judged for judged in verdict.judged if judged.event == "output")


@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize("order", [Order.UNSTATED, Order.CONVOLUTION])
@pytest.mark.parametrize(
    ("shape", "moves"),
    [
        (HEADS, False),
        (IMAGE, True),
        (LARGE_IMAGE, True),
        ((2, 30, 40), False),
        ((2, 30, 40), True),
        ((2, 4, 5, 6, 7), True),
    ],
    ids=["heads", "image", "large image", "tokens", "sequence", "volume"],
)
def test_shapes_tell_the_order_of_dims(tmp_path, shape, moves, order, detail):
    value = values_of(shape)
    a, b = pair_of(tmp_path, channels_first(value) if moves else value, value, order, detail=detail)
    assert difference(a, b).equal and difference(b, a).equal
    assert compare(a, b).verdict is Verdict.EQUAL
    changed = value.copy()
    changed.flat[7] += 1e-3
    c = write(tmp_path / "changed", "jax", changed, order, detail=detail)
    assert compare(a, c).verdict is Verdict.BUG


@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize("shape", [SQUARE, LARGE_SQUARE], ids=["small", "large"])
@pytest.mark.parametrize("moves", [False, True], ids=["heads", "image"])
def test_values_tell_where_both_orders_fit(tmp_path, shape, moves, detail):
    value = 1e-9 * values_of(shape)
    a, b = pair_of(tmp_path, channels_first(value) if moves else value, value, Order.UNSTATED, detail=detail)
    assert difference(a, b).equal
    # Also where they are wrong, in either order.
    c = write(tmp_path / "wrong", "jax", 1.01 * value, Order.UNSTATED, detail=detail)
    found = difference(a, c)
    # What sketches estimate is within four of their standard deviations, sqrt(2 / 256) of the square each.
    assert found.beyond and found.difference == pytest.approx(0.01, rel=0.2 if detail == "sketch" else 1e-12)


def test_a_convolution_is_moved_where_both_orders_fit(tmp_path):
    """Whatever values say: that these are as near as they are would be a fault."""
    value = values_of(SQUARE)
    a, b = pair_of(tmp_path, value, value, Order.CONVOLUTION)
    assert difference(a, b).beyond
    c = write(tmp_path / "right", "torch", channels_first(value))
    assert difference(c, b).equal


def test_recordings_of_one_framework_lie_alike(tmp_path):
    value = values_of(SQUARE)
    a = write(tmp_path / "a", "jax", value, Order.UNSTATED)
    b = write(tmp_path / "b", "jax", channels_first(value), Order.UNSTATED)
    assert difference(a, b).beyond
    image = values_of(IMAGE)
    a = write(tmp_path / "c", "jax", image, Order.UNSTATED)
    b = write(tmp_path / "d", "jax", channels_first(image), Order.UNSTATED)
    assert difference(a, b).equal and difference(b, a).equal


@pytest.mark.parametrize("shape", [HEADS, IMAGE, SQUARE], ids=["heads", "image", "square"])
@pytest.mark.parametrize("moves", [False, True])
def test_order_is_told_at_other_world_sizes(tmp_path, shape, moves):
    value = values_of((4, *shape[1:]))
    a = write(tmp_path / "torch", "torch", channels_first(value) if moves else value, world_size=2)
    b = write(tmp_path / "jax", "jax", value, Order.UNSTATED)
    assert difference(a, b).equal


def test_values_of_one_rank_tell_the_order_on_all(tmp_path):
    value = values_of((4, *SQUARE[1:]))
    value[2:] = 1.0  # of the other rank: equal in any order
    a, b = pair_of(tmp_path, channels_first(value), value, Order.UNSTATED, world_size=2)
    assert difference(a, b).equal and difference(b, a).equal


def test_shapes_that_fit_in_no_order_are_noted(tmp_path):
    value = values_of((2, 5, 6, 3))
    a, b = pair_of(tmp_path, value.transpose(0, 2, 1, 3), value, Order.UNSTATED)
    assert re.search(r"\(2, 6, 5, 3\) in .* \(2, 5, 6, 3\) in .*channels_last=", compare(a, b).notes[0])
    c = write(tmp_path / "known", "jax", channels_first(value))
    assert "channels moved from the last dim to dim 1" in compare(a, c).notes[0]
    d = write(tmp_path / "other", "jax", values_of((2, 5, 6, 4)))
    assert "channels moved" not in compare(a, d).notes[0] and "are not compared" in compare(a, d).notes[0]


def test_perturbed_runs_are_moved_with_their_run(tmp_path):
    value = values_of(IMAGE)
    a, b = pair_of(tmp_path, channels_first(value), value, Order.UNSTATED)
    write(b.directory / perturbed_run_folder(1), "jax", value, Order.UNSTATED)
    _, moved = in_one_order(a, b)
    assert moved.activation_shape(0, 0, 0, *BLOCK) == (2, 3, 5, 5)
    assert moved.perturbed_runs()[0].activation(0, 0, 0, *BLOCK).shape == (2, 3, 5, 5)
    assert b.activation(0, 0, 0, *BLOCK).shape == IMAGE and moved.activation_order(0, 0, 0, *BLOCK) is Order.TORCH
    assert in_one_order(a, b)[1] is moved and in_one_order(a, a) == (a, a)


@pytest.mark.parametrize(
    ("form", "moves", "order"),
    [
        pytest.param(None, False, Order.UNSTATED, id="as recorded"),
        pytest.param(None, True, Order.TORCH, id="moved"),
        pytest.param(Rearrangement("n h w c -> n c h w"), False, Order.TORCH, id="rearranged"),
    ],
)
def test_views_state_their_order_of_dims(tmp_path, form, moves, order):
    run = write(tmp_path / "jax", "jax", values_of(IMAGE), Order.UNSTATED)
    view = mapped(run, ParamMap(()), run.manifest, {("other", "output"): (BLOCK, form)})
    view = view.with_channels_first({("other", "output")} if moves else ())
    assert view.activation_order(0, 0, 0, "other", "output") is order


@pytest.mark.parametrize(
    ("order", "stated"), [(Order.TORCH, "torch"), (Order.UNSTATED, "unstated"), (Order.CONVOLUTION, "convolution")]
)
def test_orders_are_stated_as_in_recordings_that_exist(tmp_path, order, stated):
    value = values_of(IMAGE)
    _, b = pair_of(tmp_path, channels_first(value), value, order)
    assert set(re.findall('"order": "(.*?)"', (b.directory / "rank00000/events.jsonl").read_text())) == {stated}


def test_wrong_orders_are_refused(tmp_path):
    made = manifest(1, steps=1, detail="sketch")
    create_recording(tmp_path / "r", made)
    large = values_of(LARGE_IMAGE)
    sketch = sketches_of([large])[0]
    with RecordingWriter(tmp_path / "r", made, 0) as writer:
        writer.batch(0, synthetic.digest(""), [0])
        writer.loss(0, 1.0)
        with pytest.raises(RecordingError, match="3 dims or more"):
            writer.activation(0, 0, *BLOCK, values_of((2, 3)), order=Order.UNSTATED)
        given: Any
        for given in ({"order": Order.UNSTATED}, {"moved": sketch}):
            with pytest.raises(RecordingError, match="the sketch with channels first exactly where"):
                writer.activation(0, 0, *BLOCK, sketch, large.shape, **given)
        writer.activation(0, 0, *BLOCK, values_of((2, 3, 4)), order=Order.UNSTATED)
        writer.end_step(0)
    for before, after in (('"unstated"', '"last"'), ('"shape": [2, 3, 4]', '"shape": [2, 12]')):
        create_recording(tmp_path / "r", made, overwrite=True)
        with RecordingWriter(tmp_path / "r", made, 0) as writer:
            writer.batch(0, synthetic.digest(""), [0])
            writer.loss(0, 1.0)
            writer.activation(0, 0, *BLOCK, values_of((2, 3, 4)), order=Order.UNSTATED)
            writer.end_step(0)
        synthetic.edit_events(tmp_path / "r", before, after)
        with pytest.raises(RecordingError, match="expected an order among"):
            Recording.open(tmp_path / "r")

"""Parameters without a gradient, not recorded or zeros, or with their initial value, at all recorded steps."""

import numpy as np
import pytest

from crossframe.recording.known_settings import FORWARD_ONLY
from crossframe.recording.unused_params import unused_params
from tests.core.helpers.synthetic import SHAPES, initial, manifest, record

TRAINED = [name for name in SHAPES if name != "block.k_bias"]  # whose gradient is zero but for rounding


def unused(directory, gradients, **made):
    """`gradients` gives what is recorded instead of the gradient of "embed" at a step, from an array of ones."""

    def tamper(phase, step, rank, name, array):
        return gradients(step, np.ones_like(array)) if (phase, name) == ("reduce", "embed") else array

    return unused_params(record(directory, manifest(**made), tamper=tamper), TRAINED)


@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        pytest.param(lambda step, ones: 0 * ones, ("embed",), id="zeros"),
        pytest.param(lambda step, ones: (step == 2) * ones, (), id="one step has it"),
        pytest.param(lambda step, ones: np.nan * ones, (), id="not finite"),
    ],
)
def test_zeros_at_all_steps_are_no_gradient(tmp_path, monkeypatch, detail, gradients, expected):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    assert unused(tmp_path, gradients, detail=detail) == expected


@pytest.mark.parametrize("detail", ["full", "sketch"])
@pytest.mark.parametrize(
    ("last", "expected"), [pytest.param(2, ("embed",), id="always"), pytest.param(1, (), id="not at the last step")]
)
def test_what_an_optimizer_leaves_as_it_was_is_unused(tmp_path, monkeypatch, detail, last, expected):
    monkeypatch.setattr("crossframe.recording.manifest.WHOLE", 0)
    made = manifest(detail=detail)

    def tamper(phase, step, rank, name, array):
        is_kept = (phase, name) == ("update", "embed") and step <= last
        return initial("embed", made.dtype).reshape(array.shape) if is_kept else array

    assert unused_params(record(tmp_path, made, tamper=tamper), TRAINED) == expected


def test_forward_alone_leaves_no_parameter_unused(tmp_path):
    zeros = lambda step, ones: 0 * ones  # noqa: E731
    assert unused(tmp_path / "a", zeros, settings={FORWARD_ONLY: True}) == ()
    assert unused(tmp_path / "b", zeros, settings={FORWARD_ONLY: False}) == ("embed",)


def test_a_recording_without_steps_shows_nothing(tmp_path):
    assert unused_params(record(tmp_path).with_num_steps(0), SHAPES) == ()

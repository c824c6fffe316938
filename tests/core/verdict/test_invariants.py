"""What holds of any two recordings: one compared with itself is equal, and the order of the two does not matter."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossframe.recording import Recording
from crossframe.verdict import PairVerdict, Verdict, compare
from crossframe.verdict.diagnosis.stated_optimizer import rule_of
from tests.core.helpers import synthetic
from tests.core.helpers.random_layouts import QUICK

PHASES = ("parameters", "unsharded", "input", "output", "forward", "backward", "reduce", "norm", "state", "update")
CHANGES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "doubled": lambda x, rank: 2 * x,
    "halved": lambda x, rank: x / 2,
    "negated": lambda x, rank: -x,
    "zeroed": lambda x, rank: 0 * x,
    "moved": lambda x, rank: x + 0.1,
    "reversed": lambda x, rank: x.reshape(-1)[::-1].reshape(x.shape).copy(),
    "noisy": lambda x, rank: x + 0.01 * np.random.default_rng(x.size).standard_normal(x.shape),
    "another on each rank": lambda x, rank: x * (1 + 0.1 * rank),
    "NaN": lambda x, rank: np.where(np.arange(x.size).reshape(x.shape) == 0, np.nan, x),
    "infinite": lambda x, rank: np.full_like(x, np.inf),
}


@st.composite
def faults(draw: st.DrawFn, most: int = 2) -> synthetic.Tamper:
    """Something that one run does otherwise: up to so many changes of a phase, on one rank or all, from a step on or at it."""
    made = []
    for _ in range(draw(st.integers(1, most))):
        phase, change = draw(st.sampled_from(PHASES)), CHANGES[draw(st.sampled_from(sorted(CHANGES)))]
        names = {"forward": [""], "norm": [""], "input": ["block"], "output": ["block", ""]}.get(
            phase, [*synthetic.SHAPES, "*"]
        )
        name, first, rank = draw(st.sampled_from(names)), draw(st.integers(0, 2)), draw(st.sampled_from([None, 0, 1]))
        lasts = draw(st.booleans())

        spec = phase, change, name, first, rank, lasts

        def tamper(at: str, step: int, who: int, what: str, x: np.ndarray, *, spec: Any = spec) -> np.ndarray:
            phase, change, name, first, rank, lasts = spec
            when = step == first or (lasts and step > first)
            hit = at == phase and name in ("*", what) and when and rank in (None, who)
            return change(x, who).astype(x.dtype) if hit else x

        made.append(tamper)
    return synthetic.both(*made)


def recorded(directory: str, name: str, *tampers: synthetic.Tamper, **options: Any) -> Recording:
    return synthetic.record(Path(directory) / name, synthetic.manifest(**options), tamper=synthetic.both(*tampers))


def place(found: PairVerdict) -> Any:
    """All that the order of recordings must not change; range and bound are measured by the first."""
    where = found.first_divergence
    at = where and (where.step, where.phase, where.unit, where.parameter, where.event)
    return found.verdict, at, found.diagnosis and found.diagnosis.signature


@settings(QUICK, max_examples=12)
@given(faults(4), st.sampled_from([1, 2, 3]), st.sampled_from(["float64", "float32", "bfloat16"]))
def test_a_recording_equals_itself_whatever_it_holds(tamper, world_size, dtype):
    with tempfile.TemporaryDirectory() as folder:
        a = recorded(folder, "a", tamper, world_size=world_size, dtype=dtype)
        assert compare(a, a).verdict is Verdict.EQUAL
        again = recorded(folder, "b", tamper, world_size=world_size, dtype=dtype)
        assert compare(a, again).verdict is Verdict.EQUAL


@settings(QUICK, max_examples=25)
@given(faults(), st.sampled_from(["float64", "float32"]), st.booleans())
def test_the_verdict_does_not_depend_on_the_order(tamper, dtype, rounds):
    with tempfile.TemporaryDirectory() as folder:
        size = 1e-15 if dtype == "float64" else 1e-8
        rounding = [synthetic.jitter(1, size)] if rounds else []
        a, b = recorded(folder, "a", dtype=dtype), recorded(folder, "b", *rounding, tamper, dtype=dtype)
        one, other = compare(a, b), compare(b, a)
        assert place(one) == place(other), (one.reason, one.diagnosis, other.reason, other.diagnosis)


@pytest.mark.parametrize("phase", ["parameters", "update", "state"])
def test_infinite_values_of_an_unknown_optimizer_warn_of_nothing(phase, tmp_path):
    def tamper(at: str, step: int, who: int, what: str, x: np.ndarray) -> np.ndarray:
        return np.full_like(x, np.inf) if at == phase else x

    run = recorded(str(tmp_path), "a", tamper)
    assert rule_of(run) is None and compare(run, run).verdict is Verdict.EQUAL


@settings(QUICK, max_examples=8)
@given(faults(3), st.sampled_from(["class", "kind", "command"]))
def test_what_changes_no_number_changes_no_verdict(tamper, what):
    other = {
        "class": {"model": "net"},
        "kind": {"kind": "per_param"},
        "command": {"settings": {"command": "python x"}},
    }[what]
    with tempfile.TemporaryDirectory() as folder:
        a = recorded(folder, "a")
        same, renamed = recorded(folder, "b", tamper), recorded(folder, "c", tamper, **other)
        if what == "kind":  # what a rank holds, and so what one rank alone changes, is another part
            same = recorded(folder, "d", **other)
            assert compare(a, same).verdict is Verdict.EQUAL
        else:
            assert place(compare(a, same)) == place(compare(a, renamed))

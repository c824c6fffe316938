"""Where two traces of operators part, on traces made by hand."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console

import crossframe
from crossframe.cli.explain import answer
from crossframe.draw.operators import operators_svg
from crossframe.errors import RecordingError, UsageError
from crossframe.operators import Judged, Operator, SourceLine, Trace, find, signature_of, source
from crossframe.operators.source import UserCode
from crossframe.operators.target import JUMP, target_of
from crossframe.recording.event_format import FORWARD, UPDATE
from crossframe.verdict import compare
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from crossframe.verdict.result import Judged as Compared
from tests.core.helpers.synthetic import manifest, only, record

X = np.arange(1.0, 7.0).reshape(2, 3)
SVG = "{http://www.w3.org/2000/svg}"


def trace(*operators):
    """Operators given as (name, inputs, output), whose last output is the result."""
    made = [
        Operator(i, name, "", FORWARD, "", None, tuple(map(signature_of, inputs)), (signature_of(output),))
        for i, (name, inputs, output) in enumerate(operators)
    ]
    return Trace(made, made[-1].outputs)


def stated_in_full(index):
    """An operator each of whose fields has another value."""
    values = [signature_of(X + i, "bfloat16") for i in range(3)]
    line = SourceLine("net.py", 7, "forward", "return x * 2")
    judged = Judged(0.25, 0.5)
    return Operator(index, "mul", "2", "backward", "h.0", line, (values[0],), (values[1],), judged, (values[2],))


@pytest.mark.parametrize("tolerance", [None, 1e-6])
def test_readers_of_a_differing_table_are_named(tolerance):
    tables = [np.full(3, 2.0), np.array([2.0, 2.0, 3.0])]
    a, b = (trace(("mul", (X, table), X * table), ("exp", (X * table,), np.exp(X * table))) for table in tables)
    first = find(a, b, tolerance)
    assert first.a is not None and first.b is not None and first.from_outside
    assert (first.a.name, first.b.name) == ("mul", "mul")


def test_operators_count_before_readers_of_tables():
    table = np.full(3, 2.0)
    a = trace(("mul", (X, table), X * table), ("add", (X * table,), X * table + 1))
    b = trace(
        ("mul", (X, table + 1), X * (table + 1)), ("exp", (X,), np.exp(X)), ("add", (np.exp(X), X * (table + 1)), X)
    )
    first = find(a, Trace(b.operators, [signature_of(np.exp(X)), signature_of(X * (table + 1))]), None)
    assert first.b is not None and first.b.name == "exp" and not first.from_outside


def test_a_result_that_is_a_multiple_states_its_factor():
    a, b = (trace(("mul", (X,), factor * X), ("exp", (factor * X,), np.exp(factor * X))) for factor in (2.0, 3.0))
    assert find(a, b, 1e-6).factor == pytest.approx(1.5)
    assert find(b, a, 1e-6).factor == pytest.approx(1 / 1.5)
    other = trace(("mul", (X,), X**2))
    assert find(a, other, 1e-6).factor is None


def test_results_of_a_part_without_modules_are_what_no_operator_reads():
    a, b = (trace(("square", (X,), X**2), ("mul", (X**2,), factor * X**2)) for factor in (2.0, 3.0))
    found = find(Trace(a.operators, ()), Trace(b.operators, ()), None)
    assert (found.a, found.b) == (a.operators[1], b.operators[1])


def test_values_that_are_not_numbers_are_equal_whatever_their_bits():
    values = np.array([0x7FF8000000000000, 0xFFF8000000000001, 0x3FF0000000000000], np.uint64).view(np.float64)
    assert signature_of(values) == signature_of(np.array([np.nan, np.nan, 1.0]))
    assert signature_of(np.array([-0.0, 1.0])) == signature_of(np.array([0.0, 1.0]))


def test_another_way_to_compute_the_same_is_not_named():
    e, y = np.exp(X), np.exp(X) + 1
    fused = trace(("fused", (X,), y), ("mul", (y,), 2 * y), ("mul", (2 * y, X), 2 * y * X))
    eager = trace(("exp", (X,), e), ("add", (e,), y), ("mul", (y,), 3 * y), ("mul", (3 * y, e), 3 * y * e))
    first = find(fused, eager, 1e-6)
    assert first.b is not None and first.b.index == 2


@pytest.mark.parametrize("error", [1e-7, 1e-3])
def test_operators_of_one_run_are_held_against_bounds(tmp_path, capsys, error):
    line = SourceLine("s.py", 3, "f", "y = exp(x)")
    exp = Operator(0, "exp", "", FORWARD, "", line, (), (signature_of(X),), Judged(error, 1e-5))
    run = Trace([exp, replace(exp, index=1, name="random", judged=None)], ())
    status = answer(run, record(tmp_path / "r"), 0, as_json=False, console=Console(width=200))
    said = capsys.readouterr().out
    assert ("s.py:3: y = exp(x)" in said, "1 of 2 operators of step 0 of r" in said) == (error > 1e-5, True)
    assert status == (error > 1e-5)


def test_values_inside_of_a_fused_operator_are_partners():
    mean, centred = X.mean(-1, keepdims=True), X - X.mean(-1, keepdims=True)
    wrong = np.square(centred).sum(-1) / 2
    fused = trace(("norm", (X,), np.square(centred).mean(-1)))
    shown = replace(fused.operators[0], interior=tuple(map(signature_of, (mean, centred, np.square(centred)))))
    eager = trace(
        ("mean", (X,), mean),
        ("sub", (X, mean), centred),
        ("square", (centred,), np.square(centred)),
        ("div", (np.square(centred),), wrong),
    )
    assert [find(a, eager, 1e-6).b.name for a in (fused, Trace([shown], fused.results))] == ["mean", "div"]  # type: ignore[union-attr]


@pytest.mark.parametrize("number", [2, 3])
def test_parts_of_a_packed_value_are_partners(number):
    packed = np.random.default_rng(0).normal(size=(4, 6 * number))
    parts = np.split(packed, number, -1)
    a = trace(("mm", (X,), packed), *(("neg", (part,), -part) for part in parts))
    b = trace(*(("mm", (X,), part) for part in parts), ("exp", (parts[-1],), np.exp(parts[-1])))
    first = find(a, b, 1e-6)
    assert first.b is not None and first.b.name == "exp" and first.num_matched[1] == number
    assert find(b, a, 1e-6).num_matched[1] == 1


@pytest.mark.parametrize(
    ("differences", "phase", "name", "tolerance"),
    [
        pytest.param((1e-7, 2e-6, 1e-3), FORWARD, "b", JUMP * 2e-6, id="jump"),
        pytest.param((0.0, 1e-3, 2e-3), FORWARD, "a", JUMP * 2**-24, id="from equal values"),
        pytest.param((1e-7, 2e-6, 9e-6), UPDATE, "weight", bounds_for("float32").parameter, id="no jump"),
    ],
)
def test_explain_looks_where_a_difference_jumps(tmp_path, differences, phase, name, tolerance):
    a, b = record(tmp_path / "a"), record(tmp_path / "b")
    names = zip(("x", "a", "b"), differences, strict=True)
    forward = [Compared(0, FORWARD, "activation", "", each, d, None, beyond=False, equal=not d) for each, d in names]
    last = Compared(0, UPDATE, "tensor", "", "weight", 0.5, 90.0, beyond=True, equal=False)
    target = target_of(a, b, replace(compare(a, b), judged=(*forward, last), dtype="float32"))
    assert target is not None and (target.phase, target.name) == (phase, name)
    assert target.tolerance == pytest.approx(tolerance)


def test_explain_refuses_values_that_no_operator_computes_and_coarse_dtypes(tmp_path):
    a, b = record(tmp_path / "a"), record(tmp_path / "b", manifest(framework="jax"))
    assert target_of(a, b, compare(a, b)) is None
    moved = record(tmp_path / "moved", tamper=only("parameters", "embed", lambda x: 1.5 * x))
    with pytest.raises(
        UsageError, match="the first difference is the parameters value of 'embed' at step 0, which no operator"
    ):
        target_of(a, moved, compare(a, moved))
    coarse = [
        record(tmp_path / f"coarse {framework}", manifest(dtype="bfloat16", framework=framework), tamper=tamper)
        for framework, tamper in (("torch", None), ("jax", only("reduce", "embed", lambda x: x * x.dtype.type(8))))
    ]
    with pytest.raises(
        UsageError, match="explain: bfloat16 is too coarse to match values of different programs; record both"
    ):
        target_of(*coarse, compare(*coarse))


def test_signatures_of_other_sizes_are_of_other_values():
    array = np.random.default_rng(0).normal(size=(4, 6))
    same, short, lost = (signature_of(each) for each in (array.T.copy(), array[:2], np.where(array > 1, np.nan, array)))
    assert signature_of(array).is_close(same, 0.0) and signature_of(array).is_multiple(same, 0.0)
    for other in (short, lost):
        assert not signature_of(array).is_multiple(other, 1e9) and not signature_of(array).is_close(other, 1e9)


@pytest.mark.parametrize(
    "module", ["crossframe.cli.entry", "crossframe.cli.commands", "crossframe.cli.console", "crossframe.mesh"]
)
@pytest.mark.parametrize("installed", [False, True])
def test_lines_of_the_command_are_not_the_users(module, installed, monkeypatch):
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    if installed:
        monkeypatch.setattr(source, "_INSTALLED", (str(Path(crossframe.__file__).parents[1]),))
    assert not UserCode().has(spec.origin)
    assert UserCode().has(spec.origin.replace("/experiments/", "/own/").replace("/crossframe/", "/own/"))


def test_operators_near_the_difference_are_drawn():
    line = SourceLine(
        "/models/net.py", 7, "forward", "return torch.exp(x) * self.scale + 1 # <& a long line " + "x" * 80
    )
    e = np.exp(X)
    a = trace(("exp", (X,), e), ("mul", (e,), 2 * e), ("add", (2 * e,), 2 * e + 1))
    b = trace(("exp", (X,), e), ("mul", (e,), 3 * e), ("add", (3 * e,), 3 * e + 1))
    a = Trace([replace(op, line=line) for op in a.operators], a.results)
    drawn = ElementTree.fromstring(operators_svg(find(a, b, None), ("right", "wrong & new")))
    texts = [each.text or "" for each in drawn.iter(f"{SVG}text")]
    assert [each for each in texts if each in ("exp", "mul", "add")] == ["exp", "mul", "add"] * 2
    assert texts.count("no line of the script") == 3 and sum(each.startswith("net.py:7: return") for each in texts) == 3
    kinds = [each.get("class") for each in drawn.iter(f"{SVG}rect")]
    assert kinds.count("outline") == 4 and kinds.count("hatch-waiting") == 2  # mul and add differ, mul is the first
    dashed = [each for each in drawn.iter(f"{SVG}path") if "dashed" in (each.get("class") or "")]
    assert len(dashed) == 1  # exp has the same output in both
    width, height = float(drawn.get("width", "nan")), float(drawn.get("height", "nan"))
    rectangles = {
        tuple(float(each.get(name, "nan")) for name in ("x", "y", "width", "height"))
        for each in drawn.iter(f"{SVG}rect")
        if each.get("class") == "panel"
    }
    assert len(rectangles) == 6
    starts = [(float(each.get("x", "nan")), float(each.get("y", "nan"))) for each in drawn.iter(f"{SVG}text")]
    for x, y, w, h in rectangles:
        assert sum(x < at < x + w and y < line < y + h for at, line in starts) == 3
        assert 0 < x < x + w < width and 0 < y < y + h < height
        assert sum(x < x2 + w2 and x2 < x + w and y < y2 + h2 and y2 < y + h for x2, y2, w2, h2 in rectangles) == 1
    assert max(x + w for x, _, w, _ in rectangles) == width - min(x for x, *_ in rectangles)  # equal margins


@pytest.mark.parametrize("change", ["noise", "larger", "smaller"])
def test_partners_are_found_among_many_values_of_one_size(change):
    rng, tolerance = np.random.default_rng(0), 1e-2
    values = [float(np.exp(rng.normal())) * rng.normal(size=(40, 50)) for _ in range(30)]

    def moved(value):
        noise = rng.normal(size=value.shape) * np.linalg.norm(value) / np.sqrt(value.size)
        return value + 0.5 * tolerance * {"noise": noise, "larger": value, "smaller": -value}[change]

    others = [moved(value) for value in values]
    a, b = (trace(*(("relu", (), value) for value in side)) for side in (values, others))
    assert find(a, b, tolerance).num_matched == (30, 30)
    assert find(a, b, tolerance / 10).num_matched == (0, 0)


def test_a_trace_that_was_cut_off_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    made = trace(("exp", (X,), np.exp(X)))
    made = Trace([*made.operators, stated_in_full(1)], made.results)
    made.write(path)
    found = Trace.read(path)
    assert (list(found.operators), list(found.results)) == (list(made.operators), list(made.results))
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(RecordingError, match=r"expected a trace of operators, but it has no results.*trace again"):
        Trace.read(path)

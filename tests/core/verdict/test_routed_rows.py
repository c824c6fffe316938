"""Experts whose tokens two implementations gather in different orders."""

from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.recording import RecordingWriter
from crossframe.verdict import Verdict, compare
from crossframe.verdict.measure import routed_rows
from crossframe.verdict.measure.routed_rows import matching_rows, may_be_reordered
from tests.core.helpers import synthetic

EXPERTS, WIDTH, BOUND = 3, 6, 1e-11


def activations(step, *, by, noise=0, fault="", repeated=0):
    """A module with a router and experts: what its modules get and return, by (module, use).

    Args:
        by: (indices of tokens) to the order in which an expert gets them.
        fault: what is wrong: "weight" of the second expert, "tokens" that it gets, or "output" that is added to another token.
        repeated: the number of equal tokens, as of padding.
    """
    random = np.random.default_rng([step, 1])
    tokens = random.normal(size=(2, 60, WIDTH))
    tokens[0, :repeated] = tokens[0, 0]
    flat, chosen = tokens.reshape(-1, WIDTH), random.integers(EXPERTS, size=120)
    weights = random.normal(size=(EXPERTS, 2, WIDTH, WIDTH))
    found, out = {("moe.gate", "input"): tokens}, np.zeros_like(flat)
    for expert in range(EXPERTS):
        taken = by(np.flatnonzero(chosen == expert))
        is_wrong, name = bool(fault) and expert == 1, f"moe.experts.{expert}"
        got = flat[(taken + (is_wrong and fault == "tokens")) % len(flat)]
        up = got @ (weights[expert, 0] * (1.001 if is_wrong and fault == "weight" else 1.0))
        down = np.tanh(up) @ weights[expert, 1]
        out[np.roll(taken, 1) if is_wrong and fault == "output" else taken] = down
        found |= {(name, "input"): got, (f"{name}.up", "input"): got, (f"{name}.up", "output"): up}
        found |= {(f"{name}.down", "input"): np.tanh(up), (f"{name}.down", "output"): down, (name, "output"): down}
    found["moe.sum", "output"] = out.reshape(tokens.shape)
    rounding = np.random.default_rng([step, noise])
    return {at: array * (1 + 2.0**-53 * rounding.uniform(-noise, noise, array.shape)) for at, array in found.items()}


def by_token(tokens):
    return tokens


def backwards(tokens):
    return tokens[::-1]


def at_random(tokens):
    return np.random.default_rng(3).permutation(tokens)


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Record a model with experts as a run of a framework."""

    def made(framework, *, tamper=None, model="toy", settings=None, **options):
        own = RecordingWriter.activation

        def activation(writer, step, microbatch, module, use, value):
            own(writer, step, microbatch, module, use, value)
            if (module, use) == ("block", "input"):
                for at, array in activations(step, **options).items():
                    own(writer, step, microbatch, *at, array)

        with monkeypatch.context() as patched:
            patched.setattr(RecordingWriter, "activation", activation)
            number = len(list(tmp_path.iterdir()))
            manifest = synthetic.manifest(framework=framework, model=model, settings=settings or {})
            return synthetic.record(tmp_path / f"{framework}{number}", manifest, tamper=tamper)

    return made


@pytest.mark.parametrize("order", [backwards, at_random])
@pytest.mark.parametrize("repeated", [0, 20])
def test_experts_may_get_their_tokens_in_any_order(record, order, repeated):
    a = record("torch", by=by_token, repeated=repeated)
    b = record("jax", by=order, noise=1, repeated=repeated)
    for pair in ((a, b), (b, a)):
        found = compare(*pair)
        assert found.verdict is Verdict.ROUNDING
        assert "the rows of 'moe.experts.0' and of 2 more modules come in different orders" in str(found.notes)


@pytest.mark.parametrize(
    ("fault", "module", "use"),
    [
        pytest.param("weight", "moe.experts.1.up", "output", id="in an expert"),
        pytest.param("tokens", "moe.experts.1", "input", id="in the router"),
        pytest.param("output", "moe.sum", "output", id="after the experts"),
    ],
)
def test_faults_of_experts_in_another_order_are_located(record, fault, module, use):
    a = record("torch", by=by_token)
    for order in (by_token, at_random):
        found = compare(a, record("jax", by=order, noise=1, fault=fault, tamper=synthetic.OTHER_LOSS))
        where = found.first_divergence
        assert found.verdict is Verdict.BUG and (where.module, where.event) == (module, use), order


def test_more_rows_than_are_matched_are_left_out_unless_values_differ(record, monkeypatch):
    monkeypatch.setattr(routed_rows, "MOST_ROWS", 10)
    a = record("torch", by=by_token)
    found = compare(a, record("jax", by=at_random, noise=1))
    assert found.verdict is Verdict.ROUNDING and "in different orders" in str(found.notes)
    where = compare(a, record("jax", by=at_random, noise=1, fault="weight")).first_divergence
    assert (where.module, where.event) == ("moe.experts.1.up", "output")


def test_sums_over_rows_in_another_order_are_no_evidence(record):
    """Two models of one framework, whose programs are the same but for their source."""
    program = {"program": {"device": "cpu", "deterministic": True}}
    a = record("torch", by=by_token, settings=program)
    b = record("torch", by=at_random, model="other", settings=program, tamper=synthetic.jitter(1, 1e-16))
    found = compare(a, b)
    assert found.verdict is Verdict.ROUNDING and "the rows of 'moe.experts.0' come in another order" in str(found.bits)


class Rows:
    """What `RoutedRows` reads of a recording: arrays by (microbatch, module, use)."""

    def __init__(self, arrays, num_samples):
        self._arrays, self._batch = arrays, SimpleNamespace(sample_ids=range(num_samples))

    def activations(self, step):
        return list(self._arrays)

    def activation(self, step, rank, *at):
        return self._arrays[at]

    def activation_shape(self, step, rank, *at):
        return self._arrays[at].shape

    def activation_sketch(self, step, rank, *at):
        return None

    def batch(self, step, rank):
        return self._batch


@pytest.mark.parametrize(
    ("other", "rows", "samples", "microbatch", "reordered"),
    [
        pytest.param("h.1", 8, 12, 0, True, id="of one kind"),
        pytest.param("up", 8, 11, 0, True, id="of another kind"),
        pytest.param("up", 8, 12, 0, False, id="the samples"),
        pytest.param("up", 8, 24, 1, False, id="the samples of a microbatch"),
        pytest.param("h.1", 12, 11, 0, False, id="as many"),
    ],
)
def test_rows_are_routed_where_other_modules_have_another_number(other, rows, samples, microbatch, reordered):
    draw = np.random.default_rng(0).normal
    a, rest = (
        draw(size=(12, 4)),
        {(0, other, "input"): draw(size=(rows, 4)), (microbatch, "z", "input"): draw(size=(8, 5))},
    )
    runs = [Rows({(0, "h.0", "input"): each} | rest, samples) for each in (a, a[::-1])]
    pair = SimpleNamespace(a=runs[0], b=runs[1], two_programs=True, bounds=SimpleNamespace(parameter=BOUND), routed={})
    found = routed_rows.RoutedRows(pair, 0).in_one_order((0, "h.0", "input"), 0, (a, a[::-1], None))
    assert found is not None and np.array_equal(found[1], a if reordered else a[::-1])
    assert pair.routed == ({"h.0": 0} if reordered else {})
    pair.b = Rows({(0, "h.0", "input"): a[1:]} | rest, samples)  # which got another number of rows
    sides = (a, a[::-1], None)
    assert routed_rows.RoutedRows(pair, 0).in_one_order((0, "h.0", "input"), 0, sides) is sides
    shorter = (a[1:], a[::-1][1:], None), (a, a[1:], None)
    assert all(routed_rows.RoutedRows(pair, 0).in_one_order((0, "h.0", "input"), 0, each) is each for each in shorter)


def test_rows_of_one_implementation_are_not_reordered(record):
    found = compare(record("torch", by=by_token), record("torch", by=at_random))
    assert found.verdict is Verdict.BUG and found.first_divergence.module == "moe.experts.0"


def test_rows_that_are_related_in_place_are_not_reordered():
    steps = np.arange(200)[:, None] * np.linspace(0.01, 0.02, 4)
    smooth = np.sin(steps)
    assert matching_rows(smooth, np.roll(smooth, 1, axis=0), BOUND) is None
    assert matching_rows(smooth, smooth[::-1], BOUND).tolist() == list(range(199, -1, -1))


@pytest.mark.parametrize("num_rows", [2, 300, 2048])
def test_rows_are_matched_one_by_one(num_rows):
    random = np.random.default_rng(num_rows)
    a = random.normal(size=(num_rows, 5)) + 3 * np.arange(5)
    a[: num_rows // 4] = a[random.integers(num_rows // 8 + 1, size=num_rows // 4)]  # several that are equal
    order = np.roll(random.permutation(num_rows), 1) if num_rows > 2 else np.array([1, 0])
    b = a[order] * (1 + 1e-14 * random.normal(size=a.shape))
    found = matching_rows(a, b, BOUND)
    assert sorted(found) == list(range(num_rows)) and np.abs(b[found] - a).max() < 1e-12
    b[num_rows // 2] += 1e-6
    assert matching_rows(a, b, BOUND) is None


def test_rows_that_are_equal_in_place_stay_there():
    a = np.random.default_rng(0).normal(size=(40, 5))
    for b in (a, a * (1 + 1e-13), a + np.eye(40, 5) * 1e-12):
        assert matching_rows(a, b, BOUND).tolist() == list(range(40))
    assert matching_rows(0 * a, 0 * a, BOUND) is None
    for value in (np.nan, np.inf):
        wrong = a.copy()
        wrong[3, 2] = value
        assert all(matching_rows(*pair, BOUND) is None for pair in ((a, wrong), (wrong, a), (wrong, wrong)))


@pytest.mark.parametrize(("distance", "matches"), [(0.49, True), (0.51, False)])
def test_rows_match_up_to_half_of_their_spread(distance, matches):
    """The bound alone would allow twice the distance."""
    random = np.random.default_rng(0)
    a, order = random.normal(size=(30, 64)), random.permutation(30)
    away = random.normal(size=a.shape)
    spread = np.sqrt(np.square(a - a.mean(axis=0)).sum() / 30)
    b = (a + distance * spread * away / np.linalg.norm(away, axis=1, keepdims=True))[order]
    found = matching_rows(a, b, 1.0)
    assert (None if found is None else found.tolist()) == (np.argsort(order).tolist() if matches else None)


def test_rows_may_be_reordered_if_their_columns_are_equal_but_not_in_place():
    random = np.random.default_rng(0)
    a, rounding = random.normal(size=(400, 5)) + 3 * np.arange(5), 1 + 1e-14 * random.normal(size=(400, 5))
    some = np.concatenate([random.permutation(20), np.arange(20, 400)])
    for order in (random.permutation(400), some):
        b = a[order] * rounding
        assert may_be_reordered(a, b, BOUND) and may_be_reordered(b, a, BOUND)
        b[7] += 1e-6
        assert not may_be_reordered(a, b, BOUND)
        for value in (np.nan, np.inf):
            wrong = a[order]
            wrong[3, 2] = value
            assert not any(may_be_reordered(*pair, BOUND) for pair in ((a, wrong), (wrong, a), (wrong, wrong)))
    assert not may_be_reordered(a, a * rounding, BOUND)
    related = np.sin(np.arange(400)[:, None] * np.linspace(0.01, 0.02, 5))
    assert not may_be_reordered(related, np.roll(related, 1, axis=0), BOUND)

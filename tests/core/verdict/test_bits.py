"""Two recordings of the same program that differ in bits."""

from dataclasses import replace

import numpy as np
import pytest

from crossframe.errors import RecordingError
from crossframe.recording import Recording, Schedule
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.program import PROGRAM
from crossframe.report.sentences import headline
from crossframe.verdict import Verdict, compare, evidence
from crossframe.verdict.evidence import is_few_roundings
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.measure.quantities import Quantity
from tests.core.helpers import synthetic
from tests.core.helpers.quantities import scaled
from tests.core.helpers.synthetic import both, jitter

CPU = {"device": "cpu", "threads": 1, "deterministic": True, "compiled": False, "source": "1", "environment": "1"}


def made(dtype="float32", *, command="python train.py", **program):
    return synthetic.manifest(dtype=dtype, settings={COMMAND: command, PROGRAM: CPU | program})


def nudged(phase, name, step=0):
    """One element, one unit in the last place away."""

    def change(at, when, rank, what, array):
        if (at, when, what) != (phase, step, name):
            return array
        array = array.copy()
        array.reshape(-1)[1] = np.nextafter(array.reshape(-1)[1], array.dtype.type(np.inf))
        return array

    return change


@pytest.fixture
def pair(tmp_path):
    def record(tamper=None, *, first=None, second=None, perturbed_runs=0, spread=1e-3):
        second = second or made(source="2")
        a = synthetic.record(tmp_path / "a", first or made())
        for i in range(1, perturbed_runs + 1):
            synthetic.record(a.directory / perturbed_run_folder(i), first or made(), tamper=jitter(i, spread))
        return a, synthetic.record(tmp_path / "b", second, tamper=tamper)

    return record


def test_a_quantity_of_another_dtype_is_located(pair):
    def wider(phase, step, rank, name, array):
        return (array * (1 + 1e-6)).astype(np.float64) if (phase, step, name) == ("backward", 0, "block.w") else array

    found = compare(*pair(wider))
    assert found.first_divergence and (found.first_divergence.step, found.first_divergence.parameter) == (0, "block.w")


@pytest.mark.parametrize(("factor", "verdict"), [(1.5, Verdict.BUG), (1.001, Verdict.DIFFERENT)])
def test_what_exceeds_its_bound_after_equal_steps_is_a_bug(pair, factor, verdict):
    """In float32 without perturbed runs: no optimizer has amplified anything, since all before it is equal."""
    found = compare(*pair(scaled("reduce", "embed", factor, step=1)))
    assert found.verdict is verdict, found.reason
    assert found.first_divergence and (found.first_divergence.step, found.first_divergence.phase) == (1, "reduce")


def test_a_reproduced_cause_is_a_bug_within_a_wide_spread(pair, monkeypatch):
    """Two perturbed runs that are far apart allow any gradient; that of one rank alone is no rounding all the same."""
    monkeypatch.setattr(evidence, "_LEAST_ELEMENTS", 12)  # of embed
    samples = range(0, synthetic.SAMPLES, 2)
    alone = np.mean([synthetic.sample_grad(0, each, "embed") for each in samples], axis=0).astype(np.float32)
    a, b = pair(synthetic.only("reduce", "embed", lambda array: alone), perturbed_runs=2, spread=0.1)
    found = compare(a, b)
    assert not any(each.beyond for each in found.judged)
    assert found.verdict is Verdict.BUG and found.diagnosis and found.diagnosis.signature == "missing_rank", (
        found.reason
    )
    assert found.first_divergence and found.first_divergence.phase == "reduce"


def test_a_difference_after_steps_without_tensors_says_where_it_may_have_begun(tmp_path):
    """Only the losses of step 1 are recorded, so that it is not known what the loss of step 2 was computed from."""
    one, other = (replace(made(source=source), schedule=Schedule(1, 2), steps=3) for source in ("1", "2"))
    a = synthetic.record(tmp_path / "a", one)
    b = synthetic.record(tmp_path / "b", other, tamper=scaled("forward", "", 1.00001, step=2))
    found = compare(a, b)
    assert found.verdict is Verdict.DIFFERENT and "everything recorded before it is bitwise equal" in found.reason
    asked = "record both again with windows=[(1, 3)] (--window 1:3)"
    assert (
        found.unrecorded
        == f"it began at one of the steps 1 to 2: only losses were recorded before step 2; to locate it, {asked}"
    )
    text = headline({"verdict": found.verdict.value, "pairs": [found.to_json()]}, "")
    assert f"although everything recorded before it is equal in every bit; {found.unrecorded}" in text


@pytest.mark.parametrize("phase", ["output", "forward", "backward", "reduce", "norm", "update"])
def test_a_few_roundings_in_one_program_are_rounding(pair, phase):
    """As if a value were computed by another formula."""
    name = "" if phase in ("forward", "norm") else "block" if phase == "output" else "block.w"

    def change(at, step, rank, what, array):
        noise = np.random.default_rng([step, rank]).uniform(-(2.0**-24), 2.0**-24, size=array.shape)
        return (array * (1 + noise)).astype(array.dtype) if (at, step, what) == (phase, 0, name) else array

    recordings = pair(change)
    found = compare(*recordings)
    assert found.verdict is Verdict.ROUNDING and found.first_divergence is None, found.reason
    assert "both are of the same program, and bits first differ at step 0" in found.reason
    assert "a few roundings" in found.reason and "with --bitwise" in found.reason
    strict = compare(*recordings, bitwise=True)
    assert strict.verdict is Verdict.DIFFERENT and strict.first_divergence is not None
    assert "--bitwise" not in compare(*recordings, bitwise=False).reason


@pytest.mark.parametrize("phase", ["backward", "reduce"])
def test_other_bits_of_a_zero_gradient_are_rounding(pair, phase):
    """Its values are nothing but rounding, which another order of a sum changes altogether."""
    recordings = pair(synthetic.only(phase, "block.k_bias", lambda array: array[::-1] - array))
    found = compare(*recordings)
    assert found.verdict is Verdict.ROUNDING and found.first_divergence is None, found.reason
    assert "in a gradient that is zero up to rounding, although everything before it is equal" in found.reason
    assert compare(*recordings, bitwise=True).verdict is Verdict.DIFFERENT


def test_another_update_of_a_zero_gradient_parameter_is_no_rounding(pair):
    """Its gradient is the same, so the optimizer differs."""
    found = compare(*pair(scaled("update", "block.k_bias", 1.5)))
    assert found.verdict is Verdict.DIFFERENT, found.reason
    assert found.first_divergence and found.first_divergence.parameter == "block.k_bias"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda x: x * (1 + 1e-6 * np.sign(np.sin(np.arange(x.size).reshape(x.shape)))), id="more"),
        pytest.param(lambda x: x * (1 + 2.0**-22), id="a factor"),
    ],
)
def test_more_than_a_few_roundings_or_a_known_fault_is_no_rounding(pair, change):
    found = compare(*pair(synthetic.only("reduce", "embed", lambda array: change(array).astype(array.dtype))))
    assert found.verdict is Verdict.DIFFERENT, found.reason


def test_other_bits_in_one_program_are_no_rounding_if_bits_are_asked_for(pair):
    found = compare(*pair(nudged("output", "block")), bitwise=True)
    assert found.first_divergence and found.first_divergence.module == "block"
    assert found.verdict is Verdict.DIFFERENT
    assert "within its bound" in found.reason and "--repeat" in found.reason
    assert (where := found.first_divergence) is not None
    assert (where.step, where.phase, where.event, where.unit, where.start, where.stop) == (
        0,
        "forward",
        "output",
        "block",
        1,
        2,
    )
    assert found.parted and found.parted.name == "output of block"


def test_other_bits_of_a_compiled_program_may_come_from_elsewhere(pair, tmp_path):
    a, b = pair(nudged("output", "block"), first=made(compiled=True), second=made(compiled=True, source="2"))
    once = "everything before it is bitwise equal (the whole program is compiled, so the change may be elsewhere in the step)"
    found = compare(a, b, bitwise=True)
    assert found.verdict is Verdict.DIFFERENT and f"{once}. If the run may be nondeterministic, record" in found.reason
    again = synthetic.record(tmp_path / "again", made(compiled=True))
    found = compare(a, b, repeats=[again], bitwise=True)
    assert found.verdict is Verdict.DIFFERENT and f"{once}; losses differ by" in found.reason


@pytest.mark.parametrize(
    ("size", "compiled", "verdict"),
    [
        pytest.param(1e-6, True, Verdict.ROUNDING, id="compiled"),
        pytest.param(1e-6, False, Verdict.DIFFERENT, id="not compiled"),
        pytest.param(2e-2, True, Verdict.DIFFERENT, id="more than the usual share of the bound"),
    ],
)
def test_a_compiled_program_rounds_in_another_way_everywhere(pair, size, compiled, verdict):
    programs = {"first": made(compiled=compiled), "second": made(compiled=compiled, source="2")}
    signs = np.sign(np.sin(np.arange(100)))

    def change(array):
        return (array * (1 + size * signs[: array.size].reshape(array.shape))).astype(array.dtype)

    recordings = pair(synthetic.only("reduce", "embed", change), **programs, perturbed_runs=4)
    found = compare(*recordings)
    assert found.verdict is verdict, found.reason
    in_words = "less than 30% of its bound, in a compiled program, although everything before it is equal"
    assert (in_words in found.reason) is (verdict is Verdict.ROUNDING), found.reason
    assert compare(*recordings, bitwise=True).verdict is Verdict.DIFFERENT


def test_within_perturbed_runs_the_first_bits_are_located(pair):
    """What later steps do is within the spread of the perturbed runs, too."""
    found = compare(*pair(both(nudged("reduce", "block.w", 1), jitter_after_first), perturbed_runs=4), bitwise=True)
    assert found.verdict is Verdict.DIFFERENT, found.reason
    assert (where := found.first_divergence) is not None
    assert (where.step, where.phase, where.parameter) == (1, "reduce", "block.w")


def jitter_after_first(phase, step, rank, name, array):
    return jitter(9, 1e-3)(phase, step, rank, name, array) if step == 2 else array


def test_a_bug_is_located_where_bits_first_differ(pair):
    found = compare(*pair(both(nudged("backward", "embed"), scaled("reduce", "embed", 1.5))))
    assert found.verdict is Verdict.BUG
    assert found.first_divergence and found.first_divergence.phase == "backward"


@pytest.mark.parametrize("earlier", [nudged("output", "block"), scaled("output", "block", 1.001)], ids=["ulp", "part"])
def test_a_compiled_bug_stays_where_bounds_place_it(pair, earlier, request):
    manifests = {"first": made(compiled=True), "second": made(compiled=True, source="2")}
    found = compare(*pair(both(earlier, scaled("reduce", "embed", 1.5)), **manifests))
    assert found.verdict is Verdict.BUG
    assert found.first_divergence and found.first_divergence.phase == "reduce"
    # One unit in the last place may be rounding of the other program, a thousandth is not.
    said = "bits first differ at step 0 in the output of block of rank 1, by 1.0e-03 between a and b, within its bound"
    assert (said in found.reason) is (request.node.callspec.id == "part")


@pytest.mark.parametrize(
    ("second", "why"),
    [
        pytest.param(made(threads=2, source="2"), "threads differs: 1 in a, 2 in b", id="threads"),
        pytest.param(made(device="cuda", source="2"), "device differs", id="device"),
        pytest.param(replace(made(source="2"), framework="jax"), "framework differs", id="framework"),
        pytest.param(replace(made(source="2"), strategy="shard_grad_op"), "strategy differs", id="strategy"),
        pytest.param(replace(made(source="2"), versions={"numpy": "1"}), "versions differs", id="versions"),
        pytest.param(synthetic.manifest(dtype="float32"), "does not state its device", id="older"),
        pytest.param(made(), "same command, source and environment", id="repetition"),
    ],
)
def test_bits_are_no_evidence_between_other_programs(pair, second, why):
    found = compare(*pair(nudged("output", "block"), second=second))
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert found.bits is not None
    assert why in found.bits or why in found.bits.replace("torch", "a").replace("jax", "b")


@pytest.mark.parametrize(("phase", "verdict"), [("state", Verdict.ROUNDING), ("reduce", Verdict.DIFFERENT)])
def test_another_kernel_of_the_optimizer_rounds_its_steps_otherwise(pair, phase, verdict):
    first, second = (made(optimizer_kernel=kernel, source=kernel) for kernel in ("for-loop", "fused"))
    found = compare(*pair(nudged(phase, "block.w"), first=first, second=second, perturbed_runs=4), bitwise=True)
    assert found.verdict is verdict, found.reason
    if verdict is Verdict.ROUNDING:
        assert found.bits and "the optimizer's step is for-loop in a and fused in b" in found.bits


def test_an_accelerator_needs_deterministic_algorithms(pair, tmp_path):
    gpu = {"device": "cuda H200", "deterministic": False}
    a, b = pair(nudged("output", "block"), first=made(**gpu), second=made(**gpu, source="2"))
    found = compare(a, b)
    assert found.verdict is Verdict.ROUNDING and "may be nondeterministic" in (found.bits or "")
    same = synthetic.record(tmp_path / "again", made(**gpu))
    assert compare(a, b, repeats=[same], bitwise=True).verdict is Verdict.DIFFERENT


def test_a_repetition_shows_what_is_not_deterministic(pair, tmp_path):
    a, b = pair(nudged("backward", "embed"))
    noisy = synthetic.record(tmp_path / "again", made(), tamper=nudged("backward", "block.w"))
    found = compare(a, b, repeats=[noisy], bitwise=True)  # backward reaches the block first
    assert found.verdict is Verdict.ROUNDING and "not deterministic" in (found.bits or "")
    later = synthetic.record(tmp_path / "later", made(), tamper=nudged("reduce", "embed"))
    assert compare(a, b, repeats=[later], bitwise=True).verdict is Verdict.DIFFERENT
    with pytest.raises(RecordingError, match="expected another recording of"):
        compare(a, b, repeats=[synthetic.record(tmp_path / "other", made(threads=4))])


def test_equal_bits_stay_equal(pair):
    found = compare(*pair())
    assert found.verdict is Verdict.EQUAL and found.bits is None


@pytest.mark.parametrize(
    ("phase", "dtype", "apart", "expected"),
    [
        pytest.param("reduce", np.float32, 3 * 2.0**-24, True, id="of the scale"),
        pytest.param("reduce", np.float32, 5 * 2.0**-24, False, id="more"),
        pytest.param("reduce", np.float64, 5 * 2.0**-53, False, id="float64"),
        pytest.param("forward", np.float64, 3 * 2.0**-24, True, id="a loss of a run in float32"),
    ],
)
def test_a_few_roundings_are_of_the_scale_and_the_dtype(tmp_path, phase, dtype, apart, expected):
    """Terms of a loss may cancel, and losses are recorded as float64 whatever their dtype."""
    pair = Pair(*(synthetic.record(tmp_path / name, synthetic.manifest(dtype="float32")) for name in "ab"))
    one = np.zeros(1, dtype)
    found = Quantity(0, phase, "loss", "", "", None, 0, one, (one + apart).astype(dtype), 1.0, 1e-3)
    assert is_few_roundings(pair, found) is expected


def edited(recordings, *edits):
    """The recordings again, after edits (recording, old text, new text) of the events of rank 1."""
    for i, old, new in edits:
        synthetic.edit_events(recordings[i].directory, old, new, rank=1)
    return [Recording.open(recording.directory) for recording in recordings]


def test_samples_in_another_order_change_bits(pair):
    a, b = pair(nudged("output", "block"))
    digest = b.batch(0, 1).digest
    a, b = edited((a, b), (1, digest, digest[::-1]))
    found = compare(a, b, bitwise=True)
    assert found.verdict is Verdict.ROUNDING, found.reason
    assert found.bits and "from step 0 on, samples are in a different order, in other microbatches" in found.bits


def test_operators_are_named_where_bits_differ(pair):
    output = '"name": "block", "use": "output", '
    one, other = (f'{output}"operator": "aten::{name}", ' for name in ("addmm", "mm"))
    a, b = edited(pair(nudged("output", "block")), (0, output, one), (1, output, other))
    found = compare(a, b, bitwise=True)
    assert found.verdict is Verdict.ROUNDING, found.reason
    computed = "the output of block is computed by aten::addmm in a and by aten::mm in b, a different kernel"
    assert found.bits and found.bits.endswith(computed)
    # Of one operator, or of one that is not known, other bits are another program.
    for edit in ((1, other, one), (1, one, output)):
        a, b = edited((a, b), edit)
        assert compare(a, b, bitwise=True).verdict is Verdict.DIFFERENT

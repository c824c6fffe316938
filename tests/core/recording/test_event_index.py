"""The lines of a rank against its manifest: what is accepted at both sides of each bound, and what is counted."""

import hashlib
from pathlib import Path

import pytest

from crossframe.errors import RecordingError
from crossframe.params import OVERFLOW
from crossframe.recording.event_format import encode, place
from crossframe.recording.event_index import UnequalRanks, parse_index
from tests.core.helpers import synthetic

MADE = synthetic.manifest(1, steps=None)
EMBED = place(0, 0, "update", "parameter", name="embed") | {"start": 0, "stop": 12, "dtype": "float64"}
OUTPUT = place(0, 0, "forward", "output", unit="block", name="block") | {
    "shape": [2, 3],
    "dtype": "float64",
    "order": "torch",
}
BUFFER = place(0, 0, "buffers", "initial", unit="block", name="block.var") | {"shape": [2, 3], "dtype": "float64"}
EVENT = {"kind": "all_gather", "unit": "", "phase": "forward", "dtype": "float64", "num_bytes": 8, "group": [0]}
GATHER = place(0, 0, "collective", "") | {"collective": EVENT}
COUNT = place(0, 0, "step", "", name="embed")
UNEQUAL = place(0, 0, "reduce", "reduced_grad", name="embed") | {"difference": 0.5, "axis": "tp", "ranks": [1]}


def step_of(step, *lines, **end):
    """The lines of a step; each of `lines` is an event and its fields."""
    batch = ("batch", place(step, 0, "batch", "") | {"digest": "0" * 64, "sample_ids": [step]})
    loss = ("loss", place(step, 0, "forward", "loss") | {"value": 0.5})
    own = [(event, fields | {"step": step}) for event, fields in lines]
    return [batch, loss, *own, ("step", {"step": step, "sha256": "", **end})]


def parsed(*steps, made=MADE):
    lines = [("begin", {"manifest": made.sha256}), *(line for step in steps for line in step)]
    content = "".join(encode(event, fields) for event, fields in lines).encode()
    return parse_index(content, Path("run"), made, 0)


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("tensor", EMBED | {"start": 11, "stop": 12}),
        ("tensor", EMBED | {"start": 0, "stop": 1}),
        ("tensor", EMBED | {"phase": "unsharded", "start": 0, "stop": 12}),
        ("activation", OUTPUT | {"shape": []}),
        ("activation", OUTPUT | {"shape": [1] * 64, "microbatch": 0}),
        ("activation", OUTPUT | {"shape": [0, OVERFLOW]}),
        ("activation", OUTPUT | {"shape": [OVERFLOW - 1]}),
        ("activation", OUTPUT | {"shape": [2, 3, 4], "order": "unstated"}),
        ("activation", OUTPUT | {"use": "input", "unit": ""}),
        ("buffer", BUFFER),
        ("buffer", BUFFER | {"use": "changed", "shape": [0]}),
        ("collective", GATHER | {"collective": EVENT | {"num_bytes": 0, "microbatch": 0, "bucket": 0}}),
        ("collective", GATHER | {"collective": EVENT | {"num_bytes": OVERFLOW - 1, "bucket": OVERFLOW - 1}}),
        ("disagreement", UNEQUAL | {"phase": "forward", "unit": "", "name": "", "use": "input"}),
    ],
)
def test_lines_within_bounds_are_read(event, fields):
    assert parsed(step_of(0, (event, fields))).num_steps == 1


SIZES = "expected bytes and ranks as ints of at least 0"
RANGE = "expected a range of the 12 elements of 'embed', got "


@pytest.mark.parametrize(
    ("event", "fields", "match"),
    [
        ("tensor", EMBED | {"start": -1}, f"{RANGE}-1:12"),
        ("tensor", EMBED | {"stop": 13}, f"{RANGE}0:13"),
        ("tensor", EMBED | {"start": 5, "stop": 5}, f"{RANGE}5:5"),
        ("tensor", EMBED | {"phase": "unsharded", "stop": 11}, f"{RANGE}0:11"),
        ("tensor", EMBED | {"phase": "backward", "start": 1}, f"{RANGE}1:12"),
        ("tensor", EMBED | {"unit": "block"}, "the manifest has no parameter 'embed' in unit 'block'"),
        ("count", COUNT | {"unit": "block"}, "the manifest has no parameter 'embed' in unit 'block'"),
        ("activation", OUTPUT | {"microbatch": -1}, "expected a shape and a microbatch"),
        ("activation", OUTPUT | {"shape": [1] * 65}, "expected a shape and a microbatch"),
        ("activation", OUTPUT | {"shape": [-1]}, "expected a shape and a microbatch"),
        ("activation", OUTPUT | {"shape": [True]}, "expected a shape and a microbatch"),
        ("activation", OUTPUT | {"shape": [OVERFLOW]}, "expected a shape and a microbatch"),
        ("activation", OUTPUT | {"shape": [2, 3], "order": "unstated"}, "expected an order among .* below 3 dims, got"),
        ("activation", OUTPUT | {"shape": [2, 3, 4], "order": "mine"}, "expected an order among .*, got 'mine' of"),
        ("activation", OUTPUT | {"use": "input"}, "an activation 'input' of unit 'block'"),
        ("activation", OUTPUT | {"use": "grad"}, "an activation 'grad' of unit 'block'"),
        ("buffer", BUFFER | {"unit": ""}, "a buffer 'initial' of unit '': expected one of .*'changed', 'initial'"),
        ("buffer", BUFFER | {"use": "lost"}, "a buffer 'lost' of unit 'block': expected one of"),
        ("buffer", BUFFER | {"shape": [-1]}, "expected the shape of a buffer"),
        ("buffer", BUFFER | {"dtype": "complex64"}, "unknown dtype 'complex64'.*; record the run again"),
        ("collective", GATHER | {"collective": EVENT | {"num_bytes": OVERFLOW}}, SIZES),
        ("collective", GATHER | {"collective": EVENT | {"bucket": True}}, SIZES),
        ("collective", GATHER | {"collective": EVENT | {"group": 3}}, "field 'group' of a collective: expected list"),
        ("disagreement", UNEQUAL | {"unit": "block"}, "the manifest has no parameter 'embed' in unit 'block'"),
        ("disagreement", UNEQUAL | {"phase": "forward", "use": "grad"}, "expected the phase of a tensor or an activ"),
        ("disagreement", UNEQUAL | {"phase": "norm", "use": "input"}, "expected the phase of a tensor or an activ"),
    ],
)
def test_lines_out_of_bounds_are_refused(event, fields, match):
    with pytest.raises(RecordingError, match=rf"^run, line 4: .*{match}"):
        parsed(step_of(0, (event, fields)))


def test_initial_values_of_buffers_are_of_step_0():
    with pytest.raises(RecordingError, match=r"a buffer 'initial' of unit 'block': expected one of \['changed'\], of"):
        parsed(step_of(0), step_of(1, ("buffer", BUFFER)))


def test_no_step_follows_the_last_of_the_manifest():
    made = synthetic.manifest(1, steps=1)
    assert parsed(step_of(0), made=made).num_steps == 1
    with pytest.raises(RecordingError, match="run, line 7: expected step 1 of 1, got 1; record the run again"):
        parsed(step_of(0), step_of(1), made=made)


def test_a_step_may_repeat_the_lines_of_another():
    index = parsed(step_of(0, ("tensor", EMBED), ("count", COUNT), counts=1.0), step_of(1, **{"as": 0, "counts": 2.0}))
    assert index.lines[1] is index.lines[0]
    assert (index.count(0, "embed"), index.count(1, "embed")) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("lines", "end", "match"),
    [
        pytest.param([], {"as": 1}, "got both or step 1; record again", id="itself"),
        pytest.param([], {"as": -1}, "got both or step -1; record again", id="before the first"),
        pytest.param([("tensor", EMBED)], {"as": 0}, "got both or step 0; record again", id="both"),
        pytest.param([("count", COUNT)], {"counts": []}, "expected 1 counts of optimizer steps, got 0", id="no counts"),
        pytest.param([], {"counts": [1.0]}, "expected 0 counts of optimizer steps, got 1", id="too many counts"),
    ],
)
def test_ends_that_do_not_fit_are_refused(lines, end, match):
    with pytest.raises(RecordingError, match=match):
        parsed(step_of(0), step_of(1, *lines, **end))


def test_counts_are_in_the_order_of_their_lines():
    other = COUNT | {"name": "bias"}
    index = parsed(step_of(0, ("count", other), ("count", COUNT), counts=[3.0, 4.0]))
    assert (index.count(0, "bias"), index.count(0, "embed")) == (3.0, 4.0)
    assert parsed(step_of(0, counts=5.0)).counts == {}


def test_what_a_step_states_is_kept_by_step():
    backwards = ("loss", place(1, 0, "forward", "loss") | {"value": 1.5, "backwards": [[0, 0.5], [2, 1.0]]})
    changed = ("buffer", BUFFER | {"use": "changed"})
    second = [step_of(1)[0], backwards, *step_of(1, changed, buffers=True, rates=[0.1, 0.2])[2:]]
    index = parsed(step_of(0, rates=[]), second, step_of(2, changed, buffers=False))
    assert (index.num_steps, index.ended) == (3, False)
    assert index.losses == {0: 0.5, 1: 1.5, 2: 0.5} and index.backwards == {1: ((0, 0.5), (2, 1.0))}
    assert (index.rates, index.with_buffers, index.changed) == ({1: (0.1, 0.2)}, {1}, {"block.var": 1})
    assert [index.batches[step].sample_ids for step in range(3)] == [(0,), (1,), (2,)]


def test_initial_values_are_no_tensors_of_a_step():
    first = ("tensor", EMBED | {"phase": "parameters"})
    index = parsed(step_of(0, first), step_of(1, ("tensor", EMBED)))
    assert [lines.has_tensors for lines in index.lines] == [False, True]


def test_lines_bound_the_bytes_of_a_file():
    """4096 for the header as such; for each array 512, 6 for each character of its key, and its data."""

    def bound(*lines):
        (own,) = parsed(step_of(0, *lines)).lines
        return own.most_bytes - 4096, own.num_sketches, own.num_sample_items

    row = 8 * (256 + 3)
    assert bound(("tensor", EMBED)) == (12 * 8 + 6 * len("update/embed") + 512, 0, 0)
    narrow = OUTPUT | {"shape": [2, 3], "dtype": "bfloat16", "microbatch": 1}
    assert bound(("activation", narrow)) == (6 * 2 + 6 * len("output/1/block") + 512, 0, 0)
    assert bound(("buffer", BUFFER)) == (6 * 8 + 6 * len("buffers/initial/block.var") + 512, 0, 0)
    sketched = EMBED | {"sketch": 4, "sample": [2, 9]}
    assert bound(("tensor", sketched)) == (row + 6 * len("update/embed") + 512 + 8 * 7 + 512, 5, 9)
    moved = OUTPUT | {"shape": [2, 3, 4], "order": "unstated", "sketch": 0, "channels_first": 6}
    assert bound(("activation", moved)) == (2 * (row + 6 * len("output/0/block") + 512), 7, 0)
    old = {"fingerprint": "0" * 16, "squares": 1.0, "num_not_finite": 0}
    assert bound(("tensor", EMBED | {"sketch": old})) == (row + 6 * len("update/embed") + 512, 0, 0)
    later = EMBED | {"name": "bias", "stop": 3, "sketch": 1, "sample": [0, 2]}
    assert bound(("tensor", sketched), ("tensor", later))[1:] == (5, 9)


def test_unequal_ranks_of_two_shards_are_one():
    fields = {"step": 1, "phase": "reduce", "unit": "", "name": "embed", "use": "reduced_grad", "axis": "tp"}
    first = UnequalRanks(**fields, difference=0.5, ranks=(3, 1))
    second = UnequalRanks(**fields, difference=0.25, ranks=(2, 3))
    for one, other in ((first, second), (second, first)):
        assert one.with_those_of(other) == UnequalRanks(**fields, difference=0.5, ranks=(1, 2, 3))


def test_a_line_of_the_largest_size_is_read(monkeypatch):
    longest = max(len(encode(event, fields)) for event, fields in step_of(0))
    begin = len(encode("begin", {"manifest": MADE.sha256}))
    monkeypatch.setattr("crossframe.recording.event_index.LONGEST_LINE", max(longest, begin))
    assert parsed(step_of(0)).num_steps == 1
    monkeypatch.setattr("crossframe.recording.event_index.LONGEST_LINE", longest - 1)
    with pytest.raises(RecordingError, match=rf"line \d: expected a line of at most {longest - 1} bytes; damaged"):
        parsed(step_of(0))


@pytest.mark.parametrize(
    ("steps", "stated", "match"),
    [
        pytest.param(2, 2, None, id="right"),
        pytest.param(2, 3, "expected the end after 3 whole steps, got it after 2", id="another number"),
        pytest.param(None, 3, "expected the end after 3 whole steps, got it after 2", id="not in the manifest"),
        pytest.param(3, 2, "expected the end after 3 whole steps, got it after 2", id="fewer than the manifest"),
    ],
)
def test_the_end_states_the_number_of_steps(steps, stated, match):
    made = synthetic.manifest(1, steps=steps)
    lines = [("begin", {"manifest": made.sha256}), *step_of(0), *step_of(1)]
    content = "".join(encode(event, fields) for event, fields in lines).encode()
    end = encode("end", {"steps": stated, "sha256": hashlib.sha256(content).hexdigest()}).encode()
    if match is None:
        assert parse_index(content + end, Path("run"), made, 0).ended
    else:
        with pytest.raises(RecordingError, match=f"run, line 8: {match}$"):
            parse_index(content + end, Path("run"), made, 0)


def test_the_digest_of_a_batch_keeps_its_arrays():
    rows = [[2, 77], [3, 2**63]]
    batch = ("batch", place(0, 0, "batch", "") | {"digest": "0" * 64, "sample_ids": [5], "inputs": rows})
    assert parsed([batch, *step_of(0)[1:]]).batches[0].inputs == ((2, 77), (3, 2**63))
    assert parsed(step_of(0)).batches[0].inputs == ()

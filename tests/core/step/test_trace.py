"""Events, their sums, and how two traces differ (trace.py)."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe import trace
from crossframe.trace import (
    ALL_GATHER,
    ALL_REDUCE,
    COLLECTIVES,
    COMPUTE,
    FREE,
    REDUCE_SCATTER,
    RESHARD_TO_GROUP,
    Event,
    collectives,
    difference,
    summary,
)
from tests.core.helpers.random_layouts import QUICK

GATHER = Event(ALL_GATHER, "", "forward", "float32", 16, (0, 1))
SCATTER = Event(REDUCE_SCATTER, "a", "backward", "bfloat16", 8, (0, 1))
SUM = Event(ALL_REDUCE, "a", "backward", "bfloat16", 4, (0, 2))
FREED = Event(FREE, "", "forward", "float32", 16, (0, 1))
KEPT = Event(RESHARD_TO_GROUP, "", "forward", "float32", 8, (0, 1))
COMPUTED = Event(COMPUTE, "", "forward", "float32", 16, (0,))
EVENTS = [GATHER, SCATTER, SUM, FREED, KEPT, COMPUTED]
TRACES = st.lists(st.sampled_from(EVENTS), max_size=5)


@pytest.mark.parametrize("event", EVENTS)
def test_events_round_trip_through_json(event):
    assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


@QUICK
@given(TRACES)
def test_a_free_moves_no_data_between_ranks(trace):
    assert collectives(trace) == [event for event in trace if event not in (FREED, KEPT, COMPUTED)]


@QUICK
@given(TRACES)
def test_the_summary_counts_and_adds_by_kind(trace):
    expected = {
        event.kind: {"count": trace.count(event), "num_bytes": trace.count(event) * event.num_bytes}
        for event in (GATHER, SCATTER, SUM)
    }
    assert summary(trace) == expected


@QUICK
@given(TRACES, TRACES)
def test_traces_differ_where_collectives_or_frees_do(a, b):
    for options, ignored in ({}, (COMPUTED,)), ({"kinds": COLLECTIVES}, (FREED, KEPT, COMPUTED)):
        left_a, left_b = ([event for event in trace if event not in ignored] for trace in (a, b))
        assert (difference(a, b, ordered=True, **options) == []) == (left_a == left_b)
        assert (difference(a, b, ordered=False, **options) == []) == (Counter(left_a) == Counter(left_b))


def test_a_difference_says_what_and_where():
    assert difference([GATHER, FREED, SCATTER, SUM], [GATHER, SUM], ordered=True) == [
        f"event 1: expected {FREED}, seen {SUM}",
        "expected 4 events, seen 2",
    ]
    assert difference([GATHER, SCATTER, SCATTER], [SUM, SCATTER], ordered=False) == [
        f"missing 1 x {GATHER}",
        f"missing 1 x {SCATTER}",
        f"unexpected 1 x {SUM}",
    ]


@pytest.mark.parametrize(
    ("ranks", "kept"),
    [
        ((3,), range(3, 4)),
        ((0, 1), range(2)),
        ((1, 4, 7), range(1, 8, 3)),
        ((5, 3, 1), range(5, 0, -2)),
        ([0, 2], range(0, 3, 2)),
    ],
)
def test_evenly_spaced_ranks_are_kept_as_a_range_however_they_come(ranks, kept):
    event = Event(ALL_GATHER, "", "forward", "float32", 16, ranks)
    assert type(event.group) is range and event.group == kept
    assert event == Event(ALL_GATHER, "", "forward", "float32", 16, kept)


@pytest.mark.parametrize("ranks", [(), (0, 1, 3), (2, 2), (2, 2, 2), (0, 1, 0)])
def test_other_ranks_are_kept_as_they_are(ranks):
    event = Event(ALL_GATHER, "", "forward", "float32", 16, list(ranks))
    assert event.group == ranks and type(event.group) is tuple
    assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


def test_microbatch_and_bucket_are_written_and_read_but_not_compared():
    event = Event(SUM.kind, SUM.unit, SUM.phase, SUM.dtype, SUM.num_bytes, SUM.group, microbatch=3, bucket=2)
    assert event == SUM and hash(event) == hash(SUM)
    read = Event.from_json(json.loads(json.dumps(event.to_json())))
    assert (read.microbatch, read.bucket) == (3, 2)
    # Recordings made before there were several have neither.
    fields = {name: value for name, value in event.to_json().items() if name not in ("microbatch", "bucket")}
    assert (Event.from_json(fields).microbatch, Event.from_json(fields).bucket) == (0, 0)


def test_the_kinds_are_those_that_recordings_hold():
    kinds = [trace.ALL_GATHER, trace.REDUCE_SCATTER, trace.ALL_REDUCE, trace.FREE]
    kinds += [trace.RESHARD_TO_GROUP, trace.CAST, trace.COMPUTE, trace.STEP]
    assert kinds == [
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "free",
        "reshard_to_group",
        "cast",
        "compute",
        "step",
    ]

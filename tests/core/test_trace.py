"""Events, their sums, and how two traces differ (trace.py)."""

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.trace import ALL_GATHER, ALL_REDUCE, FREE, REDUCE_SCATTER, Event, collectives, difference, summary
from tests.core.random_layouts import QUICK

GATHER = Event(ALL_GATHER, "", "forward", "float32", 16, (0, 1))
SCATTER = Event(REDUCE_SCATTER, "a", "backward", "bfloat16", 8, (0, 1))
SUM = Event(ALL_REDUCE, "a", "backward", "bfloat16", 4, (0, 2))
FREED = Event(FREE, "", "forward", "float32", 16, (0, 1))
TRACES = st.lists(st.sampled_from([GATHER, SCATTER, SUM, FREED]), max_size=5)


@pytest.mark.parametrize("event", [GATHER, SCATTER, SUM, FREED])
def test_events_round_trip_through_json(event):
    assert Event.from_json(json.loads(json.dumps(event.to_json()))) == event


@QUICK
@given(TRACES)
def test_a_free_moves_no_data_between_ranks(trace):
    assert collectives(trace) == [event for event in trace if event is not FREED]


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
def test_traces_differ_where_their_collectives_do(a, b):
    moved_a, moved_b = ([event for event in trace if event is not FREED] for trace in (a, b))
    assert (difference(a, b, ordered=True) == []) == (moved_a == moved_b)
    assert (difference(a, b, ordered=False) == []) == (Counter(moved_a) == Counter(moved_b))


def test_a_difference_says_what_and_where():
    assert difference([GATHER, FREED, SCATTER, SUM], [GATHER, SUM], ordered=True) == [
        f"event 1: expected {SCATTER}, seen {SUM}",
        "expected 3 collectives, seen 2",
    ]
    assert difference([GATHER, SCATTER, SCATTER], [SUM, SCATTER], ordered=False) == [
        f"missing 1 x {GATHER}",
        f"missing 1 x {SCATTER}",
        f"unexpected 1 x {SUM}",
    ]

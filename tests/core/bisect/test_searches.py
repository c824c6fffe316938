"""Minimal sets of changes, and groups of runs that agree."""

from hypothesis import given
from hypothesis import strategies as st

from crossframe.bisect import Outcome, find_causes, group_by_agreement

SETS = st.sets(st.integers(0, 8), min_size=1, max_size=3).map(frozenset)


@given(st.lists(SETS, min_size=1, max_size=3))
def test_causes_are_minimal_and_disjoint_and_leave_nothing_that_diverges(true_causes):
    def diverges(changes):
        return any(cause <= {*changes} for cause in true_causes)

    tested = []

    def test(changes):
        tested.append(changes)
        return Outcome.DIVERGES if diverges(changes) else Outcome.AGREES

    found = find_causes(9, test)
    assert {frozenset(cause) for cause in found} <= {*true_causes}
    assert not diverges([each for each in range(9) if all(each not in cause for cause in found)])
    assert len(tested) == len({*tested})


def test_changes_of_one_cause_that_lie_apart_take_few_runs():
    """Delta debugging goes on with as many parts as are left of those it had; anew with two parts it would be 40 and 160 runs."""
    for cause, most in (({0, 15}, 24), ({*range(0, 16, 2)}, 94)):
        tested = []

        def test(changes, cause=cause, tested=tested):
            tested.append(changes)
            return Outcome.DIVERGES if cause <= {*changes} else Outcome.AGREES

        assert find_causes(16, test) == (tuple(sorted(cause)),) and len(tested) <= most


def test_runs_that_fail_are_no_evidence():
    """Changes 0 and 5 do not run without each other; change 3 diverges."""

    def test(changes):
        if (0 in changes) != (5 in changes):
            return Outcome.UNRESOLVED
        return Outcome.DIVERGES if 3 in changes else Outcome.AGREES

    assert find_causes(6, test) == ((3,),)


def test_each_run_is_compared_with_each_representative_once():
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return abs(a - b)

    found = group_by_agreement([1.0, 5.0, 1.1, 5.1, 9.0], compare, lambda difference: difference < 1)
    assert found.groups == ((0, 2), (1, 3), (4,)) and found.between() == [(0, 1), (0, 4), (1, 4)]
    assert len(compared) == len({*compared}) == len(found.compared) and (1.1, 5.1) not in compared


def test_a_run_between_two_groups_is_stated_whatever_the_order():
    for order in ([0.0, 0.6, 1.2], [0.0, 1.2, 0.6]):
        found = group_by_agreement(order, lambda a, b: abs(a - b), lambda difference: difference < 1)
        between = order.index(0.6)
        assert found.ambiguous == ((between, (0, order.index(1.2))),) and len(found.groups) == 2

"""Longer histories of larger worlds: a rule machine drives several units and their simple models (R12, R17-R24).

A failure prints the setup and the operations in order, as hypothesis found the shortest.
"""

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from crossframe.api import Api
from crossframe.errors import CrossframeError, StateError, UnsupportedError
from crossframe.plan import Strategy
from experiments.spec.histories import OPERATIONS, REQUESTS, Pair
from tests.core.helpers.small_worlds import MAKE, NAN, SEVEN, Setup

LONG = settings(deadline=None, max_examples=120, stateful_step_count=30, derandomize=True, database=None)
# "a.0" lies inside "a"; "" is the root.
NAMES = ("a.0", "a", "b", "")
MESHES = ((2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (2, 2), (3, 2), (2, 3), (4, 1), (1, 3), (1, 1))


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    shard, replicate = draw(st.sampled_from(MESHES))
    reshards = draw(st.sampled_from([None, True, False, *(k for k in (2, 3) if shard % k == 0 and k < shard)]))
    return Setup(
        draw(st.sampled_from(list(MAKE))),
        shard,
        replicate,
        draw(st.sampled_from(Api)),
        draw(st.sampled_from([Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP])),
        reshards,
        draw(st.booleans()),
        draw(st.sampled_from([None, NAN, SEVEN])),
    )


class SeveralUnits(RuleBasedStateMachine):
    """Any operation on any unit, and summons of several units at once. `Pair.take` compares everything after each."""

    pair: Pair

    @initialize(setup=setups(), num_units=st.integers(1, 4))
    def build(self, setup: Setup, num_units: int) -> None:
        self.names = NAMES[:num_units]
        self.pair = setup.pair(self.names)

    @rule(operation=st.sampled_from(OPERATIONS), unit=st.integers(0, 3))
    def one(self, operation: str, unit: int) -> None:
        self.pair.take(operation, self.names[unit % len(self.names)])

    # The moves of a step are drawn more often than all that is refused.
    @rule(operation=st.sampled_from(["forward", "backward", "step", "toggle sync", "edit full", "summon wg", "exit"]))
    def usual(self, operation: str) -> None:
        self.pair.take(operation, self.names[0])

    @precondition(lambda self: len(self.names) > 1)
    @rule(flags=st.sampled_from(list(REQUESTS)), which=st.sets(st.integers(0, 3), min_size=1), failed=st.booleans())
    def several(self, flags: str, which: set[int], failed: bool) -> None:
        """A summon of some units in one context: all of them or, refused, none, and all left as they were."""
        names = [name for i, name in enumerate(self.names) if i in which]
        models = [self.pair.models[name] for name in names]
        refusals = [refusal for model in models if (refusal := model.refusal_of_summon(REQUESTS[flags]))]
        before = self.pair.save()
        try:
            with contextlib.suppress(KeyboardInterrupt), self.pair.world.summon_full_params(REQUESTS[flags], names):
                for model in models:
                    model.summon(REQUESTS[flags])
                self.pair.check()
                for name in names:
                    self.pair.take("edit full", name)
                if failed:
                    raise KeyboardInterrupt
        except CrossframeError as error:
            assert type(error) in (StateError, UnsupportedError) and refusals, error
            assert self.pair.save() == before
            return
        assert not refusals
        for model in models:
            model.exit(failed=failed)
        self.pair.check()


def test_R12_R17_R24_any_thirty_operations_on_several_units_of_up_to_six_ranks():
    run_state_machine_as_test(SeveralUnits, settings=LONG)

"""The step machine by itself: what a backend that executes its actions literally would have in memory (R08, R12 to R18, R29)."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import StateError
from crossframe.lifecycle import Residency, UnitState
from crossframe.step import Action, ModelStep, StepCount, StepSettings, UnitStep
from crossframe.strategy import Prefetch
from tests.core.helpers.random_layouts import QUICK


class Memory:
    """A backend that executes actions on nothing but flags, and objects to any that makes no sense."""

    def __init__(self) -> None:
        self.holds, self.readable, self.shows_full, self.in_use = Residency.SHARD, False, False, False
        self.done: list[Action] = []

    def execute(self, action: Action) -> None:
        self.done.append(action)
        match action:
            case Action.GATHER:
                assert self.holds is Residency.SHARD
                self.holds, self.readable = Residency.FULL, False
            case Action.GATHER_FROM_GROUP:
                assert self.holds is Residency.RESHARD_GROUP
                self.holds, self.readable = Residency.FULL, False
            case Action.REUSE:
                assert self.holds is Residency.FULL
            case Action.WAIT:
                assert self.holds is Residency.FULL
                self.readable = True
            case Action.EXPOSE | Action.EXPOSE_AGAIN | Action.ADOPT_EXPOSE_AGAIN:
                assert self.readable and not self.shows_full
                self.shows_full = True
            case Action.CONCEAL:
                assert self.shows_full
                self.shows_full = False
            case Action.USE | Action.USE_AGAIN:
                assert self.readable and self.shows_full
                self.in_use = True
            case Action.END_USE | Action.END_BACKWARD:
                self.in_use = False
            case Action.FREE:
                assert self.holds is Residency.FULL and not self.shows_full
                self.holds, self.readable = Residency.SHARD, False
            case Action.FREE_GROUP_SHARD:
                assert self.holds is Residency.RESHARD_GROUP
                self.holds = Residency.SHARD
            case Action.RESHARD_TO_GROUP:
                assert self.readable and not self.shows_full
                self.holds, self.readable = Residency.RESHARD_GROUP, False
            case _:
                pass


class Backend:
    """A model of nested units, whose forwards and backwards run as autograd would run them."""

    def __init__(self, names: list[str], *settings: StepSettings) -> None:
        self.units = [
            UnitStep(name, each)
            for name, each in zip(names, settings or itertools.repeat(StepSettings()), strict=False)
        ]
        steps = StepCount()
        for unit in self.units:
            unit.count_steps(steps)
        self.steps, self.model = steps, ModelStep(self.units)
        self.memory = {unit: Memory() for unit in self.units}
        self.reduced: list[str] = []

    def run(self, do) -> None:
        for unit, actions, _ in do:
            for action in actions:
                self.memory[unit].execute(action)
                if action is Action.REDUCE:
                    self.reduced.append(unit.name)
        assert all(memory.holds is unit.state.residency for unit, memory in self.memory.items())

    def _inside(self, unit: UnitStep) -> list[UnitStep]:
        depth = unit.name.count(".") + 1 if unit.name else 0
        return [other for other in self.units if other is not unit and other.name.count(".") == depth
                and (not unit.name or other.name.startswith(unit.name + "."))]  # fmt: skip

    def forward(self, unit: UnitStep | None = None, *, training: bool = True) -> None:
        if unit is None:
            assert not self.model.interrupted
            self.run(self.model.begin_step(training=training))
        unit = unit or self.units[0]
        self.run(self.model.begin_forward(unit))
        for inner in self._inside(unit):
            self.forward(inner)
        assert self.memory[unit].in_use
        self.run(self.model.end_forward(unit))

    def backward(self, unit: UnitStep | None = None) -> None:
        root, unit = unit is None, unit or self.units[0]
        self.run(self.model.begin_backward(unit))
        if unit.settings.unshard_in_backward:
            assert self.memory[unit].in_use
        for inner in reversed(self._inside(unit)):
            self.backward(inner)
        unit.has_grads = True
        self.run(self.model.gradients_complete(unit))
        if root:
            self.run(self.model.end_backward())
            self.model.leave_backward()


SETTINGS = st.builds(
    StepSettings,
    reshard_after_forward=st.sampled_from([True, False, 2]),
    keep_root=st.booleans(),
    reshard_after_backward=st.booleans(),
    unshard_in_backward=st.booleans(),
    keep_without_reduction=st.booleans(),
    conceal_after_forward=st.booleans(),
    backward_prefetch=st.sampled_from([None, *Prefetch]),
    forward_prefetch=st.booleans(),
    reduce_grads=st.booleans(),
    reduce_unused=st.booleans(),
)
NAMES = ["", "a", "a.b", "a.c", "d"]


@QUICK
@given(
    settings=st.lists(SETTINGS, min_size=5, max_size=5),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.booleans()), min_size=1, max_size=4),
)
def test_R12_parameters_are_in_memory_when_they_are_used(settings, steps):
    backend = Backend(NAMES, *settings)
    for training, microbatches, optimizer_steps in steps:
        for _ in range(microbatches):
            backend.forward(training=training)
            if training:
                backend.backward()
        if optimizer_steps:
            backend.steps.add()
    for unit in backend.units:
        kept = not unit.settings.frees_after_backward or not unit.settings.reshard_after_forward
        assert kept or unit.state.residency is not Residency.FULL


def test_R12_parameters_are_gathered_anew_after_an_optimizer_step():
    backend = Backend([""], StepSettings(reshard_after_forward=False, reshard_after_backward=False))
    for optimizer_steps, gathers in ((False, 1), (False, 1), (True, 1), (False, 2)):
        backend.forward(training=False)
        assert backend.memory[backend.units[0]].done.count(Action.GATHER) == gathers
        if optimizer_steps:
            backend.steps.add()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("late", range(4))
def test_R29_reductions_come_in_one_order_however_gradients_complete(order, late):
    """Backwards begin in reverse; gradients complete in any order, the first `late` of them before the last backward begins."""
    backend = Backend(["", "a", "b", "c"])
    backend.forward()
    a, b, c = units = backend.units[1:]
    backend.run(backend.model.begin_backward(backend.units[0]))
    complete = [units[i] for i in order]
    for unit in (c, b):
        backend.run(backend.model.begin_backward(unit))
    early = [unit for unit in complete[:late] if unit is not a]
    begun = False
    for unit in [*early, *(unit for unit in complete if unit not in early)]:
        if unit not in early and not begun:
            backend.run(backend.model.begin_backward(a))
            begun = True
        unit.has_grads = True
        backend.run(backend.model.gradients_complete(unit))
    backend.units[0].has_grads = True
    backend.run(backend.model.gradients_complete(backend.units[0]))
    backend.run(backend.model.end_backward())
    assert backend.reduced == ["c", "b", "a", ""]


def test_R29_unreached_units_are_waited_for_where_they_count_as_zeros():
    backend = Backend(["", "a", "b"], *[StepSettings(reduce_unused=True)] * 3)
    backend.forward()
    root, a, _ = backend.units
    for signal, unit in (
        ("begin_backward", root),
        ("begin_backward", a),
        ("gradients_complete", a),
        ("gradients_complete", root),
    ):
        unit.has_grads = True
        backend.run(getattr(backend.model, signal)(unit))
        assert backend.reduced == []
    backend.run(backend.model.end_backward())
    assert backend.reduced == ["b", "a", ""]


def test_R29_a_backward_of_a_part_of_a_unit_reduces_no_others_as_zeros():
    backend = Backend(["", "a", "b"], *[StepSettings(reduce_unused=True)] * 3)
    backend.forward()
    _, _, b = backend.units
    b.has_grads = True
    backend.run(backend.model.begin_backward(b, whole=False))
    backend.run(backend.model.gradients_complete(b))
    backend.run(backend.model.end_backward())
    backend.model.leave_backward()
    assert backend.reduced == ["b"]


def test_R16_a_unit_whose_backward_is_over_is_not_prefetched():
    backend = Backend(["", "a", "b"])
    _, a, b = backend.units
    a.backward_prefetch_units = (b,)
    backend.forward()
    backend.backward()
    assert backend.memory[b].done.count(Action.GATHER) == 2


def test_recomputation_in_backward_gathers_nothing():
    backend = Backend(["", "a"])
    backend.forward()
    a = backend.units[1]
    backend.run(backend.model.begin_backward(backend.units[0]))
    backend.run(backend.model.begin_backward(a))
    before = list(backend.memory[a].done)
    backend.run(backend.model.begin_forward(a))
    backend.run(backend.model.end_forward(a))
    assert backend.memory[a].done[len(before) :] == [Action.WAIT, Action.USE_AGAIN]


def test_R17_a_forward_that_raises_frees_its_unit_and_the_rest_goes_on():
    backend = Backend(["", "a", "b"])
    root, a, b = backend.units
    backend.run(backend.model.begin_step(training=True))
    backend.run(backend.model.begin_forward(root))
    backend.run(backend.model.begin_forward(a))
    backend.run(backend.model.leave_forward(a))
    assert a.state == UnitState()
    backend.forward(b)
    backend.run(backend.model.end_forward(root))
    assert not backend.model.interrupted


def test_a_unit_runs_alone_outside_of_all_forwards():
    backend = Backend(["", "a", "b"])
    root, a, b = backend.units
    assert backend.model.runs_alone(a)
    backend.run(backend.model.begin_forward(a))
    assert not backend.model.runs_alone(b)
    backend.run(backend.model.end_forward(a))
    assert backend.model.runs_alone(b)
    backend.run(backend.model.begin_forward(root))
    assert not backend.model.runs_alone(b)


def test_a_unit_of_several_modules_is_resharded_after_the_last_of_them():
    """Or when the root's forward ends, if the others do not run."""
    backend = Backend(["", "a", "b"])
    root, a, b = backend.units
    backend.run(backend.model.begin_step(training=True))
    backend.run(backend.model.begin_forward(root))
    for unit in (a, b):
        backend.run(backend.model.begin_forward(unit))
        backend.run(backend.model.end_forward(unit, whole=False))
        assert backend.memory[unit].holds is Residency.FULL and not backend.memory[unit].in_use
    backend.run(backend.model.begin_forward(a))
    backend.run(backend.model.end_forward(a))
    assert backend.memory[a].holds is Residency.SHARD and backend.memory[b].holds is Residency.FULL
    backend.run(backend.model.end_forward(root))
    assert backend.memory[b].holds is Residency.SHARD
    assert backend.memory[a].done.count(Action.FREE) == backend.memory[b].done.count(Action.FREE) == 1


def test_R17_a_unit_that_is_not_in_forward_leaves_none():
    backend = Backend(["", "a"])
    backend.forward()
    assert backend.model.leave_forward(backend.units[1]) == []


@pytest.mark.parametrize("signal", ["begin_forward", "begin_backward"])
def test_R18_parameters_are_not_summoned_within_a_step(signal):
    backend = Backend(["", "a"])
    backend.model.check_summon()
    backend.run(getattr(backend.model, signal)(backend.units[1]))
    with pytest.raises(
        StateError, match=r"unit 'a': cannot unshard the parameters for the user .*wait until it is over"
    ):
        backend.model.check_summon()
    backend.model.reset()
    backend.units[1].summon(visible=True)
    backend.model.check_summon()  # each unit checks that it is not summoned twice


def test_an_all_gather_that_fails_leaves_the_shard():
    backend = Backend(["", "a"])
    a = backend.units[1]
    a.begin_forward()
    assert a.state.residency is Residency.FULL and a.state.activity
    activity = a.state.activity
    a.gather_failed()
    assert a.state == UnitState(activity=activity)


@pytest.mark.parametrize("use", [None, "forward", "summon"])
def test_unsharded_parameters_are_freed_before_shards_are_written_unless_in_use(use):
    unit = UnitStep("", StepSettings(reshard_after_forward=False))
    if use == "summon":
        unit.summon(visible=True)
    else:
        unit.begin_forward()
        unit.enter_forward()
        if use is None:
            unit.end_forward()
            unit.after_forward()
    assert unit.free_before_edit() == (() if use else (Action.FREE,))
    assert unit.state.residency is (Residency.FULL if use else Residency.SHARD)


def test_only_a_number_reshards_to_a_group():
    assert [StepSettings(reshard_after_forward=each).reshards_to_group for each in (True, False, 2)] == [
        False,
        False,
        True,
    ]


def test_R17_an_interrupted_step_asks_for_a_reset():
    backend = Backend(["", "a"])
    backend.run(backend.model.begin_forward(backend.units[0]))
    assert backend.model.interrupted
    backend.model.reset()
    assert not backend.model.interrupted and {unit.state for unit in backend.units} == {UnitState()}


def test_R13_the_root_stays_unsharded_only_if_its_settings_say_so():
    for keep_root in (True, False):
        backend = Backend(["", "a"], *[StepSettings(keep_root=keep_root)] * 2)
        backend.forward()
        residencies = [unit.state.residency for unit in backend.units]
        assert residencies == [Residency.FULL if keep_root else Residency.SHARD, Residency.SHARD]


@pytest.mark.parametrize(
    "setting", [{"reshard_after_forward": None}, {"backward_prefetch": "pre"}, {"reduce_grads": 1}]
)
def test_invalid_settings_raise(setting):
    with pytest.raises(StateError, match=f"{next(iter(setting))}: got .* pass a"):
        StepSettings(**setting)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("before", Residency)
def test_R21_a_summon_returns_memory_to_what_it_held(before, mixed):
    unit = UnitStep("", StepSettings(reshard_after_forward=2), mixed=mixed)
    if before is not Residency.SHARD:
        unit.unshard()
    if before is Residency.RESHARD_GROUP:
        unit.reshard_to_group()
    unit.summon(visible=True)
    unit.dismiss()
    assert unit.state == UnitState()
    unit.return_memory()
    assert unit.state.residency is (Residency.SHARD if mixed else before)


def test_R18_a_step_does_not_begin_while_parameters_are_summoned():
    backend = Backend(["", "a"])
    backend.units[1].summon(visible=True)
    with pytest.raises(StateError, match=r"unit 'a': cannot begin a forward .* leave summon_full_params"):
        backend.model.check_begin()

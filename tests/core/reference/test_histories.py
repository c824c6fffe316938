"""What holds a world beside its model sees every difference: where the world is wrong, each comparison goes red."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from crossframe.api import Api
from crossframe.errors import PlanError, StateError, UnsupportedError
from crossframe.lifecycle import Activity, Exposure, Freshness, Move, Residency, UnitState
from crossframe.unshard import UnshardRequest
from experiments.spec.histories import OPERATIONS, REQUESTS, Disagreement, Explored, explore, replay
from experiments.spec.histories.agree import equal, same
from tests.core.helpers.small_worlds import SEVEN, Setup

PLAIN = Setup("flat", 3)
KEPT = replace(PLAIN, reshard_after_forward=False)
GROUP = Setup("flat", 4, api=Api.FSDP2, reshard_after_forward=2)


def unit_of(pair):
    return pair.world.units["u"]


def bucket_of(pair):
    return unit_of(pair).buckets[0]


def set_state(**fields):
    def tamper(pair):
        step = unit_of(pair).steps[1]
        step.state = replace(step.state, **fields)

    return tamper


def set_entry(attribute, value):
    """Replace one rank's entry of a list of the bucket."""

    def tamper(pair):
        entries = getattr(bucket_of(pair), attribute)
        entries[1] = value(entries[1])

    return tamper


def set_shard(value):
    def tamper(pair):
        shards = bucket_of(pair).unit.shards = list(bucket_of(pair).unit.shards)
        shards[1] = value(shards[1])

    return tamper


def first_changed(array):
    changed = array.copy()
    changed.reshape(-1)[0] += 1
    return changed


def padding_changed(pair):
    bucket = bucket_of(pair)
    rank, run = next((rank, run) for rank in range(3) for run in bucket.layout.padding(rank))
    bucket.unit.shards[rank][run.start] += 1


def shows_nothing(pair):
    unit_of(pair).shown = lambda rank: {}


def shows_no_grads(pair):
    unit_of(pair).grads_shown = lambda rank: {}


WAITS = ("toggle sync", "backward")
WRONG = {
    "residency": (PLAIN, (), set_state(residency=Residency.FULL), r"state: expected \('shard'.*found \('full'"),
    "freshness": (KEPT, ("forward",), set_state(freshness=Freshness.STALE), "state: expected"),
    "exposure": (KEPT, ("forward",), set_state(exposure=Exposure.FULL), "state: expected"),
    "activity": (KEPT, ("forward",), set_state(activity=Activity.FORWARD), "state: expected"),
    "full parameters too many": (
        PLAIN,
        (),
        set_entry("full", lambda _: np.ones(24)),
        r"memory: expected \(False, False\), found \(True, False\)",
    ),
    "full parameters too few": (KEPT, ("forward",), set_entry("full", lambda _: None), "memory: expected"),
    "a part too many": (PLAIN, (), set_entry("parts", lambda _: np.ones(4)), "memory: expected"),
    "a part too few": (GROUP, ("forward",), set_entry("parts", lambda _: None), "memory: expected"),
    "the shard's size": (
        PLAIN,
        (),
        set_shard(lambda x: np.append(x, x[:1])),
        r"its shard: expected \(\(5,\), .*found \(\(6,\)",
    ),
    "the shard's dtype": (
        PLAIN,
        (),
        set_shard(lambda x: x.astype(np.float64)),
        r"its shard: expected \(\(5,\), .*32.*found \(\(5,\), .*64",
    ),
    "the shard": (PLAIN, (), set_shard(first_changed), "rank 1: its shard, '[wv]': expected"),
    "padding": (PLAIN, (), padding_changed, r"rank \d: padding of the shard was written"),
    "padding that was poisoned": (
        replace(PLAIN, poison=SEVEN),
        (),
        padding_changed,
        "padding of the shard was written",
    ),
    "full parameters": (KEPT, ("forward",), set_entry("full", first_changed), "rank 1: its full parameters, 'w'"),
    "the part's size": (
        GROUP,
        ("forward",),
        set_entry("parts", lambda x: np.append(x, x[:1])),
        r"its part: expected \(",
    ),
    "the part": (GROUP, ("forward",), set_entry("parts", first_changed), "rank 1: its part, '[wv]': expected"),
    "the shards shown": (PLAIN, (), shows_nothing, "what it is shown: expected"),
    "the full parameters shown": (
        KEPT,
        ("unshard",),
        shows_nothing,
        r"what it is shown: expected \['w', 'v'\], found \[\]",
    ),
    "gradients that wait": (
        PLAIN,
        WAITS,
        set_entry("grads", lambda grads: grads | {"w": grads["w"] + 1}),
        "rank 1: gradients that wait, 'w'",
    ),
    "gradients that wait for nothing": (
        PLAIN,
        (),
        set_entry("grads", lambda _: {"w": np.ones((5, 2), np.float32)}),
        "gradients that wait: expected",
    ),
    "which gradients": (PLAIN, ("backward",), set_entry("reached", lambda _: {"w"}), "rank 1: gradients: expected"),
    "gradients too few": (
        PLAIN,
        ("backward",),
        set_entry("sharded_grads", lambda _: None),
        "rank 1: gradients: expected",
    ),
    "gradients too many": (PLAIN, (), set_entry("sharded_grads", lambda _: np.ones(8)), "rank 1: gradients: expected"),
    "gradients": (PLAIN, ("backward",), set_entry("sharded_grads", first_changed), "rank 1: its gradient's shard, '"),
    "gradients shown": (
        PLAIN,
        ("backward", "summon wg"),
        set_entry("shown_grads", first_changed),
        "rank 1: the gradients it is shown, 'w'",
    ),
    "gradients not shown": (PLAIN, ("backward", "summon wg"), shows_no_grads, "the gradients it is shown: expected"),
}


ONE_MORE = (
    *("the shard", "full parameters", "the part's size", "the part", "gradients that wait", "gradients"),
    "gradients shown",
)


@pytest.mark.parametrize("what", WRONG)
def test_R12_a_world_that_is_not_what_the_model_says_is_seen(what):
    setup, history, tamper, message = WRONG[what]
    pair = setup.pair()
    replay(pair, history)
    pair.check()
    tamper(pair)
    with pytest.raises(Disagreement, match=message) as caught:
        pair.check()
    if what in ONE_MORE:  # and it says which is which
        expected, found = str(caught.value).partition("expected ")[2].split(", found ")
        a, b = (float(re.findall(r"\d+\.\d|\d+(?=,\))", text)[0]) for text in (expected, found))
        assert b == a + 1


def test_a_unit_behind_the_first_is_compared_too():
    pair = PLAIN.pair(("a", "b"))
    pair.check()
    pair.world.units["b"].buckets[0].unit.shards[2][0] += 1
    with pytest.raises(Disagreement, match="unit 'b', rank 2: its shard"):
        pair.check()


@pytest.mark.parametrize("operation", ["forward", "backward", "meddle in forward", "meddle in backward"])
def test_R12_what_a_computation_is_given_is_compared(operation):
    pair = PLAIN.pair()
    compute = unit_of(pair).compute
    unit_of(pair).compute = lambda phase, work: compute(
        phase, lambda rank, full: work(rank, {name: value + (rank == 2) for name, value in full.items()})
    )
    with pytest.raises(Disagreement, match="rank 2 computes with, 'w': expected"):
        pair.take(operation)


def raiser(error):
    def refuse(*args, **kwargs):
        raise error

    return refuse


@pytest.mark.parametrize(
    ("operation", "method", "error"),
    [
        ("exit", "dismiss", StateError("unit 'u': not now")),
        ("exit", "dismiss", StateError("there is nothing to end " + UnitState().describe())),
        ("reshard to group", "reshard_to_group", None),
        ("summon wr", "summon", UnsupportedError("writeback with rank0_only=True")),
        ("summon wr", "summon", UnsupportedError("writeback with rank0_only; leave one out")),
    ],
)
def test_R12_a_refusal_that_does_not_say_what_it_should_is_seen(operation, method, error):
    pair = PLAIN.pair()
    assert not pair.take(operation)  # as it is, it says it
    if error is None:
        with pytest.raises(PlanError, match="expected the size of a reshard group") as caught:
            unit_of(pair).reshard_to_group()
        error = type(caught.value)("unit 'u': no number")
    setattr(unit_of(pair), method, raiser(error))
    with pytest.raises(Disagreement, match=f"'{operation}': the refusal does not say what it should: "):
        pair.take(operation)


def test_R12_a_refusal_of_another_kind_or_none_is_seen():
    pair = PLAIN.pair()
    unit_of(pair).dismiss = lambda *, failed=False: None
    with pytest.raises(Disagreement, match="'exit': expected StateError, got None"):
        pair.take("exit")
    unit_of(pair).unshard = raiser(StateError("no"))
    with pytest.raises(Disagreement, match=r"'unshard': expected no refusal, got StateError\('no'\)"):
        pair.take("unshard")
    unit_of(pair).dismiss = raiser(UnsupportedError("no"))
    with pytest.raises(Disagreement, match="'exit': expected StateError, got UnsupportedError"):
        pair.take("exit")


def test_R12_a_refusal_that_changes_something_is_seen():
    pair = PLAIN.pair()
    dismiss = unit_of(pair).dismiss

    def careless(**how):
        bucket_of(pair).unit.shards[0][0] += 1
        dismiss(**how)

    unit_of(pair).dismiss = careless
    with pytest.raises(Disagreement, match=r"'exit' was refused \(unit 'u'.*, and has changed something"):
        pair.take("exit")


MEDDLES = {"summon a unit": "summon", "exit": "dismiss"}


@pytest.mark.parametrize("meddle", MEDDLES)
def test_R18_meddling_that_is_not_refused_or_refused_without_the_state_is_seen(meddle):
    for phase in ("forward", "backward"):
        pair = PLAIN.pair()
        setattr(unit_of(pair), MEDDLES[meddle], lambda *args: None)
        with pytest.raises(Disagreement, match=f"^{meddle} in the middle of a computation was not refused"):
            pair.take(f"meddle in {phase}")
        pair = PLAIN.pair()
        setattr(unit_of(pair), MEDDLES[meddle], raiser(StateError("no")))
        with pytest.raises(Disagreement, match=f"^{meddle} in the middle: refused with no, or something changed"):
            pair.take(f"meddle in {phase}")


@pytest.mark.parametrize("meddle", ["summon", "step", "reduce"])
def test_R18_meddling_by_the_world_that_is_not_refused_or_changes_something_is_seen(meddle):
    method = "summon_full_params" if meddle == "summon" else meddle
    pair = PLAIN.pair()

    class Open:
        def __enter__(self):
            return None

    setattr(pair.world, method, lambda *args: Open())
    with pytest.raises(Disagreement, match=f"^{meddle} in the middle of a computation was not refused"):
        pair.take("meddle in forward")
    pair = PLAIN.pair()
    refuse = getattr(pair.world, method)

    def careless(*args):
        bucket_of(pair).steps[0]["w"] = 9
        context = refuse(*args)
        if meddle == "summon":
            context.__enter__()

    setattr(pair.world, method, lambda *args: careless(*args) or Open())
    with pytest.raises(Disagreement, match=f"^{meddle} in the middle: refused with unit 'u'.*or something changed"):
        pair.take("meddle in forward")


def test_bits_names_shapes_and_dtypes_are_compared():
    two = {"a": np.array([0.0, 1.0]), "b": np.array([2.0])}
    a, b = np.array([0, 1], np.float32), np.array([2], np.float32)
    same(two, {"b": b, "a": a}, "float32", "x")  # in any order
    for found, message in (
        ({"a": a}, r"^x: expected \['a', 'b'\], found \['a'\]$"),
        ({"a": a, "c": b}, r"^x: expected \['a', 'b'\], found \['a', 'c'\]$"),
        ({"a": a, "b": b, "c": b}, r"^x: expected"),
        ({"a": a.reshape(1, 2), "b": b}, r"^x, 'a': expected \[0.0, 1.0\] float32, found \[\[0.0, 1.0\]\] float32$"),
        ({"a": a, "b": b.astype(np.float64)}, r"^x, 'b': expected \[2.0\] float32, found \[2.0\] float64$"),
        ({"a": a, "b": b.view(np.int32)}, r"^x, 'b': .* int32$"),
        ({"a": a[::-1], "b": b}, r"^x, 'a': expected"),
        (
            {"a": np.array([-0.0, 1], np.float32), "b": b},
            r"^x, 'a': expected \[0.0, 1.0\] float32, found \[-0.0, 1.0\]",
        ),
    ):
        with pytest.raises(Disagreement, match=message):
            same(two, found, "float32", "x")
    equal((1, "a"), (1, "a"), "y")
    with pytest.raises(Disagreement, match=r"^y: expected 1, found 2$"):
        equal(1, 2, "y")


def test_the_parameters_begin_apart_from_each_other_and_from_zero():
    pair = PLAIN.pair(("a", "b"))
    begin = {name: value.reshape(-1)[:2].tolist() for name, value in pair.world.full_params().items()}
    assert begin == {"a.w": [1, 2], "a.v": [2, 3], "b.w": [3, 4], "b.v": [4, 5]}


def test_every_request_is_an_operation():
    assert len(set(OPERATIONS)) == len(OPERATIONS) and len(REQUESTS) == 16
    assert REQUESTS[""] == UnshardRequest(False, False, False, False)
    for letter, field in {"w": "writeback", "r": "rank0_only", "o": "offload_to_cpu", "g": "with_grads"}.items():
        for flags, request in REQUESTS.items():
            assert getattr(request, field) == (letter in flags)
            assert f"summon {flags}".strip() in OPERATIONS


def test_a_snapshot_brings_everything_back():
    for setup, history in (
        (PLAIN, ("toggle sync", "backward", "summon w", "edit full")),
        (KEPT, ("backward", "summon wg", "edit grad")),
        (GROUP, ("forward", "summon w")),
    ):
        pair = setup.pair()
        saves = [pair.save()]
        for operation in history:
            assert pair.take(operation)
            saves.append(pair.save())
        again = []
        for saved in saves:
            pair.load(saved)
            again.append(pair.save())
        assert len(set(again)) == len(again)
        for saved, expected in reversed(list(zip(saves, again, strict=True))):
            pair.load(saved)
            pair.check()
            assert pair.save() == expected


def test_the_counts_of_histories_worlds_and_refusals():
    found = explore(PLAIN.pair(), 3, ("unshard", "exit"))
    # "exit" is refused in every world and leads nowhere. A snapshot's bytes may tell apart worlds that are equal.
    assert found.num_histories == 8 and 2 <= found.num_worlds <= 4
    followed = found.tried["unshard"]
    assert 2 <= followed <= found.num_worlds
    assert found.tried == Counter(unshard=followed, exit=followed) and found.refused == Counter(exit=followed)
    assert (found.num_tried, found.num_refused) == (2 * followed, followed)
    assert {move for _, move in found.pairs} == {Move.GATHER, Move.EXPOSE}
    again = explore(PLAIN.pair(), 3, ("exit", "unshard"))  # a refusal ends nothing
    assert again.tried["unshard"] == again.tried["exit"] == again.num_refused and again.num_worlds > 1
    total = Explored()
    total.add(found)
    total.add(found)
    assert (total.num_histories, total.num_worlds) == (16, 2 * found.num_worlds)
    assert (total.num_tried, total.num_refused) == (4 * followed, 2 * followed)
    assert total.pairs == found.pairs
    none = explore(PLAIN.pair(), 0)
    assert (none.num_histories, none.num_worlds, none.num_tried) == (1, 1, 0)


def test_the_counts_in_words():
    state = UnitState()
    found = Explored(1234, 5, Counter(a=6000, b=1), Counter(a=7), {(state, Move.GATHER), (state, Move.EXPOSE)})
    assert found.describe() == (
        "1,234 histories through 5 worlds; 6,001 operations tried, 7 refused; 2 pairs of state and move"
    )


def test_R19_R33_the_dtype_of_what_is_in_memory_is_that_of_its_use():
    pair = replace(KEPT, mixed=True).pair()
    # "step" makes what "forward" left stale, and the next "forward" gathers it again.
    history = ("unshard", "backward", "forward", "step", "forward", "summon w", "edit full", "exit")
    for operation in history:
        assert pair.take(operation)
    for operation, wrong in (("forward", np.float32), ("unshard", np.float32), ("summon w", "bfloat16")):
        pair = replace(KEPT, mixed=True).pair()
        assert pair.take(operation)
        set_entry("full", lambda full, wrong=wrong: full.astype(wrong))(pair)
        with pytest.raises(Disagreement, match="rank 1: its full parameters, 'w'"):
            pair.check()

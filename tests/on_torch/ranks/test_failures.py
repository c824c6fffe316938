"""Ranks that disagree, ranks that die, and exceptions: every rank ends or goes on rightly, and says what happened.

The long form of the trials in which ranks die is `python -m tests.on_torch.programs.dying_ranks`.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import gc
from collections import OrderedDict
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_backend
from crossframe.errors import AgreementError, CollectiveError, CrossframeError
from tests.on_torch.helpers.failing_ranks import (
    Boom,
    Raises,
    changed_net,
    fsdp2_net,
    impatient,
    message_of,
    state_of,
    train_step,
)
from tests.on_torch.helpers.models import Block, batch, loss_of
from tests.on_torch.programs.dying_ranks import Bomb, Trial, run_trial
from tests.ranks import started_ranks
from torch_backend.observe import observe
from torch_backend.ranks import _consensus as rounds
from torch_backend.ranks import _failure as failure
from torch_backend.ranks._consensus import agree, first_difference, withdraw
from torch_backend.ranks._failure import Pending, abandon, issue, rejoin

FSDP = torch_backend.FullyShardedDataParallel
BLOCKS = torch_backend.ModuleWrapPolicy({Block})


def _store():
    return dist.distributed_c10d._get_default_store()


@contextmanager
def announced(group):
    """Inside, each look of this rank into the store, for want of progress, sets a key that `wait_until_looked` waits for. This
    rank is impatient."""
    places = [(rounds._Round, "_publish"), (failure, "_who_left")]
    originals = [getattr(holder, name) for holder, name in places]

    def announcing(original):
        def look(*args):
            found = original(*args)
            _store().set(f"looked/{group.group_name}/{dist.get_rank()}", "")
            return found

        return look

    for (holder, name), original in zip(places, originals, strict=True):
        setattr(holder, name, announcing(original))
    try:
        with impatient():
            yield
    finally:
        for (holder, name), original in zip(places, originals, strict=True):
            setattr(holder, name, original)


def wait_until_looked(group, ranks):
    """Wait until these ranks have waited so long that they looked where the others are."""
    _store().wait([f"looked/{group.group_name}/{rank}" for rank in ranks])


# Ranks that disagree


def _fsdp1(net, **settings):
    return FSDP(net, **{"auto_wrap_policy": BLOCKS, "use_orig_params": True, **settings})


def _frozen_later(net):
    model = _fsdp1(net)
    next(p for name, p in model.named_parameters() if name.endswith("head.bias")).requires_grad_(False)
    return model


# What rank 1 of 3 builds, what all ranks must find different, and what they have. The others build `_fsdp1(changed_net())`, or
# `fsdp2_net` where rank 1 does.
DIFFERENT = {
    "shape": (
        lambda: _fsdp1(changed_net(width=8)),
        "the shape of parameter 'embedding.weight' differs: rank 0, 2: [11, 7]; rank 1: [11, 8]",
    ),
    "dtype": (
        lambda: _fsdp1(changed_net(double=True)),
        "the dtype of parameter 'blocks.1.norm.weight' differs: rank 0, 2: float32; rank 1: float64",
    ),
    "frozen": (
        lambda: _fsdp1(changed_net(frozen=True)),
        "the requires_grad of parameter 'blocks.0.norm.bias' differs: rank 0, 2: True; rank 1: False",
    ),
    "frozen later": (
        lambda: _frozen_later(changed_net()),
        "the requires_grad of parameter 'head.bias' differs: rank 0, 2: True; rank 1: False",
    ),
    "order": (
        lambda: _fsdp1(changed_net(swapped=True)),
        "what the ranks shard differs: rank 0, 2: parameter 'blocks.0.up.weight'; rank 1: parameter 'blocks.0.down.weight'",
    ),
    "sharing": (
        lambda: _fsdp1(changed_net(tied=True)),
        "the sharing of parameter 'embedding.weight' differs: rank 0, 2: []; rank 1: ['head.weight']",
    ),
    "number of units": (
        lambda: _fsdp1(changed_net(depth=3)),
        "what the ranks shard differs: rank 0, 2: parameter 'embedding.weight'; rank 1: unit 'blocks.2'",
    ),
    "units": (
        lambda: _fsdp1(changed_net(), auto_wrap_policy=torch_backend.ModuleWrapPolicy({nn.LayerNorm})),
        "what the ranks shard differs: rank 0, 2: unit 'blocks.0'; rank 1: unit 'blocks.0.norm'",
    ),
    "strategy": (
        lambda: _fsdp1(changed_net(), sharding_strategy=torch_backend.ShardingStrategy.SHARD_GRAD_OP),
        "the strategy of unit '' differs: rank 0, 2: FULL_SHARD; rank 1: SHARD_GRAD_OP",
    ),
    "precision": (
        lambda: _fsdp1(changed_net(), mixed_precision=torch_backend.MixedPrecision(param_dtype=torch.bfloat16)),
        "the mixed_precision of unit '' differs: rank 0, 2: ",
    ),
    "use_orig_params": (
        lambda: _fsdp1(changed_net(), use_orig_params=False),
        "the use_orig_params of unit '' differs: rank 0, 2: True; rank 1: False",
    ),
    "prefetch": (
        lambda: _fsdp1(changed_net(), backward_prefetch=None),
        "the backward_prefetch of unit '' differs: rank 0, 2: ",
    ),
    "reshard": (
        lambda: fsdp2_net(changed_net(), reshard_after_forward=False),
        "the reshard_after_forward of unit 'blocks.0' differs: rank 0, 2: True; rank 1: False",
    ),
}


def _disagree(rank, world_size):
    told = {}
    for what, (build, _) in DIFFERENT.items():
        usual = fsdp2_net if what == "reshard" else _fsdp1
        model = build() if rank == 1 else usual(changed_net())
        told[what] = message_of(lambda model=model: model(batch(0, rank)[0]))
    return told


def test_ranks_that_disagree_all_name_the_first_difference_and_who_has_what(ranks):
    for rank, told in enumerate(ranks.run(3, _disagree)):
        for what, (_, expected) in DIFFERENT.items():
            message = told[what]
            assert message.startswith(f"AgreementError: rank {rank}: {expected}"), (what, message)
            assert "build the same module with the same settings" in message


def _hybrid(rank, what):
    # A group a call, so that what one case leaves behind in the store meets no other.
    world = dist.new_group(range(4))
    halves, pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])], [dist.new_group([0, 2]), dist.new_group([1, 3])]
    hybrid = {
        "process_group": (halves[rank // 2], pairs[rank % 2]),
        "sharding_strategy": torch_backend.ShardingStrategy.HYBRID_SHARD,
    }
    if what == "mesh":
        return _fsdp1(changed_net(), **(hybrid if rank >= 2 else {"process_group": world}))
    # Inside one shard group, or between the replicas alone.
    other = rank == 3 if what == "inside" else rank >= 2
    return _fsdp1(changed_net(width=8 if other else 7), **hybrid)


def _disagree_in_mesh(rank, world_size):
    told = {}
    for what in ("inside", "between", "mesh"):
        model = _hybrid(rank, what)
        told[what] = message_of(lambda model=model: model(batch(0, rank)[0]))
    return told


def test_R10_all_ranks_of_a_hybrid_mesh_raise_if_any_two_differ(ranks):
    for rank, told in enumerate(ranks.run(4, _disagree_in_mesh)):
        assert all(message.startswith(f"AgreementError: rank {rank}: ") for message in told.values()), told
        shape = "the shape of parameter 'embedding.weight' differs"
        assert f"{shape}: rank 2: [11, 7]; rank 3: [11, 8]" in told["inside"]
        assert shape in told["between"]
        assert "do not agree on the mesh: rank " in told["mesh"], told["mesh"]


def _with_experts(rank, by_name):
    """Rank 1 has one expert more, which FSDP leaves alone, before a shared layer."""
    torch.manual_seed(3)
    experts = [nn.Linear(4, 4) for _ in range(1 + rank)]
    layers = [*experts, nn.Linear(4, 4)]
    if by_name:
        names = [*(f"expert {i}" for i in range(len(experts))), "shared"]
        model = nn.Sequential(OrderedDict(zip(names, layers, strict=True)))
    else:
        model = nn.Sequential(*layers)
    return FSDP(model, ignored_states=experts, use_orig_params=True)


def _experts(rank, world_size):
    told = message_of(lambda: _with_experts(rank, by_name=False)(torch.ones(1, 4)))
    model = _with_experts(rank, by_name=True)
    model(torch.ones(1, 4)).sum().backward()
    return told, [param.grad is not None for param in model.parameters() if param.numel()]


def test_shared_parameters_have_one_name_on_all_ranks(ranks):
    for rank, (told, trained) in enumerate(ranks.run(2, _experts)):
        expected = "what the ranks shard differs: rank 0: parameter '1.weight'; rank 1: parameter '2.weight'"
        assert told.startswith(f"AgreementError: rank {rank}: {expected}"), told
        assert trained and all(trained)


def _elsewhere(rank, world_size):
    group = dist.new_group(range(world_size))
    title = "first use of the root" if rank == 2 else "construction of unit 'Linear'"
    elsewhere = message_of(lambda: agree([group], title, []))
    if rank == 1:
        withdraw([group], "construction of unit 'Conv'", ValueError("no such\nthing"))
        withdrawn = ""
    else:
        withdrawn = message_of(lambda: agree([group], "construction of unit 'Conv'", []))
    if rank == 0:
        withdraw([group], "construction of unit 'Norm'", ValueError("the first rank fails"))
        first = ""
    else:
        first = message_of(lambda: agree([group], "construction of unit 'Norm'", []))
    agree([group], "construction of unit 'Linear'", [("unit ''", {"strategy": "FULL_SHARD"})])
    return elsewhere, withdrawn, first


def test_ranks_in_different_places_and_ranks_that_withdraw_are_found_at_once(ranks):
    for rank, told in enumerate(ranks.run(3, _elsewhere)):
        elsewhere, withdrawn, first = told
        assert (
            "about to do differs: rank 0, 1: construction of unit 'Linear'; rank 2: first use of the root" in elsewhere
        )
        if rank != 1:
            assert "rank 1 failed before the construction of unit 'Conv': ValueError: no such thing" in withdrawn
        if rank != 0:
            assert "rank 0 failed before the construction of unit 'Norm'" in first


def _absent(rank, world_size, who):
    group = dist.new_group(range(world_size))
    # Not at its making, which on a busy machine may take longer.
    group._get_backend(torch.device("cpu")).options._timeout = timedelta(seconds=1.2)
    others = [f"gave up/{group.group_name}/{other}" for other in range(world_size) if other != who]
    if rank == who:
        _store().wait(others)
    told = message_of(lambda: agree([group], "first use of the root", []))
    if rank != who:
        _store().set(f"gave up/{group.group_name}/{rank}", "")
    return told


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_does_not_come_is_named_within_the_timeout_and_told_when_it_comes(ranks, who):
    for message in ranks.run(3, _absent, who):
        assert f"rank {who} did not come to the first use of the root within 1.2 s" in message


def _slow(rank, world_size):
    for late in (1, 2):
        group = dist.new_group(range(world_size))
        if rank == late:
            wait_until_looked(group, set(range(world_size)) - {late})
        with announced(group):
            agree([group], "first use of the root", [])


def test_rounds_that_merely_take_long_end_well(ranks):
    ranks.run(3, _slow)


def _late_once_more(rank, world_size):
    """Rank 1 waits for rank 0 and says where, in a group that is gone when rank 0 waits for rank 1."""
    everyone, pair = dist.new_group(range(world_size)), dist.new_group([0, 1])
    if rank == 0:
        wait_until_looked(pair, [1])
    with announced(pair):
        agree([pair], "construction", [])
    dist.destroy_process_group(pair)
    del pair
    gc.collect()
    if rank == 1:
        wait_until_looked(everyone, [0])
    with announced(everyone):
        agree([everyone], "first use of the root", [])


def test_where_a_rank_waited_once_is_old_when_its_group_is_gone(ranks):
    ranks.run(2, _late_once_more)


def _fails_where_others_are_not(rank, world_size):
    everyone, some = dist.new_group(range(world_size)), dist.new_group([1, 2])
    if rank == 0:
        withdraw([everyone], "first use of the root", ValueError("no such thing"))
        return None
    with impatient():
        return message_of(lambda: agree([some if rank == 2 else everyone], "first use of the root", []))


def test_a_rank_that_waits_for_one_that_has_failed_elsewhere_is_told_so():
    with started_ranks() as fresh:
        _, failed, waited = fresh.run(3, _fails_where_others_are_not)
    assert "no such thing" in failed
    assert "rank 2 shares its units with ranks 1, 2 (first use of the root), rank 1 with ranks 0, 1, 2" in waited


def _keys(rank, world_size):
    group = dist.new_group(range(world_size))
    store = dist.distributed_c10d._get_default_store().underlying_store
    said, counts = [("unit ''", {"strategy": "FULL_SHARD"})], []
    for _ in range(2):
        for _ in range(10):
            agree([group], "first use of the root", said)
        dist.barrier(group)
        counts.append(store.num_keys())
        dist.barrier(group)
    return counts


def test_rounds_leave_no_more_keys_in_the_store_than_the_first(ranks):
    for before, after in ranks.run(3, _keys):
        assert before == after


def test_a_difference_between_many_ranks_is_told_in_one_line():
    sides = [list(range(500)), [500], [501, 502]]
    texts = [[["first use of the root", {}], ["unit ''", {"a": "1", "b": value}]] for value in ("x", "y", "x")]
    texts[2].append(["unit 'more'", {}])
    told = first_difference(sides, texts)
    assert told == "the b of unit '' differs: rank 0, 1, 2, 3, 4, 5, 6, 7 and 494 more: x; rank 500: y"
    assert first_difference(sides[::2], texts[::2]).startswith(
        "what the ranks shard differs: rank 0, 1, 2, 3, 4, 5, 6, 7 and 492 more: nothing more; rank 501, 502: unit 'more'"
    )
    missing = first_difference([[0], [1]], [[["unit ''", {}]], [["unit ''", {"a": "1"}]]])
    assert missing.startswith("the a of unit '' differs: rank 0: not set; rank 1: 1")


# Ranks that die


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(Trial("flat", 2, 1, "construction", "raise", timeout=2.0), marks=pytest.mark.exhaustive),
        Trial("fsdp2", 3, 0, "before the first forward", "exit", store="rank 0"),
        Trial("orig", 3, 1, "forward", "kill"),
        pytest.param(Trial("fsdp2", 3, 2, "between", "exit", nth=2), marks=pytest.mark.exhaustive),
        Trial("flat", 3, 0, "backward", "raise"),
        Trial("orig", 3, 2, "reduction", "kill", nth=6),
        pytest.param(
            Trial("flat", 4, 1, "gather in backward", "exit", nth=2, delay=0.002), marks=pytest.mark.exhaustive
        ),
    ],
    ids=lambda trial: f"{trial.where}-{trial.how}",
)
def test_when_a_rank_dies_the_others_end_and_name_unit_and_collective(trial):
    outcomes, written = run_trial(trial)
    complaints = [complaint for outcome in outcomes for complaint in outcome.complaints(trial)]
    assert not complaints, f"{trial}: {complaints}\n{written}"
    if trial.where == "forward":
        for outcome in outcomes:
            assert "all_gather of unit 'blocks." in outcome.message and "(forward)" in outcome.message
            assert "a rank has probably ended" in outcome.message or "has left the step" in outcome.message


# Exceptions


BUILT = {
    "flat": lambda net: _fsdp1(net, use_orig_params=False),
    "orig": _fsdp1,
    "grad_op": lambda net: _fsdp1(net, sharding_strategy=torch_backend.ShardingStrategy.SHARD_GRAD_OP),
    "fsdp2": fsdp2_net,
}


def _interrupted(rank, world_size, mode):
    """Trains with and without an interrupted step before each; the collective at which the steps stopped being interrupted."""
    models = [BUILT[mode](changed_net()) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    nth, raised = 1, True
    while raised:
        raised = False
        optimizers[1].zero_grad()
        with observe(Raises(nth)):
            try:
                loss_of(models[1], 1000 + nth, rank).backward()
            except Boom:
                raised = True
        losses = [train_step(model, optimizer, nth, rank) for model, optimizer in zip(models, optimizers, strict=True)]
        assert losses[0] == losses[1], (nth, losses)
        for a, b in zip(*map(state_of, models, optimizers), strict=True):
            assert torch.equal(a, b), nth
        nth += 1
    return nth - 2


@pytest.mark.parametrize("mode", BUILT)
def test_R17_an_exception_at_any_collective_on_all_ranks_leaves_no_trace(ranks, mode):
    # Three units, gathered in forward and, but for the root, in backward, and reduced.
    num_collectives = 6 if mode == "grad_op" else 8
    assert ranks.run(2, _interrupted, mode) == [num_collectives] * 2


def _one_raises(rank, world_size, where):
    """Rank 0 raises alone, and every rank catches what it gets and goes on."""
    net = changed_net()
    bomb = Bomb(Trial("orig", world_size, 0, where, "raise"))
    if rank == 0:
        net.blocks[0].norm.register_forward_pre_hook(lambda *_: bomb.passes("forward"))
        net.blocks[1].norm.register_forward_hook(
            lambda module, args, output: output.register_hook(lambda grad: bomb.passes("backward")) and None
        )
    # Who looks at the others raises long before; in gloo's reduce_scatter nobody can.
    group = dist.new_group(range(world_size), timeout=timedelta(seconds=3 if where == "backward" else 60))
    model = _fsdp1(net, process_group=group)
    told = []
    for step in range(2):
        with suppress(Boom), impatient():
            told.append(message_of(lambda step=step: loss_of(model, step, rank).backward()))
    return told


@pytest.mark.parametrize(
    "where",
    [
        "forward",
        "backward",
    ],
)
def test_R17_where_one_rank_raises_alone_no_rank_goes_on_with_a_wrong_step(fragile, where):
    (first, *rest), *others = fragile.run(3, _one_raises, where)
    assert not rest and "AgreementError: rank 0: rank" in first, first
    assert "first step after an exception" in first, first
    for left, refused in others:
        assert left.startswith("CollectiveError: ") and "of unit 'blocks." in left, left
        if where == "forward":
            assert "has left the step: Boom in the forward of unit" in left, left
        assert "no further step is possible between ranks 0, 1, 2" in refused, refused


def _all_reduce(group, unit="u"):
    tensor = torch.ones(2)
    issue(dist.all_reduce, tensor, group=group, spans=True, kind="all_reduce", unit=unit, phase="backward").wait()
    return tensor.tolist()


def _left_together(rank, world_size):
    group = dist.new_group(range(world_size))
    told = []
    for is_late in (False, True):
        _all_reduce(group)
        abandon([group], "Boom")
        rejoin([group])
        # One rank is late: the others look, and what they find is old.
        if is_late and rank == 1:
            wait_until_looked(group, [0, 2])
        with announced(group) if is_late and rank != 1 else nullcontext():
            told.append(_all_reduce(group))
    if rank == 0:
        rejoin([group])  # nothing is left to agree on
    return told


def test_R17_ranks_that_leave_a_step_together_go_on_and_what_was_said_is_forgotten(fragile):
    assert fragile.run(3, _left_together) == [[[3.0, 3.0], [3.0, 3.0]]] * 3


def _boom(*_):
    raise Boom


class _DoneTooLate:
    """A collective that ends when its waiter has just lost patience."""

    def __init__(self):
        self.waits = 0

    def wait(self, patience):
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self):
        return True


def test_a_collective_that_ends_between_two_looks_has_not_failed(monkeypatch):
    monkeypatch.setattr(failure, "_LOOK_EVERY", timedelta(0))
    work = _DoneTooLate()
    assert Pending(work, None, "all_gather", "u", "forward", True).wait()
    assert work.waits == 2


def _looks_after_an_exception(rank, world_size, how):
    group = dist.new_group(range(world_size))
    net = changed_net()
    net.blocks[1].register_forward_pre_hook(_boom)
    with suppress(Boom):
        loss_of(_fsdp1(net, process_group=group), 0, rank)
    model = _fsdp1(changed_net(), process_group=group)
    if rank == 1:
        wait_until_looked(group, [0])
    with announced(group):
        if how == "summon":
            with FSDP.summon_full_params(model):
                pass
        else:
            model.state_dict()
    loss_of(model, 0, rank).backward()


@pytest.mark.parametrize("how", ["summon", "state dict"])
def test_R17_after_a_step_that_all_ranks_left_a_rank_may_be_late_to_a_summon(fragile, how):
    fragile.run(2, _looks_after_an_exception, how)


def _left_behind(rank, world_size):
    group = dist.new_group(range(world_size))
    # Rank 0 leaves after one collective, to which rank 2 comes late: it is not what the others wait for in vain.
    if rank == 2:
        wait_until_looked(group, [0, 1])
    work = issue(dist.all_reduce, torch.ones(1), group=group, spans=True, kind="all_reduce", unit="u", phase="backward")
    if rank == 0:
        abandon([group], "Boom")
    with announced(group):
        work.wait()
    # Rank 1 has looked before, and must find again what did not matter then.
    with impatient():
        return message_of(lambda: _all_reduce(group, unit="v")) if rank == 1 else ""


def test_R17_what_a_rank_that_left_has_issued_before_is_still_waited_for(fragile):
    _, message, _ = fragile.run(3, _left_behind)
    assert (
        "all_reduce of unit 'v' (backward) between ranks 0, 1, 2 failed: rank 0 has left the step: Boom" in message
    ), message


def _left_apart(rank, world_size):
    groups = [dist.new_group(range(world_size)), dist.new_group(range(world_size))]
    _all_reduce(groups[0])
    if rank != 0:
        # What the user does in the group counts too.
        dist.all_reduce(torch.ones(1), group=groups[0], async_op=True)
    abandon(groups[:1], "Boom")
    return message_of(lambda: rejoin(groups[:1])), message_of(lambda: rejoin(groups[:1]))


def test_ranks_that_left_a_step_at_different_places_are_refused(fragile):
    for first, again in fragile.run(3, _left_apart):
        assert "the end of the step that was left differs: rank 0: after " in first
        assert "CollectiveError" in again and "no further step is possible" in again


def _out_of_memory(rank, world_size):
    def fails(*tensors, **options):
        raise torch.OutOfMemoryError("no memory")

    try:
        issue(fails, torch.ones(1), group=dist.group.WORLD, spans=True, kind="all_gather", unit="u", phase="forward")
    except torch.OutOfMemoryError as error:
        return not isinstance(error, CollectiveError)


def test_lack_of_memory_in_a_collective_stays_what_it_is(ranks):
    assert ranks.run(2, _out_of_memory) == [True, True]


class _TimedOut:
    """The work of a collective that not all ranks came to, under gloo."""

    def wait(self, *_):
        raise RuntimeError("[/a/place.cc:78] Timed out waiting 1800000ms for recv operation to complete")

    def is_completed(self):
        return True


def _timed_out(rank, world_size):
    group = dist.new_group(range(world_size))
    pending = issue(
        lambda *_, **__: _TimedOut(),
        torch.ones(1),
        group=group,
        spans=True,
        kind="all_gather",
        unit="blocks.3",
        phase="forward",
    )
    return message_of(pending.wait)


def test_a_collective_that_not_all_ranks_come_to_says_so_after_the_timeout(fragile):
    for rank, message in enumerate(fragile.run(3, _timed_out)):
        start = f"rank {rank}: all_gather of unit 'blocks.3' (forward) between ranks 0, 1, 2 failed: Timed out waiting 1800000ms"
        assert start in message, message
        within = "within 1800 s, the timeout of the process group, not all ranks came to it"
        assert within in message or "has left the step" in message, message


def _lost(rank, world_size, text):
    def fails(*tensors, **options):
        raise RuntimeError(f"[/a/pair.cc:1144] {text}")

    group = dist.new_group(range(world_size))
    return message_of(
        lambda: issue(fails, torch.ones(1), group=group, spans=True, kind="all_gather", unit="u", phase="forward")
    )


@pytest.mark.parametrize(
    "text",
    [
        "Read error [10.0.0.2]:1234: Connection reset by peer",
        "Connection closed by peer [10.0.0.2]:1234",
        "connect [10.0.0.2]:1234: No route to host",
        "connect [10.0.0.2]:1234: Network is unreachable",
    ],
)
def test_a_lost_peer_is_said_to_have_ended(fragile, text):
    (message,) = fragile.run(1, _lost, text)
    assert text in message and "a rank has probably ended" in message


def _broken(rank, world_size):
    """A collective fails on rank 0 alone; rank 1 waits for one, and rank 2 has left after it and wants to go on."""
    group = dist.new_group(range(world_size))
    if rank == 0:
        failed = issue(
            lambda *_, **__: _TimedOut(),
            torch.ones(1),
            group=group,
            spans=True,
            kind="all_gather",
            unit="u",
            phase="forward",
        )
        return message_of(failed.wait)
    work = issue(dist.all_reduce, torch.ones(1), group=group, spans=True, kind="all_reduce", unit="v", phase="backward")
    if rank == 1:
        with impatient():
            return message_of(work.wait)
    abandon([group], "Boom")
    return message_of(lambda: rejoin([group]))


def test_where_a_collective_fails_on_one_rank_all_others_are_told_why(fragile):
    _, waited, refused = fragile.run(3, _broken)
    said = "all_gather of unit 'u' (forward) between ranks 0, 1, 2 failed: Timed out waiting"
    assert f"all_reduce of unit 'v' (backward) between ranks 0, 1, 2 failed: rank 0 has left the step: {said}" in waited
    assert "AgreementError: rank 2: rank 0 failed before the first step after an exception" in refused


def test_agreement_errors_are_what_users_catch():
    for kind in (AgreementError, CollectiveError):
        assert issubclass(kind, RuntimeError) and issubclass(kind, CrossframeError)
    assert rounds.listed([1, 2]) == "1, 2"

"""Models and uses that are not the plain one, each of which has broken an FSDP: against plain data parallel training."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

import dataclasses
import gc
import os
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_backend
from crossframe.errors import ParamError, StateError, UsageError
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.chains import (
    FSDP,
    MODES,
    Chain,
    Part,
    Penalised,
    assert_grads,
    chain_of,
    mean_grads,
    shard,
    square,
)
from tests.on_torch.helpers.failing_ranks import Boom
from tests.on_torch.helpers.interfaces import APIS, local_tensor, our_fsdp2
from tests.on_torch.helpers.models import build_net, loss_of
from torch_backend.engine._unit import unit_of
from torch_backend.observe import record_trace
from torch_backend.shards import local_pieces, sharded_units


class RankDependent(Part):
    """Leaves one layer of the unit unused on rank 1, and in one unit only."""

    skips = False

    def __init__(self):
        super().__init__()
        self.c = nn.Linear(4, 4)

    def forward(self, x):
        y = self.a(x)
        return self.b(y if self.skips and dist.get_rank() == 1 else y + self.c(x))


class OrderOfReductions(Chain):
    part = RankDependent

    def __init__(self):
        super().__init__()
        self.v.skips = True


class FrozenFirst(Part):
    def __init__(self):
        super().__init__()
        self.a.requires_grad_(False)


class Detached(Part):
    def forward(self, x):
        return torch.tanh(x @ self.a.weight.detach()) + self.a.weight[0] + self.a.bias + self.b(x)


class RecomputesInside(Part):
    reentrant = False

    def forward(self, x):
        return self.b(checkpoint(lambda y: torch.tanh(self.a(y)), x, use_reentrant=self.reentrant))


class RecomputesInsideReentrant(RecomputesInside):
    reentrant = True


class WritesInput(Part):
    def forward(self, x):
        return super().forward((x * 1).relu_())


class GradInForward(Chain):
    """Differentiates within its own forward."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        (inner,) = torch.autograd.grad(self.u(x).sum(), x)
        return super().forward(inner.detach())


@dataclasses.dataclass
class Output:
    y: torch.Tensor


class Wraps(Part):
    kind = "dataclass"

    def forward(self, x):
        y = super().forward(x)
        return {"dataclass": Output(y), "set": {y}, "dict": {"y": [y, None]}, "object": _Box(y)}[self.kind]


class _Box:
    def __init__(self, y):
        self.y = y


class Wrapping(Chain):
    """Parts that return containers."""

    part = Wraps
    kind = "dataclass"

    def __init__(self):
        super().__init__()
        for part in (self.u, self.v, self.w):
            part.kind = self.kind

    def forward(self, x):
        x = self.first(x)
        for part in (self.u, self.v, self.w):
            out = part(x)
            x = {
                "dataclass": lambda o: o.y,
                "set": lambda o: next(iter(o)),
                "dict": lambda o: o["y"][0],
                "object": lambda o: o.y,
            }[self.kind](out)
        return self.head(x)


def wrapping(kind):
    return type("WrappingIn" + kind, (Wrapping,), {"kind": kind})


CASES = {
    "plain": Chain,
    "unused_on_one_rank": OrderOfReductions,
    "frozen_first": chain_of(FrozenFirst),
    "detached": chain_of(Detached),
    "recomputes_inside": chain_of(RecomputesInside),
    "recomputes_inside_reentrant": chain_of(RecomputesInsideReentrant),
    "writes_its_input": chain_of(WritesInput),
    "grad_in_forward": GradInForward,
    "returns_dataclass": wrapping("dataclass"),
    "returns_set": wrapping("set"),
    "returns_dict": wrapping("dict"),
}


def _case(rank, world_size, mode, case, strategy):
    return assert_grads(rank, world_size, mode, CASES[case], square, strategy)


# Flat and original parameters share one gradient: with flat ones the cases which change how it comes to be.
FLAT_CASES = (
    CASES if os.environ.get(EXHAUSTIVE) else ("unused_on_one_rank", "recomputes_inside_reentrant", "grad_in_forward")
)


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        (mode, case)
        for mode in MODES
        for case in (FLAT_CASES if mode == "flat" else CASES)
        if (mode, case) != ("flat", "frozen_first")  # R11 refuses it
    ],
)
def test_R29_gradients_are_those_of_the_plain_model(ranks, mode, case):
    assert sum(ranks.run(2, _case, mode, case, "FULL_SHARD")) >= 10


@pytest.mark.parametrize("case", ["plain", "recomputes_inside_reentrant", "detached"])
def test_R14_the_same_under_shard_grad_op_at_three_ranks(ranks, case):
    assert sum(ranks.run(3, _case, "orig", case, "SHARD_GRAD_OP")) >= 10


def _penalised(rank, world_size, mode):
    return assert_grads(rank, world_size, mode, Penalised, square)


@pytest.mark.parametrize("mode", ["orig", "fsdp2"])
def test_parameters_inside_forward_are_full_and_take_gradients(ranks, mode):
    assert sum(ranks.run(2, _penalised, mode)) >= 10


def _opaque(rank, world_size, mode):
    torch.manual_seed(0)
    model = shard(wrapping("object")().double(), mode)
    try:
        square(model).backward()
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("mode", MODES)
def test_an_output_without_visible_tensors_is_an_error_not_garbage(ranks, mode):
    for message in ranks.run(2, _opaque, mode):
        assert message and "unit 'u'" in message and "_Box" in message and "dataclass" in message


def _frozen_unit(rank, world_size, mode):
    torch.manual_seed(0)
    model = Chain()
    model.v.requires_grad_(False)
    model = shard(model.double(), mode)
    with record_trace() as events:
        square(model).backward()
    frees = [e.unit for e in events if e.kind == "free" and e.phase == "backward"]
    return frees, [e.unit for e in events if e.kind == "reduce_scatter"]


@pytest.mark.parametrize("mode", MODES)
def test_R11_a_frozen_unit_is_freed_in_its_turn_and_never_reduced(ranks, mode):
    assert ranks.run(2, _frozen_unit, mode)[0] == (["w", "v", "u", ""], ["w", "u", ""])


def _leak(rank, world_size, mode):
    model = shard(Chain().double(), mode)
    square(model).backward()
    alive = [weakref.ref(bucket.buffer.full) for _, buckets in sharded_units(model) for bucket in buckets]
    alive += [weakref.ref(module) for module in model.modules()]
    del model
    gc.collect()
    return sum(ref() is not None for ref in alive)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_that_is_deleted_is_gone(ranks, mode):
    assert ranks.run(2, _leak, mode) == [0, 0]


def _assign(rank, world_size):
    losses = []
    for wrap in (APIS["fsdp2"][0], our_fsdp2):
        model = wrap(build_net(), strategy="FULL_SHARD")
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            loss = loss_of(model, 0, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_R25_an_optimizer_made_after_load_state_dict_assign_trains(ranks):
    for losses in ranks.run(2, _assign):
        assert losses[:3] == losses[3:] and losses[2] < losses[0]


def _state_while_full(rank, world_size):
    model = our_fsdp2(build_net(), strategy="FULL_SHARD")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        loss_of(model, 0, rank)  # leaves the root full
    assert {name: type(value) for name, value in model.state_dict().items()} == {n: type(v) for n, v in state.items()}
    model.blocks[0].unshard()
    model.load_state_dict(state)
    loss_of(model, 0, rank).backward()
    return all(p.grad is not None for p in model.parameters())


def test_R36_a_state_dict_of_fsdp2_is_sharded_whatever_is_in_memory(ranks):
    assert all(ranks.run(2, _state_while_full))


def _stale_fsdp2(rank, world_size):
    outputs = []
    for wrap in (lambda m: m, lambda m: our_fsdp2(m, strategy="FULL_SHARD")):
        model = wrap(build_net(dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(model, 0, 0).backward()
        with torch.no_grad():
            loss_of(model, 0, 0)
        optimizer.step()
        outputs.append(loss_of(model, 0, 0).item())
    return outputs


def test_R12_stale_parameters_of_fsdp2_are_gathered_anew(ranks):
    for plain, ours in ranks.run(2, _stale_fsdp2):
        assert plain == ours


def _zero_grad_under_no_sync(rank, world_size, mode):
    results = []
    for dropped in (True, False):
        torch.manual_seed(0)
        model = shard(Chain().double(), mode)
        if dropped:
            with model.no_sync():
                square(model).backward()
            model.zero_grad()
        square(model).backward()
        results.append([None if p.grad is None else local_tensor(p.grad) for p in model.parameters()])
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R15_zero_grad_drops_what_no_sync_accumulated(ranks, mode):
    assert ranks.run(2, _zero_grad_under_no_sync, mode) == [True, True]


def _post_accumulate(rank, world_size):
    model = our_fsdp2(build_net(), strategy="FULL_SHARD")
    called = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: called.append((name, p.grad is not None)))
    names = [name for name, _ in model.named_parameters()]
    loss_of(model, 0, rank).backward()
    return sorted(called) == sorted((name, True) for name in names)


def test_hooks_for_accumulated_gradients_run_on_the_sharded_parameters(ranks):
    assert ranks.run(2, _post_accumulate) == [True, True]


def _full(model):
    with FSDP.summon_full_params(model, writeback=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _wrong_shape(rank, world_size, mode):
    """Every rank raises, also one that holds nothing of the parameter, and nothing is written."""
    model = shard(Chain(), mode)
    before = _full(model)
    try:
        with FSDP.summon_full_params(model), torch.no_grad():
            model.head.bias.fill_(7.0)
            model.first.weight.data = torch.ones(2, 2)
    except ParamError as error:
        assert "first.weight" in str(error)
        after = _full(model)
        return all(torch.equal(before[name], after[name]) for name in before)
    return False


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R25_a_wrong_shape_is_refused_on_every_rank(ranks, mode):
    assert ranks.run(3, _wrong_shape, mode) == [True] * 3


def _replaced_objects(rank, world_size, mode):
    model = shard(Chain(), mode)
    identities = [id(p) for p in model.parameters()]
    with FSDP.summon_full_params(model):
        model.head.weight = nn.Parameter(torch.full((2, 4), 5.0))
        del model.first.bias
    after = _full(model)
    assert torch.equal(after["head.weight"], torch.full((2, 4), 5.0))
    assert "first.bias" in after
    assert [id(p) for p in model.parameters()] == identities
    model(torch.randn(2, 4)).sum().backward()
    return True


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R25_objects_replaced_or_deleted_inside_a_summon(ranks, mode):
    assert all(ranks.run(2, _replaced_objects, mode))


def _forward_in_summon(rank, world_size, mode):
    model = shard(Chain(), mode)
    model(torch.randn(2, 4))
    with FSDP.summon_full_params(model.u), torch.no_grad():
        model.u.a.bias.fill_(3.0)
        try:
            model(torch.randn(2, 4))
        except StateError as error:
            message = str(error)
    return message, bool((_full(model)["u.a.bias"] == 3).all())


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R18_a_forward_inside_a_summon_is_refused_and_loses_nothing(ranks, mode):
    message, kept = ranks.run(2, _forward_in_summon, mode)[0]
    assert "unit 'u'" in message and "leave summon_full_params" in message
    assert kept


def _edits_between(rank, world_size, mode, writeback):
    """Edits between a forward that keeps full parameters and its backward: what full memory holds afterwards."""
    model = shard(Chain().double(), mode, "SHARD_GRAD_OP")
    loss = square(model)
    with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
        for p in model.u.parameters():
            p.data.fill_(rank + 1.0)
    bucket = unit_of(model.u).buckets[0]
    assert bucket.buffer.full.untyped_storage().nbytes() > 0
    held = torch.cat([leaf.detach().flatten() for leaf in bucket.buffer.leaves])
    truth = torch.cat([value.flatten() for name, value in _full(model).items() if name.startswith("u.")])
    loss.backward()
    return torch.equal(held, truth), sorted(set(truth.tolist()))


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R20_R21_memory_that_stays_full_holds_what_the_shards_hold(ranks, mode):
    for same, values in ranks.run(2, _edits_between, mode, True):
        assert same and values == [1.0, 2.0]
    for same, values in ranks.run(2, _edits_between, mode, False):
        assert same and len(values) == 40


def _refused(rank, world_size):
    import copy

    messages = []
    orig, fsdp2 = shard(Chain(), "orig"), shard(Chain(), "fsdp2")
    for attempt in (
        lambda: copy.deepcopy(orig),
        lambda: copy.deepcopy(fsdp2),
    ):
        try:
            attempt()
        except (UsageError, ParamError) as error:
            messages.append(str(error))
    return messages


def test_what_cannot_work_is_refused_with_what_to_do_instead(ranks):
    copied, copied2 = ranks.run(2, _refused)[0]
    assert "before wrapping" in copied and "before fully_shard" in copied2


def _absent(rank, world_size):
    model = shard(Chain(), "flat")
    weight = model.head.weight
    return tuple(weight.shape), weight.dtype == torch.float32, bool(weight.isnan().all())


def test_attributes_of_a_flat_unit_have_shapes_but_no_values_outside_forward(ranks):
    assert ranks.run(2, _absent)[0] == ((2, 4), True, True)


def _state_dict_in_summon(rank, world_size, mode):
    plain, model = Chain(), shard(Chain(), mode)
    with FSDP.summon_full_params(model):
        assert list(model.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(model.state_dict())
        other = Chain()
        model.load_state_dict(other.state_dict())
    after = _full(model)
    return (
        all(torch.equal(after[name], p) for name, p in other.named_parameters())
        and after.keys() == dict(plain.named_parameters()).keys()
    )


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R36_inside_a_summon_state_dicts_are_those_of_the_plain_model(ranks, mode):
    torch.manual_seed(0)
    assert all(ranks.run(2, _state_dict_in_summon, mode))


def _groups(rank, world_size):
    """An inner unit on a group of its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = Chain()
    model.u = FSDP(model.u, process_group=groups[rank // 2])
    model = FSDP(model)
    model(torch.randn(2, 4)).sum().backward()
    return all(p.grad is not None for p in model.parameters())


def test_units_may_live_in_groups_of_their_own(ranks):
    assert ranks.run(4, _groups) == [True] * 4


class Catches(Chain):
    """Goes on when an inner unit raises."""

    def forward(self, x):
        x = self.first(x)
        try:
            x = self.u(x)
        except Boom:
            x = x * 2
        return self.head(self.w(self.v(x)))


def _caught(rank, world_size, mode):
    torch.manual_seed(0)
    model = shard(Catches().double(), mode)

    def boom(*_):
        raise Boom

    model.u.b.register_forward_pre_hook(boom)
    grads = []
    for _ in range(2):
        square(model).backward()
        grads.append([None if p.grad is None else local_tensor(p.grad) for p in model.parameters()])
    # The second step adds the same gradients once more.
    return all(b is None if a is None else torch.equal(a * 2, b) for a, b in zip(*grads, strict=True) if a is not b)


@pytest.mark.parametrize("mode", MODES)
def test_R17_an_exception_that_the_model_catches_costs_nothing_else(ranks, mode):
    assert ranks.run(2, _caught, mode) == [True, True]


def _empty_handed(rank, world_size, mode):
    """Two elements over four ranks: some hold nothing, and no gradient ever tells them that the others stepped."""
    model = nn.Linear(1, 1)
    model = torch_backend.fully_shard(model) if mode == "fsdp2" else FSDP(model, use_orig_params=mode == "orig")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    with torch.no_grad():
        before = model(torch.ones(1, 1)).item()  # leaves the root full
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        after = model(torch.ones(1, 1)).item()
    # Weight and bias each go down by 0.1, their gradient being 1.
    return round(before - after, 5)


@pytest.mark.parametrize("mode", MODES)
def test_R12_ranks_without_elements_gather_anew_with_the_others(ranks, mode):
    assert ranks.run(4, _empty_handed, mode) == [0.2] * 4


class Twice(nn.Module):
    """One unit registered under two names, and again below another module."""

    def __init__(self):
        super().__init__()
        self.one = Part()
        self.two = self.one
        self.below = nn.ModuleList([self.one])
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.below[0](self.two(self.one(x))))


def _twice(rank, world_size, keep):
    torch.manual_seed(0)
    expected = mean_grads(Twice().double(), square, rank, world_size)
    torch.manual_seed(0)
    policy = torch_backend.ModuleWrapPolicy({Part})
    model = FSDP(Twice().double(), auto_wrap_policy=policy, use_orig_params=keep)
    assert len(FSDP.fsdp_modules(model)) == 2 and model.one is model.two is model.below[0]
    square(model).backward()
    pieces = list(local_pieces(model, rank))
    for piece in pieces:
        assert torch.allclose(piece.grad, expected[piece.name].flatten()[piece.start : piece.stop], rtol=1e-13)
    return len(pieces)


@pytest.mark.parametrize("keep", [False, True], ids=["flat", "orig"])
def test_R01_a_unit_registered_under_several_names_is_one(ranks, keep):
    assert sum(ranks.run(2, _twice, keep)) >= 6


def _overlap(rank, world_size, mode):
    """A loss of validation, computed with gradients and thrown away, changes nothing in the next step."""
    model = shard(Chain().double(), mode)
    square(model)
    with record_trace() as events:
        square(model).backward()
    return [(e.kind, e.unit) for e in events if e.phase == "backward" and e.kind != "all_gather"]


@pytest.mark.parametrize("mode", MODES)
def test_R14_a_forward_without_backward_does_not_keep_the_next_from_freeing(ranks, mode):
    freed_and_reduced = [(kind, unit) for unit in ("w", "v", "u", "") for kind in ("free", "reduce_scatter")]
    assert ranks.run(2, _overlap, mode)[0] == freed_and_reduced


def _judging(model):
    """A discriminator: trained, frozen while a generator learns from it, with its gradients still there, and trained again."""
    square(model).backward()
    model.requires_grad_(False)
    x = torch.ones(2, 4, dtype=torch.float64).requires_grad_()
    model(x).square().sum().backward()
    assert x.grad is not None and x.grad.any()
    model.requires_grad_(True)
    model.zero_grad()
    return square(model)


@pytest.mark.parametrize("mode", MODES)
def test_R11_gradients_that_outlast_a_frozen_pass_are_cleared(ranks, mode):
    """torch's FSDP1 adds them to the next ones, if the unit has one flat parameter."""
    ranks.run(2, assert_grads, mode, Chain, _judging)

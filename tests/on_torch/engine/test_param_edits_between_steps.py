"""What users do around a step: edit, freeze, evaluate, accumulate, look inside; and what of it an engine may forget."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_backend
from crossframe.errors import AgreementError, StateError
from tests.on_torch.helpers.chains import MODES, Chain, Part, Penalised, assert_grads, chain_of, shard, square
from tests.on_torch.helpers.interfaces import local_tensor
from tests.on_torch.helpers.models import build_net, loss_of
from torch_backend.observe import record_trace
from torch_backend.shards import layouts_of, sharded_units

FSDP = torch_backend.FullyShardedDataParallel


def _grads(model):
    return [None if p.grad is None else local_tensor(p.grad) for p in model.parameters()]


def _same(a, b):
    return len(a) == len(b) and all(
        (x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True)
    )


def _is_full(model):
    """Whether memory holds the full parameters, unit by unit, the root first."""
    return [all(b.buffer.full.untyped_storage().nbytes() for b in buckets) for _, buckets in sharded_units(model)]


def _backward_events(model):
    with record_trace() as events:
        square(model).backward()
    return [(e.kind, e.unit) for e in events if e.phase == "backward"]


def _edit(param, how):
    """Change a sharded parameter in place, in the way that an optimizer or a user does."""
    with torch.no_grad():
        if how == "local":
            param._local_tensor.mul_(2)
        else:
            param.mul_(2)


def _noticed(rank, world_size, mode, how, which):
    """What memory still holds in full after an evaluation is not used once a shard has changed."""
    torch.manual_seed(0)
    state = Chain().double().state_dict()
    outputs = []
    for evaluated in (False, True):
        model = Chain().double()
        model.load_state_dict(state)
        model = shard(model, mode, "SHARD_GRAD_OP")
        # As an optimizer keeps them, and of one unit: what is gathered anew must be so on every rank.
        params = [p for p in model.u.parameters() if p.numel()]
        if evaluated:
            with torch.no_grad():
                square(model)
            assert all(_is_full(model))
        _edit(params[which], how)
        outputs.append(square(model).item())
    return outputs[0] == outputs[1]


@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize(("mode", "how"), [*((mode, "param") for mode in MODES), ("fsdp2", "local")])
def test_R12_any_edit_of_a_shard_is_noticed(ranks, mode, how, which):
    assert all(ranks.run(2, _noticed, mode, how, which))


def _shown_after_an_edit(rank, world_size, mode):
    torch.manual_seed(0)
    model = shard(Chain(), mode)
    expected = 2 * model.head.bias.detach().clone() if mode == "fsdp2" else None
    with torch.no_grad():
        model(torch.ones(2, 4))  # leaves the root full
        for p in model.parameters():
            p.mul_(2)
    if mode == "fsdp2":
        model.unshard()
        assert torch.equal(model.head.bias, expected.full_tensor())
        return True
    with FSDP.summon_full_params(model, writeback=False):
        torch.manual_seed(0)
        plain = Chain()
        return torch.equal(model.head.bias, 2 * plain.head.bias)


@pytest.mark.parametrize("mode", MODES)
def test_R12_R19_the_user_is_shown_what_the_shards_hold_now(ranks, mode):
    assert all(ranks.run(2, _shown_after_an_edit, mode))


def _turns(rank, world_size, mode):
    """The events of backwards of which the first has an evaluation before it, the last a forward that was dropped."""
    model = shard(Chain().double(), mode)
    found = []
    square(model).backward()
    with torch.no_grad():
        square(model)
    found.append(_backward_events(model))
    square(model)
    square(model).backward()
    found.append(_backward_events(model))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_R14_each_unit_is_freed_and_reduced_in_its_turn_whatever_ran_before(ranks, mode):
    for events in ranks.run(2, _turns, mode)[0]:
        ends = [event for event in events if event[0] != "all_gather"]
        assert ends == [(kind, unit) for unit in ("w", "v", "u", "") for kind in ("free", "reduce_scatter")]


def _frozen_turns(rank, world_size, mode, afterwards):
    model = Chain().double()
    model.v.requires_grad_(afterwards)
    model = shard(model, mode)
    model.v.requires_grad_(False)
    return [event for event in _backward_events(model) if event[0] != "all_gather"]


@pytest.mark.parametrize("afterwards", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_R11_a_frozen_unit_holds_no_reduction_up(ranks, mode, afterwards):
    events = ranks.run(2, _frozen_turns, mode, afterwards)[0]
    assert events.index(("reduce_scatter", "u")) < events.index(("free", ""))


def _frozen_afterwards(rank, world_size, mode):
    model = shard(Chain().double(), mode)
    model.u.requires_grad_(False)
    model.v.a.requires_grad_(mode == "flat")
    events = _backward_events(model)
    assert all(p.grad is None for p in model.u.parameters())
    if mode == "flat":
        return ("reduce_scatter", "u") not in events
    frozen = list(model.v.a.parameters())
    model.u.requires_grad_(True)
    square(model).backward()
    held = [p for p in model.u.parameters() if p.numel()]
    return all(p.grad is None for p in frozen) and all(p.grad is not None for p in held)


@pytest.mark.parametrize("mode", MODES)
def test_R11_what_is_frozen_after_sharding_gets_no_gradient(ranks, mode):
    assert all(ranks.run(2, _frozen_afterwards, mode))


def _penalty_twice(rank, world_size, mode):
    model = shard(Penalised().double(), mode)
    found = []
    for _ in range(2):
        square(model).backward()
        found.append(_grads(model))
        torch.optim.SGD(model.parameters(), lr=0.0).zero_grad()  # which knows of no unit
    return _same(*found)


@pytest.mark.parametrize("mode", ["orig", "fsdp2"])
def test_gradients_of_one_step_do_not_come_back_in_the_next(ranks, mode):
    assert all(ranks.run(2, _penalty_twice, mode))


def _gradients_over_summon(rank, world_size, mode):
    model = shard(Chain().double(), mode)
    square(model).backward()
    before = _grads(model)
    with FSDP.summon_full_params(model), torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    return _same(before, _grads(model))


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R24_gradients_are_there_again_after_a_summon(ranks, mode):
    assert all(ranks.run(2, _gradients_over_summon, mode))


def _failure_between(rank, world_size, mode):
    """A failure inside a summon, between a forward that keeps full parameters and its backward."""
    model = shard(Chain().double(), mode, "SHARD_GRAD_OP")
    square(model)
    with record_trace() as events:
        try:
            with FSDP.summon_full_params(model):
                events.clear()
                raise KeyError("mine")
        except KeyError:
            pass
    return [e.kind for e in events if e.kind != "free"], _is_full(model)


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R24_a_rank_that_fails_in_a_summon_starts_no_collective(ranks, mode):
    # The other ranks need not have failed: they would not be there.
    assert ranks.run(2, _failure_between, mode) == [([], [False] * 4)] * 2


def _summon_after_failure(rank, world_size, mode):
    clean, model = shard(build_chain(), mode), shard(build_chain(), mode)
    square(clean).backward()

    def boom(*_):
        raise KeyError("mine")

    handle = model.v.a.register_forward_hook(lambda module, args, output: output.register_hook(boom) and None)
    with contextlib.suppress(KeyError):
        square(model).backward()
    handle.remove()
    with FSDP.summon_full_params(model):
        assert model.head.weight.shape == (2, 4)
    model.zero_grad()
    square(model).backward()
    return _same(_grads(clean), _grads(model))


def build_chain():
    torch.manual_seed(0)
    return Chain().double()


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R17_R18_a_summon_is_right_after_a_failed_backward(ranks, mode):
    assert all(ranks.run(2, _summon_after_failure, mode))


def _kept_unreduced(rank, world_size, mode, strategy):
    model = shard(build_chain(), mode, strategy)
    if mode == "fsdp2":
        model.set_requires_gradient_sync(False)
        square(model).backward()
    else:
        with model.no_sync():
            square(model).backward()
    return _is_full(model)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("mode", MODES)
def test_R15_memory_after_a_backward_without_reduction(ranks, mode, strategy):
    kept = mode != "fsdp2" and strategy == "SHARD_GRAD_OP"
    assert ranks.run(2, _kept_unreduced, mode, strategy) == [[kept] * 4] * 2


def _no_sync_nested(rank, world_size):
    model = shard(build_chain(), "orig")
    with model.no_sync():
        with model.no_sync():
            pass
        square(model).backward()
    unreduced = all(p.grad is None for p in model.parameters())
    try:
        with model.no_sync():
            raise KeyError("mine")
    except KeyError:
        pass
    square(model).backward()
    return unreduced, all(p.grad is not None for p in model.parameters() if p.numel())


def test_R15_no_sync_nests_and_ends_with_an_exception(ranks):
    assert ranks.run(2, _no_sync_nested) == [(True, True)] * 2


def _sync_of_the_root_alone(rank, world_size):
    model = shard(build_chain(), "fsdp2")
    model.set_requires_gradient_sync(False, recurse=False)
    return [unit for kind, unit in _backward_events(model) if kind == "reduce_scatter"]


def test_R15_gradient_sync_of_one_module_alone(ranks):
    assert ranks.run(2, _sync_of_the_root_alone) == [["w", "v", "u"]] * 2


def _root_between(rank, world_size, setting):
    model = torch_backend.fully_shard(build_chain(), reshard_after_forward=setting)
    loss = square(model)
    between = _is_full(model)
    loss.backward()
    return between, _is_full(model)


@pytest.mark.parametrize(("setting", "kept"), [(None, True), (True, False), (False, True)])
def test_R13_the_root_of_fsdp2_is_kept_unless_the_user_said_otherwise(ranks, setting, kept):
    assert ranks.run(2, _root_between, setting) == [([kept], [False])] * 2


class Recomputed(nn.Module):
    """All of a model computed again in backward."""

    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)


def _whole(rank, world_size, mode, reentrant):
    clean, model = shard(build_chain(), mode), shard(build_chain(), mode)
    square(clean).backward()
    square(Recomputed(model, reentrant)).backward()
    return _same(_grads(clean), _grads(model))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_around_the_root(ranks, mode, reentrant):
    assert all(ranks.run(2, _whole, mode, reentrant))


class Stashes(Part):
    """Leaves a tensor behind that the loss is made of, beside its output."""

    def forward(self, x):
        self.stash = self.a.weight.sum() * 3
        return super().forward(x)


def _stashed(rank, world_size, mode):
    model = shard(chain_of(Stashes)().double(), mode)
    model(torch.ones((2, 4), dtype=torch.float64))
    try:
        model.u.stash.backward()
    except StateError as error:
        return str(error)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_come_without_the_outputs_are_an_error(ranks, mode):
    for message in ranks.run(2, _stashed, mode):
        assert message and "unit 'u'" in message and "return the tensors" in message


class TwoDtypes(Part):
    def __init__(self):
        super().__init__()
        self.b.to(torch.float32)

    def double(self):
        return self

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).float()).double()


def _two_dtypes(rank, world_size):
    torch.manual_seed(0)
    full, model = TwoDtypes(), TwoDtypes()
    for part in (full, model):
        part.a.to(torch.float64)
    model.load_state_dict(full.state_dict())
    model = torch_backend.fully_shard(model)
    square(full).backward()
    square(model).backward()
    for a, b in zip(full.parameters(), model.parameters(), strict=True):
        torch.distributed.all_reduce(a.grad)
        assert a.dtype == b.dtype and torch.allclose(a.grad / world_size, b.grad.full_tensor(), rtol=1e-6)
    return True


def test_R11_a_unit_of_fsdp2_may_mix_dtypes(ranks):
    assert all(ranks.run(2, _two_dtypes))


def _trained_differently(rank, world_size):
    model = Chain()
    model.v.a.bias.requires_grad_(rank != 1)
    model = shard(model, "orig")
    try:
        model(torch.ones(2, 4))
    except AgreementError as error:
        return str(error)


def test_ranks_that_freeze_different_parameters_are_told(ranks):
    for message in ranks.run(2, _trained_differently):
        assert message and "the requires_grad of parameter 'v.a.bias' differs" in message


def _while_handling(rank, world_size):
    clean, model = shard(build_chain(), "fsdp2"), shard(build_chain(), "fsdp2")
    square(clean).backward()
    try:
        raise KeyError("another")
    except KeyError:
        square(model).backward()
    return _same(_grads(clean), _grads(model)) and not any(_is_full(model))


def test_a_step_while_another_exception_is_handled(ranks):
    assert all(ranks.run(2, _while_handling))


def _earlier_hook(rank, world_size):
    model, seen = Chain(), []
    model.u.register_forward_pre_hook(lambda module, args: seen.append(type(module.a.weight.detach())))
    shard(model, "fsdp2")(torch.ones(2, 4))
    return seen == [torch.Tensor]


def test_hooks_that_were_there_before_fully_shard_see_full_parameters(ranks):
    assert all(ranks.run(2, _earlier_hook))


class Tied(Part):
    def __init__(self):
        super().__init__()
        self.b.weight = self.a.weight


def _aliases(rank, world_size, mode):
    model = shard(chain_of(Tied)(), mode)
    model(torch.ones(2, 4))
    specs = [spec for _, layout in layouts_of(model) for spec in layout.params]
    return [(spec.name, tuple(spec.aliases)) for spec in specs if spec.aliases]


@pytest.mark.parametrize("mode", MODES)
def test_R01_names_and_aliases_are_the_whole_models(ranks, mode):
    assert sorted(ranks.run(2, _aliases, mode)[0]) == [(f"{u}.a.weight", (f"{u}.b.weight",)) for u in "uvw"]


def _tied(rank, world_size, mode):
    return assert_grads(rank, world_size, mode, chain_of(Tied), square)


@pytest.mark.parametrize("mode", MODES)
def test_R31_tied_inside_a_unit(ranks, mode):
    assert sum(ranks.run(3, _tied, mode)) >= 10


def _kept_array(rank, world_size):
    plain, model = build_net(), build_net()
    for block in model.blocks:
        torch_backend.fully_shard(block)
    block = torch_backend.fully_shard(model).blocks[0]
    block.unshard()
    kept = block.up.weight.detach().numpy()
    block.reshard()
    with torch.no_grad():
        for p in block.parameters():
            p.mul_(2)
    block.unshard()
    assert torch.equal(block.up.weight, plain.blocks[0].up.weight * 2)
    block.reshard()
    assert not any(_is_full(model))
    loss_of(model, 0, rank).backward()
    return torch.equal(torch.from_numpy(kept), plain.blocks[0].up.weight)


def test_an_array_of_an_unsharded_parameter_outlives_it(ranks):
    assert all(ranks.run(2, _kept_array))


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6, dtype=torch.float16))

    def forward(self, factor):
        return self.bias * factor


def _overflow(rank, world_size):
    model = FSDP(Large(), use_orig_params=True)
    model(torch.full((6,), 20_000.0, dtype=torch.float16)).sum().backward()
    return [p.grad.tolist() for p in model.parameters() if p.numel()]


def test_R26_half_of_the_division_comes_first_so_that_float16_does_not_overflow(ranks):
    # Four times 20000 is beyond float16's 65504; half of it is not.
    grads = [value for rank in ranks.run(4, _overflow) for grad in rank for value in grad]
    assert grads == [20_000.0] * 6


def _prefetched_by_hand(rank, world_size):
    model = shard(build_chain(), "fsdp2")
    square(model).backward()
    handle = model.u.unshard(async_op=True)
    with record_trace() as events:
        square(model)
    handle.wait()
    return [e.unit for e in events if e.kind == "all_gather"]


def test_R12_an_unshard_before_the_forward_is_used_by_it(ranks):
    assert ranks.run(2, _prefetched_by_hand) == [["", "v", "w"]] * 2


class Shift(nn.Module):
    """Hands one and the same gradient tensor to its parameter and to its input."""

    is_unit = True

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(2, 4))

    def forward(self, x):
        return x + self.shift


class ShiftsTwice(Chain):
    def __init__(self):
        super().__init__()
        self.v = Shift()

    def forward(self, x):
        return self.head(self.w(self.v(self.v(self.u(self.first(x))))))


class RecomputesSecond(Part):
    """Its first layer's backward comes after a backward within the backward."""

    def forward(self, x):
        return checkpoint(self.b, torch.tanh(self.a(x)), use_reentrant=True)


PARTS = {"shifts": ShiftsTwice, "recomputes": chain_of(RecomputesSecond)}


def _grads_in_parts(rank, world_size, mode, case):
    return assert_grads(rank, world_size, mode, PARTS[case], square)


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_come_in_parts(ranks, mode, case):
    assert sum(ranks.run(2, _grads_in_parts, mode, case)) >= 6


class Reuses(Chain):
    """Runs one unit twice, and another between."""

    def forward(self, x):
        return self.head(self.v(self.u(self.v(self.first(x)))))


def _failure_between_uses(rank, world_size, mode):
    torch.manual_seed(0)
    clean, model = Reuses().double(), Reuses().double()
    model.load_state_dict(clean.state_dict())
    clean, model = shard(clean, mode), shard(model, mode)
    square(clean).backward()

    def boom(*_):
        raise KeyError("mine")

    handle = model.u.a.register_forward_hook(lambda module, args, output: output.register_hook(boom) and None)
    with contextlib.suppress(KeyError):
        square(model).backward()
    handle.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    square(model)
    optimizer.zero_grad()
    square(model).backward()
    return _same(_grads(clean), _grads(model))


@pytest.mark.parametrize("mode", MODES)
def test_R17_half_a_gradient_of_a_failed_backward_is_forgotten(ranks, mode):
    assert all(ranks.run(2, _failure_between_uses, mode))


def _memory_after_failure(rank, world_size, mode):
    model = shard(build_chain(), mode, "SHARD_GRAD_OP")

    def boom(*_):
        raise KeyError("mine")

    model.w.a.register_forward_hook(boom)
    with contextlib.suppress(KeyError):
        square(model)
    return _is_full(model)


@pytest.mark.parametrize("mode", MODES)
def test_R17_a_failed_forward_leaves_no_full_memory(ranks, mode):
    assert ranks.run(2, _memory_after_failure, mode) == [[False] * 4] * 2


class LooksInside(Chain):
    """Asks, in its own forward, for the full parameters of a part that has run."""

    message = ""

    def forward(self, x):
        x = self.u(self.first(x))
        try:
            with FSDP.summon_full_params(self.u):
                pass
        except StateError as error:
            self.message = str(error)
        return self.head(self.w(self.v(x)))


def _look_inside(rank, world_size, mode):
    model = shard(LooksInside(), mode)
    model(torch.ones(2, 4))
    return model.message


@pytest.mark.parametrize("mode", ["flat", "orig"])
def test_R18_a_part_is_not_summoned_in_the_forward_around_it(ranks, mode):
    for message in ranks.run(2, _look_inside, mode):
        assert "unit ''" in message and "forward" in message

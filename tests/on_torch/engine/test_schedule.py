"""Steps that are not the plain one: exceptions, accumulation, recomputation, reuse, unused parameters, ranks that disagree."""

# pyright: reportArgumentType=false, reportOperatorIssue=false

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_backend
from crossframe.errors import AgreementError, UsageError
from crossframe.trace import ALL_GATHER, collectives
from tests.on_torch.helpers.failing_ranks import Boom
from tests.on_torch.helpers.interfaces import APIS, OPTIONS, local_tensor, our_fsdp1, our_fsdp2, torch_fsdp1
from tests.on_torch.helpers.models import Block, Net, build_net, loss_of
from torch_backend.engine._unit import UNIT
from torch_backend.observe import record_trace

FSDP = torch_backend.FullyShardedDataParallel
FULL_SHARD = {"strategy": "FULL_SHARD"}
WRAPS = {
    "flat": lambda model: our_fsdp1(model, **FULL_SHARD, use_orig_params=False),
    "orig": lambda model: our_fsdp1(model, **FULL_SHARD, use_orig_params=True),
    "fsdp2": lambda model: our_fsdp2(model, **FULL_SHARD),
}


def _grads(model):
    return {name: None if p.grad is None else local_tensor(p.grad) for name, p in model.named_parameters()}


def _same(a, b):
    return a.keys() == b.keys() and all(
        (a[name] is None) == (b[name] is None) and (a[name] is None or torch.equal(a[name], b[name])) for name in a
    )


def _exception(rank, world_size, mode, where):
    clean, model = WRAPS[mode](build_net()), WRAPS[mode](build_net())
    loss_of(clean, 0, rank).backward()

    def boom(*_):
        raise Boom

    block = model.blocks[1]
    inner = block.norm
    if where == "forward":
        handle = inner.register_forward_pre_hook(boom)
    else:
        handle = inner.register_forward_hook(lambda module, args, output: output.register_hook(boom) and None)
    try:
        loss_of(model, 0, rank).backward()
    except Boom:
        pass
    else:
        raise AssertionError("no exception came out")
    handle.remove()
    model.zero_grad()
    if mode != "fsdp2" and where == "forward":
        with FSDP.summon_full_params(model):
            pass
    loss_of(model, 0, rank).backward()
    return _same(_grads(clean), _grads(model))


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("mode", WRAPS)
def test_R17_after_an_exception_the_next_iteration_is_right(ranks, mode, where):
    assert ranks.run(2, _exception, mode, where) == [True, True]


def _no_sync(rank, world_size, options):
    results = []
    for wrap in APIS["fsdp1"]:
        model = wrap(build_net(), **options)
        with model.no_sync():
            loss_of(model, 0, rank).backward()
        loss_of(model, 1, rank).backward()
        loss_of(model, 2, rank).backward()
        results.append(_grads(model))
    return _same(*results)


def _no_sync_fsdp2(rank, world_size, options):
    results = []
    for wrap in APIS["fsdp2"]:
        model = wrap(build_net(), **options)
        model.set_requires_gradient_sync(False)
        loss_of(model, 0, rank).backward()
        model.set_requires_gradient_sync(True)
        loss_of(model, 1, rank).backward()
        results.append(_grads(model))
    return _same(*results)


@pytest.mark.parametrize(("api", "options"), OPTIONS)
def test_R15_no_sync_accumulates_as_torch_does(ranks, api, options):
    fn = _no_sync if api == "fsdp1" else _no_sync_fsdp2
    assert ranks.run(2, fn, options) == [True, True]


class Checkpointed(Net):
    """Recomputes each block in backward, unless `reentrant` is None."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x) * self.scale


class Reused(Net):
    """Runs the first block twice."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in (self.blocks[0], *self.blocks):
            x = block(x)
        return self.head(x) * self.scale


class Inplace(Net):
    """Blocks that write into their input."""

    def forward(self, tokens):
        x = self.embedding(tokens) * 1
        for block in self.blocks:
            x = block(x.mul_(1))
        return self.head(x) * self.scale


class Skipping(Net):
    """Leaves two blocks unused, and the head's bias in a unit that is used."""

    def forward(self, tokens):
        x = self.blocks[0](self.embedding(tokens))
        return nn.functional.linear(x, self.head.weight) * self.scale


def _variant(rank, world_size, mode, cls, settings):
    """Gradients of a Net that behaves specially, against plain data parallel training in one process per rank."""
    torch.manual_seed(3)
    plain = cls(3, 7).double()
    torch.manual_seed(3)
    model = cls(3, 7).double()
    for name, value in settings.items():
        setattr(plain, name, value)
        setattr(model, name, value)
    model = WRAPS[mode](model)
    loss_of(plain, 0, rank).backward()
    loss_of(model, 0, rank).backward()
    for p in plain.parameters():
        if p.grad is not None:
            torch.distributed.all_reduce(p.grad)
            p.grad /= world_size
    expected = {
        bucket.layout.params[i].name: (owner, i)
        for owner in (m.__dict__.get(UNIT) for m in model.modules())
        if owner is not None
        for bucket in owner.buckets
        for i in range(len(bucket.layout.params))
    }
    checked = 0
    for name, p in plain.named_parameters():
        unit, i = expected[name]
        bucket = unit.buckets[0]
        piece = next((q for q in bucket.layout.pieces(rank) if q.name == name), None)
        if piece is None:
            continue
        shown = bucket.registrar.flat_param if mode == "flat" else bucket.registrar.params[i]
        if p.grad is None:
            # R29: FSDP1 gives zeros inside a used unit and nothing in an unused one.
            assert (
                shown.grad is None or not local_tensor(shown.grad).flatten()[piece.shard_start : piece.shard_stop].any()
            )
            continue
        grad = local_tensor(shown.grad).flatten()
        grad = grad[piece.shard_start : piece.shard_stop] if mode == "flat" else grad
        expected_grad = p.grad.flatten()[piece.param_start : piece.param_stop]
        # Two ranks, the same operations in the same order on each: the sum of two halves is exact to the bit.
        assert torch.equal(grad, expected_grad), name
        checked += 1
    return checked


@pytest.mark.parametrize("mode", WRAPS)
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (Checkpointed, {"reentrant": False}),
        (Checkpointed, {"reentrant": True}),
        (Reused, {}),
        (Inplace, {}),
        (Skipping, {}),
    ],
    ids=["checkpoint", "reentrant", "reused", "inplace", "unused"],
)
def test_R29_R31_gradients_of_unusual_steps(ranks, mode, cls, settings):
    assert sum(ranks.run(2, _variant, mode, cls, settings)) >= 9


class CheckpointsInside(Block):
    """A block that recomputes its own forward in backward."""

    reentrant = False

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class ReentrantInside(CheckpointsInside):
    reentrant = True


def _gathers_per_block(rank, world_size, mode, block, around):
    """The all-gathers of each block's unit in one step."""
    model = Checkpointed(2, 7)
    model.blocks = nn.ModuleList([block(7) for _ in range(2)])
    model.reentrant = around
    if mode == "fsdp2":
        for module in (*model.blocks, model):
            torch_backend.fully_shard(module)
    else:
        policy = torch_backend.ModuleWrapPolicy({block})
        model = FSDP(model, auto_wrap_policy=policy, use_orig_params=True)
    with record_trace() as events:
        loss_of(model, 0, rank).backward()
    units = [event.unit for event in events if event.kind == ALL_GATHER]
    return [units.count(f"blocks.{i}") for i in range(2)]


@pytest.mark.parametrize("mode", ["orig", "fsdp2"])
@pytest.mark.parametrize(
    ("block", "around", "expected"),
    [
        pytest.param(Block, None, 2, id="none"),
        pytest.param(CheckpointsInside, None, 2, id="inside"),
        pytest.param(ReentrantInside, None, 2, id="inside-reentrant"),
        pytest.param(Block, False, 2, id="around"),
        pytest.param(Block, True, 3, id="around-reentrant"),
    ],
)
def test_R14_all_gathers_under_activation_checkpointing(ranks, mode, block, around, expected):
    # docs/lessons/a_training_step.md derives these numbers from the step machine.
    assert ranks.run(2, _gathers_per_block, mode, block, around) == [[expected] * 2] * 2


class Passing(nn.Module):
    """Returns what another module returned: as it is, or times a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(2))
        # As many elements as around it: a rank that gathers them in another order is wrong, but waits for nobody.
        self.inner = nn.Linear(2, 2, bias=False)

    def forward(self, x, passes_on):
        x = self.inner(x * self.before)
        return x if passes_on else x * self.after


class AroundPassing(nn.Module):
    """The root, so that both of the units inside are gathered for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.passing = nn.Linear(2, 2, bias=False), Passing()

    def forward(self, x, passes_on):
        return self.passing(self.first(x), passes_on)


def _passing(rank, world_size, mode):
    """The collectives of a step in which the last rank passes on alone; and the gradients of the inputs, plain and sharded."""
    torch.manual_seed(3)
    plain = AroundPassing()
    model = copy.deepcopy(plain)
    if mode == "fsdp2":
        for module in (model.passing.inner, model.passing, model):
            torch_backend.fully_shard(module)
    else:
        policy = torch_backend.ModuleWrapPolicy({Passing, nn.Linear})
        model = FSDP(model, auto_wrap_policy=policy, use_orig_params=mode == "orig")
    grads = []
    with record_trace() as events:
        for module in (plain, model):
            x = torch.ones(3, 2, requires_grad=True)
            module(x, rank == world_size - 1).square().sum().backward()
            grads.append(x.grad)
    return [(event.kind, event.unit, event.phase) for event in collectives(events)], grads


@pytest.mark.parametrize("mode", WRAPS)
def test_R13_a_unit_that_returns_what_one_inside_it_returned_begins_its_backward_first_on_every_rank(ranks, mode):
    (first, grads), *others = ranks.run(2, _passing, mode)
    assert [unit for kind, unit, phase in first if (kind, phase) == (ALL_GATHER, "backward")][:2] == [
        "passing",
        "passing.inner",
    ]
    for events, _ in others:
        assert events == first
    for plain, sharded in (grads, *(each for _, each in others)):
        assert torch.equal(plain, sharded)


def _disagree(rank, world_size, what):
    torch.manual_seed(0)
    width = 8 if what == "shape" and rank == 1 else 7
    depth = 2 if what == "units" and rank == 1 else 3
    model = Net(depth, width)
    if what == "dtype" and rank == 1:
        model.double()
    strategy = "SHARD_GRAD_OP" if what == "strategy" and rank == 1 else "FULL_SHARD"
    model = our_fsdp1(model, strategy=strategy, use_orig_params=True)
    try:
        loss_of(model, 0, rank)
    except AgreementError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("shape", "shape of parameter 'embedding.weight' differs: rank 0, 2: [11, 7]; rank 1: [11, 8]"),
        ("units", "unit 'blocks.2'"),
        ("dtype", "dtype of parameter 'embedding.weight' differs: rank 0, 2: float32; rank 1: float64"),
        ("strategy", "strategy of unit '' differs: rank 0, 2: FULL_SHARD; rank 1: SHARD_GRAD_OP"),
    ],
)
def test_ranks_that_disagree_all_raise_and_name_the_first_difference(ranks, what, expected):
    messages = ranks.run(3, _disagree, what)
    assert all(message and expected in message for message in messages), messages


def _frozen(rank, world_size):
    """A parameter frozen after wrapping gets no gradient; the others get torch's."""
    results = []
    for wrap in (torch_fsdp1, our_fsdp1):
        model = wrap(build_net(), **FULL_SHARD, use_orig_params=True)
        for name, p in model.named_parameters():
            if name.endswith("up.bias"):
                p.requires_grad_(False)
        loss_of(model, 0, rank).backward()
        results.append(_grads(model))
    return _same(*results) and all(g is None for n, g in results[1].items() if n.endswith("up.bias"))


def test_R11_frozen_parameters_beside_trained_ones(ranks):
    assert ranks.run(2, _frozen) == [True, True]


def _wrapper(rank, world_size):
    model = our_fsdp1(build_net(), **FULL_SHARD, use_orig_params=False)
    assert model.scale.item() == 2.0 and len(model.blocks) == 3
    assert FSDP(nn.Sequential(nn.Linear(2, 2)))[0].in_features == 2
    assert len(FSDP.fsdp_modules(model)) == 4
    assert FSDP.fsdp_modules(nn.ModuleList([model]), root_only=True) == [model]
    assert model.check_is_root() and not model.blocks[0].check_is_root()
    assert next(n for n, _ in model.named_parameters()) == "_fsdp_wrapped_module._flat_param"
    assert isinstance(next(model.parameters()), torch_backend.FlatParameter)
    model.eval()
    with torch.no_grad():
        model(torch.zeros((1, 2), dtype=torch.long))
    messages = []
    for arguments in (
        {"module": 3},
        {"module": model},
        {"module": nn.Linear(2, 2), "sharding_strategy": "FULL_SHARD"},
        {"module": nn.Sequential(model), "auto_wrap_policy": torch_backend.ModuleWrapPolicy({Block})},
    ):
        try:
            FSDP(**arguments)
        except UsageError as error:
            messages.append(str(error))
    try:
        torch_backend.ModuleWrapPolicy({"Block"})
    except UsageError as error:
        messages.append(str(error))
    return messages


def test_the_wrapper_forwards_and_refuses(ranks):
    messages = ranks.run(2, _wrapper)[0]
    expected = (
        "expected a module, got int",
        "one already",
        "sharding_strategy of type",
        "not be wrapped yet",
        "'Block'",
    )
    assert len(messages) == 5
    assert all(part in message for part, message in zip(expected, messages, strict=True)), messages


def _inner_first(rank, world_size):
    model = our_fsdp1(build_net(), **FULL_SHARD, use_orig_params=True)
    model.blocks[0](torch.randn(2, 7))
    try:
        loss_of(model, 0, rank)
    except UsageError as error:
        return str(error)


def test_R13_a_unit_that_ran_as_a_root_is_not_taken_over(ranks):
    assert "outermost" in ranks.run(2, _inner_first)[1]


def test_without_a_process_group_the_error_says_what_to_call():
    with pytest.raises(UsageError, match="init_process_group"):
        FSDP(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="init_process_group"):
        torch_backend.fully_shard(nn.Linear(2, 2))

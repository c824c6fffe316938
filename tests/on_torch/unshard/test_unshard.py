"""summon_full_params and unshard: what the user sees, what persists, what is refused (R18-R25)."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportOperatorIssue=false

import pytest
import torch
from torch import nn

import torch_backend
from crossframe.errors import ParamError, StateError
from tests.on_torch.helpers.interfaces import our_fsdp1, our_fsdp2
from tests.on_torch.helpers.models import Block, batch, build_net, loss_of
from torch_backend import ShardingStrategy, fully_shard
from torch_backend.engine._unit import unit_of

FSDP = torch_backend.FullyShardedDataParallel
MODES = [
    pytest.param({"strategy": s, "use_orig_params": k}, id=f"{s}-{'orig' if k else 'flat'}")
    for s in ("FULL_SHARD", "SHARD_GRAD_OP")
    for k in (False, True)
]


def _full(model):
    with FSDP.summon_full_params(model, writeback=False):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def _storage_bytes(model):
    return [
        bucket.buffer.full.untyped_storage().nbytes()
        for wrapper in FSDP.fsdp_modules(model)
        for bucket in unit_of(wrapper).buckets
    ]


def _identities(rank, world_size, options):
    plain = build_net()
    model = our_fsdp1(build_net(), **options)
    identities = {id(p) for p in model.parameters()}
    with FSDP.summon_full_params(model):
        inside = dict(model.named_parameters())
        if options["use_orig_params"]:
            assert {id(p) for p in inside.values()} == identities
        # An array that the user makes of a parameter stays valid, and does not keep the unit from freeing its own.
        kept = inside["head.weight"].detach().numpy()
    assert _storage_bytes(model) == [0] * 4
    assert torch.equal(torch.from_numpy(kept), plain.head.weight)
    assert {id(p) for p in model.parameters()} == identities
    loss_of(model, 0, rank).backward()
    return True


@pytest.mark.parametrize("options", MODES)
def test_R25_parameters_are_the_same_objects_and_arrays_of_them_outlive_a_summon(ranks, options):
    assert all(ranks.run(3, _identities, options))


def _copies_without_shards(rank, world_size):
    precision = torch_backend.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(
        build_net(),
        sharding_strategy=torch_backend.ShardingStrategy.NO_SHARD,
        auto_wrap_policy=torch_backend.ModuleWrapPolicy({Block}),
        mixed_precision=precision,
    )
    loss = loss_of(model, 0, rank)
    assert _storage_bytes(model) == [0] * 4
    loss.backward()
    assert _storage_bytes(model) == [0] * 4
    with model.no_sync():
        loss_of(model, 1, rank).backward()
    assert _storage_bytes(model) == [0] * 4
    return True


def test_R14_copies_in_low_precision_are_freed_where_nothing_is_sharded(ranks):
    assert all(ranks.run(2, _copies_without_shards))


def _padding(rank, world_size, options):
    model = our_fsdp1(build_net(), **options)
    with FSDP.summon_full_params(model), torch.no_grad():
        for p in model.parameters():
            p.fill_(rank + 1.0)
    found = 0
    for wrapper in FSDP.fsdp_modules(model):
        for bucket in unit_of(wrapper).buckets:
            for run in bucket.layout.padding(rank):
                assert set(bucket.store.buffer[run.start : run.stop].tolist()) == {float(run.fill)}
                found += run.stop - run.start
    return found


@pytest.mark.parametrize("options", MODES)
def test_R05_R20_writeback_leaves_all_padding_as_it_is(ranks, options):
    assert any(ranks.run(4, _padding, options))


def _replaced(rank, world_size, options):
    model = our_fsdp1(build_net(), **options)
    with FSDP.summon_full_params(model):
        model.head.weight.data = torch.full((11, 7), 5.0)
    assert torch.equal(_full(model)["head.weight"], torch.full((11, 7), 5.0))
    try:
        with FSDP.summon_full_params(model):
            model.head.weight.data = torch.zeros(2, 2)
    except ParamError as error:
        assert "head.weight" in str(error) and "(11, 7)" in str(error) and "(2, 2)" in str(error)
    else:
        raise AssertionError("a wrong shape was accepted")
    assert torch.equal(_full(model)["head.weight"], torch.full((11, 7), 5.0))  # nothing lost
    return True


@pytest.mark.parametrize("options", MODES)
def test_R25_data_replaced_inside_is_written_back_and_a_wrong_shape_refused(ranks, options):
    assert all(ranks.run(2, _replaced, options))


def _adopted(rank, world_size, options):
    model = our_fsdp1(build_net(), **options)
    expected = {name: value * 2 for name, value in _full(model).items()}
    for p in model.parameters():
        p.data = p.data * 2
    assert all(torch.equal(value, expected[name]) for name, value in _full(model).items())
    loss_of(model, 0, rank).backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    model.to(torch.float32)
    # One of the root's, on every rank, so that all of them fail at the same gather.
    p = (
        next((p for p in (model.embedding.weight, model.head.weight) if p.numel()), None)
        if options["use_orig_params"]
        else None
    )
    p = next(model.parameters()) if p is None else p
    p.data = torch.zeros(p.numel() + 1)
    try:
        _full(model)
    except ParamError as error:
        return "expected this rank's sharded shape" in str(error)
    return False


@pytest.mark.parametrize("options", MODES)
def test_R25_data_replaced_outside_is_adopted_and_a_wrong_shape_refused(ranks, options):
    assert all(ranks.run(2, _adopted, options))


def _replaced_between(rank, world_size, strategy):
    """Two linears without biases, of which the first gets another weight after the forward; the same as FSDP2's units."""
    torch.manual_seed(0)
    linears = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    if strategy == "fully_shard":
        for linear in linears:
            fully_shard(linear)
        model, linear = fully_shard(linears), linears[0]
    else:
        for i in (0, 1):
            linears[i] = FSDP(linears[i], use_orig_params=True, sharding_strategy=ShardingStrategy[strategy])
        model, linear = (
            FSDP(linears, use_orig_params=True, sharding_strategy=ShardingStrategy[strategy]),
            linears[0].module,
        )
    loss = model(torch.ones(2, 4)).sum()
    old = linear.weight
    new = torch.full_like(old.detach(), 7.0)
    linear.weight = nn.Parameter(new)
    loss.backward()
    # The same object under FSDP1, the user's under FSDP2.
    assert (linear.weight is old) == (strategy != "fully_shard")
    assert torch.equal(linear.weight.detach(), new) and linear.weight.grad is not None
    full = model(torch.eye(4)[:1])
    expected = torch.full((4,), 7.0) @ next(iter(_full_weights(linears[1]))).T
    torch.testing.assert_close(full.detach()[0], expected)
    linear.weight = nn.Parameter(new.new_zeros(3) if strategy != "fully_shard" else torch.zeros(4, 4))
    try:
        full.sum().backward()
    except ParamError as error:
        return str(error)
    return ""


def _full_weights(module):
    if isinstance(module, FSDP):
        with FSDP.summon_full_params(module):
            return [param.detach().clone() for param in module.parameters()]
    return [param.full_tensor().detach() for param in module.parameters()]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "fully_shard"])
def test_R25_a_parameter_replaced_before_backward_is_adopted(ranks, strategy):
    """In the backward, which refuses one that does not fit."""
    expected = "DTensor" if strategy == "fully_shard" else "sharded shape"
    assert all("weight" in text and expected in text for text in ranks.run(2, _replaced_between, strategy))


def _twice(rank, world_size, options):
    """Inside a summon of everything, of one unit, and of a rank's own."""
    model = our_fsdp1(build_net(), **options)
    said = []
    for module, request in (
        (model, {}),
        (model.blocks[1], {}),
        (model, {"writeback": False, "rank0_only": True}),
        (model, {"recurse": False}),
    ):
        with FSDP.summon_full_params(module, **request):
            said.append(_refusal(model))
    return said


def _refusal(model):
    try:
        with FSDP.summon_full_params(model):
            return "not refused"
    except StateError as error:
        assert isinstance(error, AssertionError)
        return str(error)


@pytest.mark.parametrize("options", MODES)
def test_R18_refused_twice(ranks, options):
    for said in ranks.run(2, _twice, options):
        assert all("unsharded already" in message for message in said), said


def _exception_inside(rank, world_size, options):
    model = our_fsdp1(build_net(), **options)
    try:
        with FSDP.summon_full_params(model), torch.no_grad():
            model.head.bias.fill_(3.0)
            raise KeyError("mine")
    except KeyError:
        pass
    return bool((_full(model)["head.bias"] == 3).all()) and _storage_bytes(model) == [0] * 4


@pytest.mark.parametrize("options", MODES)
def test_R24_an_exception_inside_still_writes_back_and_restores(ranks, options):
    assert all(ranks.run(2, _exception_inside, options))


def _stale(rank, world_size, strategy):
    """A forward without backward leaves full parameters; after an optimizer step the next forward sees the new ones."""
    outputs = []
    for wrap in (lambda m: m, lambda m: our_fsdp1(m, strategy=strategy, use_orig_params=True)):
        model = wrap(build_net(dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_of(model, 0, 0).backward()
        with torch.no_grad():
            model(batch(0, 0)[0])
        optimizer.step()
        outputs.append(model(batch(0, 0)[0]).detach())
    return float((outputs[0] - outputs[1]).abs().max())


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_R12_full_parameters_that_became_stale_are_gathered_anew(ranks, strategy):
    # The same batch on both ranks: the mean of two equal gradients is that gradient, so even the bits agree.
    assert ranks.run(2, _stale, strategy) == [0.0, 0.0]


def _fsdp2_unshard(rank, world_size):
    from torch.distributed.tensor import DTensor

    plain, model = build_net(), our_fsdp2(build_net(), strategy="FULL_SHARD")
    block = model.blocks[0]
    sharded = dict(block.named_parameters())
    assert all(isinstance(p, DTensor) for p in sharded.values())
    handle = block.unshard(async_op=True)
    handle.wait()
    handle.wait()
    for name, p in block.named_parameters():
        assert not isinstance(p, DTensor) and torch.equal(p, plain.blocks[0].get_parameter(name)), name
    assert all(isinstance(p, DTensor) for p in model.blocks[1].parameters())
    block.reshard()
    block.reshard()
    assert all(p is sharded[name] for name, p in block.named_parameters())
    assert isinstance(block, Block) and type(block).__name__ == "FSDPBlock" and type(block) is type(model.blocks[1])
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    block.unshard()
    assert torch.equal(block.up.weight, plain.blocks[0].up.weight * 2)
    loss_of(model, 0, rank).backward()
    assert all(isinstance(p, DTensor) and isinstance(p.grad, DTensor) for p in model.parameters())
    return True


def test_R12_fsdp2_unshard_and_reshard(ranks):
    assert all(ranks.run(3, _fsdp2_unshard))

"""summon_full_params and unshard: what the user sees, what persists, what is refused (R18-R25)."""

import pytest
import torch
from torch import nn

import torch_backend
from crossframe.errors import ParamError, StateError, UnsupportedError, UsageError
from tests.on_torch.models import Block, batch, build_net, loss_of
from tests.on_torch.test_against_torch import _our_fsdp1, _our_fsdp2
from torch_backend.unit import unit_of

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


def _named(rank, world_size, options):
    plain = build_net()
    model = _our_fsdp1(build_net(), **options)
    identities = {id(p) for p in model.parameters()}
    with FSDP.summon_full_params(model):
        inside = dict(model.named_parameters())
        assert inside.keys() == dict(plain.named_parameters()).keys()
        for name, p in plain.named_parameters():
            assert torch.equal(inside[name], p), name
        assert dict(model.named_buffers()).keys() == dict(plain.named_buffers()).keys()
        if options["use_orig_params"]:
            assert {id(p) for p in inside.values()} == identities
        state = model.module.state_dict()
        assert state.keys() and all(value.numel() for value in state.values())
        # An array that the user makes of a parameter stays valid, and does not keep the unit from freeing its own.
        kept = inside["head.weight"].detach().numpy()
    assert _storage_bytes(model) == [0] * 4
    assert torch.equal(torch.from_numpy(kept), plain.head.weight)
    assert {id(p) for p in model.parameters()} == identities
    loss_of(model, 0, rank).backward()
    return True


@pytest.mark.parametrize("options", MODES)
def test_R19_named_parameters_and_buffers(ranks, options):
    assert all(ranks.run(3, _named, options))


def _writeback(rank, world_size, options, writeback):
    """Each rank writes its own number; what persists is each rank's slice of its own edit, never padding."""
    model = _our_fsdp1(build_net(), **options)
    before = _full(model)
    with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
        for p in model.parameters():
            p.fill_(rank + 1.0)
    after = _full(model)
    if not writeback:
        return all(torch.equal(before[name], after[name]) for name in before)
    for wrapper in FSDP.fsdp_modules(model):
        for bucket in unit_of(wrapper).buckets:
            for piece in [p for r in range(world_size) for p in bucket.layout.pieces(r)]:
                name = (
                    piece.name
                    if "." in piece.name or not unit_of(wrapper).name
                    else f"{unit_of(wrapper).name}.{piece.name}"
                )
                full = next(v for n, v in after.items() if n.endswith(name) and v.shape == _spec(bucket, piece).shape)
                written = full.flatten()[piece.param_start : piece.param_stop]
                assert set(written.tolist()) <= {float(r + 1) for r in range(world_size)}
            for run in bucket.layout.padding(rank):
                assert set(bucket.store.buffer[run.start : run.stop].tolist()) == {float(run.fill)}
    counts = sorted({v for full in after.values() for v in full.flatten().tolist()})
    return counts == [float(r + 1) for r in range(world_size)]


def _spec(bucket, piece):
    return next(spec for spec in bucket.layout.params if spec.name == piece.name)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("writeback", [True, False])
@pytest.mark.parametrize("options", MODES)
def test_R20_unshard_params_writeback(ranks, options, writeback, world_size):
    assert all(ranks.run(world_size, _writeback, options, writeback))


def _replaced(rank, world_size, options):
    model = _our_fsdp1(build_net(), **options)
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
    model = _our_fsdp1(build_net(), **options)
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


def _recurse(rank, world_size, options):
    model = _our_fsdp1(build_net(), **options)
    with FSDP.summon_full_params(model, recurse=False):
        assert model.head.weight.shape == (11, 7)
        inner = unit_of(model.blocks[0])
        assert not inner.summoned and not inner.is_full
    with FSDP.summon_full_params(model.blocks[1]):
        assert model.blocks[1].up.weight.shape == (10, 7)
        assert not unit_of(model).summoned
    with FSDP.summon_full_params(nn.Sequential(model.blocks[0], nn.Linear(2, 2))):
        assert model.blocks[0].up.weight.shape == (10, 7)
    return True


@pytest.mark.parametrize("options", MODES)
def test_R19_unshard_params_recurse_and_submodule(ranks, options):
    assert all(ranks.run(2, _recurse, options))


def _respects_reshard(rank, world_size, options):
    model = _our_fsdp1(build_net(), **options)
    loss = loss_of(model, 0, rank)
    between = _storage_bytes(model)
    with FSDP.summon_full_params(model):
        assert all(_storage_bytes(model))
    assert _storage_bytes(model) == between
    loss.backward()
    assert _storage_bytes(model) == [0] * 4
    return [bool(n) for n in between]


@pytest.mark.parametrize("options", MODES)
def test_R21_unshard_params_respects_reshard(ranks, options):
    kept = [True] * 4 if options["strategy"] == "SHARD_GRAD_OP" else [True, False, False, False]
    assert ranks.run(2, _respects_reshard, options) == [kept, kept]


def _rank0_only(rank, world_size, options):
    model = _our_fsdp1(build_net(), **options)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
        full = bool(_storage_bytes(model)[0])
        shapes = [tuple(p.shape) for p in model.parameters()]
        try:
            with FSDP.summon_full_params(model, writeback=False):
                raise AssertionError("summoned twice")
        except StateError:
            pass
    try:
        with FSDP.summon_full_params(model, rank0_only=True):
            raise AssertionError("not refused")
    except UnsupportedError as error:
        assert isinstance(error, NotImplementedError) and "writeback=False" in str(error)
    return full, (11, 7) in shapes


@pytest.mark.parametrize("options", MODES)
def test_R19_R23_rank0_only(ranks, options):
    assert ranks.run(2, _rank0_only, options) == [(True, True), (False, False)]


class _Summoning(nn.Module):
    """Tries to summon in the middle of its own forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = None
        self.message = ""

    def forward(self, x):
        self.message = _refusal(self.outer[0])
        return self.inner(x)


def _refusal(model):
    try:
        with FSDP.summon_full_params(model):
            return "not refused"
    except StateError as error:
        assert isinstance(error, AssertionError)
        return str(error)


def _from_forward_and_backward(rank, world_size):
    module = _Summoning()
    model = FSDP(nn.Sequential(FSDP(module), nn.Linear(4, 4)))
    module.outer = (model,)
    output = model(torch.randn(2, 4))
    in_forward, in_backward = module.message, []
    output.register_hook(lambda grad: None)
    module.inner.register_full_backward_hook(lambda *_: in_backward.append(_refusal(model)))
    model(torch.randn(2, 4)).sum().backward()
    with FSDP.summon_full_params(model):
        nested = _refusal(model)
    return in_forward, in_backward[0], nested


def test_R18_refused_in_forward_in_backward_and_twice(ranks):
    in_forward, in_backward, nested = ranks.run(2, _from_forward_and_backward)[0]
    assert "unit ''" in in_forward and "not during forward" in in_forward
    assert "not during backward" in in_backward
    assert "unsharded already" in nested


def _exception_inside(rank, world_size, options):
    model = _our_fsdp1(build_net(), **options)
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


def _state_dict(rank, world_size):
    model = _our_fsdp1(build_net(), strategy="FULL_SHARD", use_orig_params=True)
    try:
        model.state_dict()
    except UsageError as error:
        return str(error)


def test_a_state_dict_of_shards_is_refused(ranks):
    assert "summon_full_params" in ranks.run(2, _state_dict)[0]


def _stale(rank, world_size, strategy):
    """A forward without backward leaves full parameters; after an optimizer step the next forward sees the new ones."""
    outputs = []
    for wrap in (lambda m: m, lambda m: _our_fsdp1(m, strategy=strategy, use_orig_params=True)):
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

    plain, model = build_net(), _our_fsdp2(build_net(), strategy="FULL_SHARD")
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

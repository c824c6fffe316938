"""The engine's shards beside the numpy reference and beside what torch builds, bit for bit (R01-R07)."""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalOperand=false

import numpy as np
import pytest
import torch

import torch_backend
from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.reference import ReferenceUnit
from crossframe.state import state_key
from tests.on_torch.helpers.interfaces import our_fsdp1, our_fsdp2, torch_fsdp1
from tests.on_torch.helpers.models import Block, build_net
from torch_backend.engine._unit_tree import named_units, units_in

FSDP1 = [{"strategy": "FULL_SHARD", "use_orig_params": keep} for keep in (False, True)]


def _shards_equal_reference(rank, world_size, api, options, tied):
    full = {name: p.detach().numpy().copy() for name, p in build_net(tied=tied).named_parameters()}
    model = our_fsdp1(build_net(tied=tied), **options) if api == "fsdp1" else our_fsdp2(build_net(tied=tied), **options)
    checked = 0
    for named in named_units(model):
        name, unit = named.name, named.unit
        for each in named.buckets:
            bucket = each.bucket
            reference = ReferenceUnit(each.layout, full)
            assert np.array_equal(bucket.store.buffer.numpy(), reference.shards[rank]), name
            unit.unshard("summon")
            if bucket.layout.contiguous:
                assert np.array_equal(bucket.buffer.full.numpy(), reference.gather()[rank]), name
            for leaf, spec in zip(bucket.buffer.leaves, each.params, strict=True):
                assert np.array_equal(leaf.detach().numpy(), full[spec.name]), spec.name
                checked += 1
            unit.reshard("summon")
            assert bucket.buffer.full.untyped_storage().nbytes() == 0
    return checked


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("api", ["flat", "orig", "fsdp2"])
def test_R04_R07_shards_and_gathered_parameters_equal_the_reference(ranks, world_size, api, tied):
    options = {"strategy": "FULL_SHARD"} | ({} if api == "fsdp2" else {"use_orig_params": api == "orig"})
    interface = "fsdp2" if api == "fsdp2" else "fsdp1"
    assert ranks.run(world_size, _shards_equal_reference, interface, options, tied) == [21 - tied] * world_size


def _torch_metadata(rank, world_size, options):
    """For each unit of torch's FSDP1: numels with padding, shapes, and this rank's shard with its padding."""
    peer = torch_fsdp1(build_net(tied=True), **options)
    ours = our_fsdp1(build_net(tied=True), **options)
    compared = 0
    for theirs, named in zip(peer.fsdp_modules(peer), named_units(ours), strict=True):
        name, unit = named.name, named.unit
        handle, layout = theirs._handle, unit.buckets[0].layout
        flat = handle.flat_param
        assert isinstance(layout, FlatLayout)
        assert layout.flat_numel == flat._unpadded_unsharded_size.numel(), name
        assert [spec.shape for spec in layout.params] == [tuple(shape) for shape in flat._shapes]
        assert [spec.name for spec in layout.params] == [state_key(n) for n in flat._fqns]
        assert torch.equal(flat.data, unit.buckets[0].store.buffer), name
        pieces = {piece.name: piece for piece in layout.pieces(rank)}
        for spec, info in zip(layout.params, flat._shard_param_infos, strict=True):
            assert info.in_shard == (spec.name in pieces)
            if info.in_shard:
                piece = pieces[spec.name]
                assert (piece.shard_start, piece.numel) == (info.offset_in_shard, info.numel_in_shard)
                # torch's end index is inclusive, ours is not (R06).
                assert piece.param_start == info.intra_param_start_idx
                assert piece.param_stop == info.intra_param_end_idx + 1
            compared += 1
    return compared


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("options", FSDP1, ids=["flat", "orig"])
def test_R01_R06_flat_layout_equals_what_torch_builds(ranks, world_size, options):
    assert ranks.run(world_size, _torch_metadata, options) == [20] * world_size


def _torch_per_param(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    from tests.on_torch.helpers.interfaces import _fsdp2

    peer, ours = _fsdp2(fully_shard, build_net(), strategy="FULL_SHARD"), our_fsdp2(build_net(), strategy="FULL_SHARD")
    for (name, a), (other, b) in zip(peer.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a._local_tensor, b._local_tensor), name
        assert (a.shape, a.stride(), a.placements, a._local_tensor.shape) == (
            b.shape,
            b.stride(),
            b.placements,
            b._local_tensor.shape,
        ), name
        assert torch.equal(a.full_tensor(), b.full_tensor()), name
    units = {named.name: named.unit for named in named_units(ours)}
    assert all(isinstance(bucket.layout, PerParamLayout) for unit in units.values() for bucket in unit.buckets)
    # R01: post-order, the root's own parameters last.
    state = peer._get_fsdp_state()._fsdp_param_group
    expected = [p._module_info.param_name for p in state.fsdp_params]
    assert [spec.name.rpartition(".")[2] for spec in units[""].buckets[0].layout.params] == expected
    return True


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_R07_per_parameter_shards_equal_torchs(ranks, world_size):
    assert all(ranks.run(world_size, _torch_per_param))


def _poison(rank, world_size):
    """Train with padding overwritten by NaN before every step: nothing of it may show."""
    results = []
    for poisoned in (False, True):
        model = our_fsdp1(build_net(), strategy="FULL_SHARD", use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        from tests.on_torch.helpers.models import loss_of

        for step in range(3):
            if poisoned:
                for unit in units_in(model):
                    for run in unit.buckets[0].layout.padding(rank):
                        unit.buckets[0].store.buffer[run.start : run.stop] = float("nan")
            loss = loss_of(model, step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch_backend.FullyShardedDataParallel.summon_full_params(model, writeback=False):
            results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*results)
    return bool(results[0].isfinite().all())


def test_R05_padding_never_leaks(ranks):
    assert all(ranks.run(3, _poison))


def _refusals(rank, world_size):
    messages = []
    scalar = Block(3)
    scalar.temperature = torch.nn.Parameter(torch.tensor(1.0))
    mixed = Block(3)
    mixed.up.to(torch.float64)
    frozen = Block(3)
    frozen.up.bias.requires_grad_(False)
    meta = Block(3).to("meta")
    meta.norm.reset_parameters = None
    whole = Block(3)
    whole.register_parameter("counts", torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False))
    for module in (scalar, mixed, frozen, meta, whole):
        try:
            torch_backend.FullyShardedDataParallel(module)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_R11_what_a_unit_cannot_hold_is_refused_by_name(ranks):
    scalar, mixed, frozen, meta, whole = ranks.run(2, _refusals)[0]
    assert "'temperature' has no dims" in scalar
    assert "'norm.weight' is float32, 'up.weight' is float64" in mixed
    assert "'up.bias' has False" in frozen and "use_orig_params=True" in frozen
    assert "'norm' (LayerNorm) is on the meta device and has no reset_parameters" in meta and "weight, bias" in meta
    assert "'int64'" in whole

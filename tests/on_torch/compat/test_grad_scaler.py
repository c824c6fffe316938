"""The sharded gradient scaler beside torch's, at 2 ranks with shards of uneven sizes and infinities on one rank."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import inspect
import warnings
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_backend
from crossframe.errors import UsageError
from tests.on_torch.helpers.models import Block, build_net, loss_of
from torch_backend.sharded_grad_scaler import ShardedGradScaler

STEPS = 12
# Where the gradients of a step are not finite: (optimizer, parameter), the rank alone that sees it, and the value.
BAD = {2: (0, 0, 1, "inf"), 5: (1, 1, 0, "nan"), 6: (0, 1, 1, "-inf")}


def _torchs(*args, **kwargs):
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as Peer

    return Peer(*args, **kwargs)


SCALERS = {"torch": _torchs, "ours": ShardedGradScaler}


def _history(rank, world_size, which, dtype, early, bad, **optimizer_options):
    """Two optimizers over shards of uneven sizes, one of them empty on rank 1: scales, and parameters, after every step."""
    torch.manual_seed(rank)
    sizes = [(3, 2), (1, 0)] if rank else [(4, 2), (2, 5)]
    params = [[nn.Parameter(torch.randn(size).to(dtype)) for size in group] for group in sizes]
    optimizers = [torch.optim.Adam(group, lr=0.1, **optimizer_options) for group in params]
    scaler = SCALERS[which]("cpu", init_scale=4.0, growth_interval=3)
    history = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = sum(((step + 1.0) * p.float() ** 2).sum() for group in params for p in group)
        scaler.scale(loss).backward()
        if step in bad:
            optimizer, param, where, value = bad[step]
            grad = params[optimizer][param].grad
            if where == rank and grad.numel():
                grad[-1] = float(value)
        for optimizer in optimizers:
            if early:
                scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        history.append(
            (scaler.get_scale(), scaler.state_dict(), [p.detach().clone() for group in params for p in group])
        )
    return history


def _equal(ours, theirs):
    return all(
        a[:2] == b[:2] and all(torch.equal(x, y) for x, y in zip(a[2], b[2], strict=True))
        for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("early", [False, True], ids=["in step", "unscaled before"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_scales_and_parameters_are_torchs_bit_for_bit(ranks, dtype, early):
    ours = ranks.run(2, _history, "ours", dtype, early, BAD)
    theirs = ranks.run(2, _history, "torch", dtype, early, BAD)
    assert all(_equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for history in ours:
        scales = [scale for scale, _, _ in history]
        assert scales == [4, 4, 2, 2, 2, 1, 0.5, 0.5, 0.5, 1, 1, 1]
        assert all(torch.isfinite(p).all() for _, _, params in history for p in params)
        # The step of the optimizer with the bad gradient is skipped on both ranks, the other's is not.
        for step, (bad, *_) in BAD.items():
            for i, (before, after) in enumerate(zip(history[step - 1][2], history[step][2], strict=True)):
                assert torch.equal(before, after) == (i // 2 == bad or not after.numel()), (step, i)


FUSED_BAD = {2: (0, 0, 0, "inf"), 4: (1, 0, 1, "nan")}


@pytest.mark.parametrize("early", [False, True], ids=["in step", "unscaled before"])
def test_fused_optimizers_skip_on_all_ranks(ranks, early):
    """They unscale by themselves. torch's scaler then lets each rank decide alone."""
    fused = ranks.run(2, _history_fused, "ours", early, True)
    plain = ranks.run(2, _history_fused, "ours", early, False)
    for a, b in zip(fused, plain, strict=True):
        assert [entry[:2] for entry in a] == [entry[:2] for entry in b]
        for (_, _, xs), (_, _, ys) in zip(a, b, strict=True):
            assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(xs, ys, strict=True))
    assert [entry[0] for entry in fused[0]] == [entry[0] for entry in fused[1]]
    theirs = ranks.run(2, _history_fused, "torch", False, True)
    assert [entry[0] for entry in theirs[0]] != [entry[0] for entry in theirs[1]]


def _history_fused(rank, world_size, which, early, fused):
    return _history(rank, world_size, which, torch.float32, early, FUSED_BAD, fused=fused)


def _both(rank, world_size, which, make):
    """Infinite on every rank, unscaled before a fused step: what the parameter is after it."""
    param = nn.Parameter(torch.ones(3))
    optimizer = make([param], fused=True)
    scaler = SCALERS[which]("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    param.grad.fill_(torch.inf)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    return param.tolist()


def test_infinities_on_all_ranks_are_one_infinity(ranks):
    """The fused kernels skip where the number is 1; torch's scaler gives them the number of ranks."""
    for make in (torch.optim.SGD, torch.optim.Adam):
        assert ranks.run(2, _both, "ours", make) == [[1.0] * 3] * 2
    assert ranks.run(2, _both, "torch", torch.optim.SGD) == [[-torch.inf] * 3] * 2


def _without_gradients(rank, world_size, which):
    """Rank 0 alone has a gradient, which is infinite in the first step."""
    params = [nn.Parameter(torch.ones(2))] if rank == 0 else [nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(2))]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scaler = SCALERS[which]("cpu", init_scale=4.0)
    scales = []
    for value in (torch.inf, 1.0):
        scaler.scale(torch.zeros(()))
        if rank == 0:
            params[0].grad = torch.full((2,), value)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, params[0].sum().item()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_without_gradients_takes_part(ranks, world_size):
    ours = ranks.run(world_size, _without_gradients, "ours")
    assert ours == ranks.run(world_size, _without_gradients, "torch")
    assert ours == [([2.0, 2.0], 0.0 if rank else 1.0) for rank in range(world_size)]


def _sparse(rank, world_size, which):
    """Gradients with rows that occur twice: the gradient after unscaling, and the scale after the update."""
    found = []
    for dtype, rows in ((torch.float16, [4e4, 4e4, -4e4]), (torch.float32, [8, 8, 8]), (torch.float16, [4e4, 4e4, 0])):
        param = nn.Parameter(torch.zeros(4, dtype=dtype))
        scaler = SCALERS[which]("cpu", init_scale=4.0)
        scaler.scale(torch.zeros(()))
        values = torch.tensor(rows if rank == 0 else [1, 2, 4], dtype=dtype)
        param.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 1]]), values, (4,), check_invariants=True)
        optimizer = torch.optim.SGD([param], lr=1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        found.append((param.grad.to_dense().tolist(), scaler.get_scale(), param.tolist()))
    return found


def test_sparse_gradients_are_added_in_float32_and_skip_where_the_sum_overflows(ranks):
    ours = ranks.run(2, _sparse, "ours")
    assert str(ours) == str(ranks.run(2, _sparse, "torch"))
    assert ours[0][0] == ([0, 10000, 0, 0], 4.0, [0, -10000, 0, 0])
    assert ours[0][1] == ([0, 6, 0, 0], 4.0, [0, -6, 0, 0])
    assert ours[1][2][1:] == (2.0, [0.0] * 4) == ours[0][2][1:]


def _alone(rank, world_size):
    """Each rank in a group of its own: an infinity on rank 0 is no other's."""
    groups = [dist.new_group([r]) for r in range(world_size)]
    param = nn.Parameter(torch.ones(1))
    scaler = ShardedGradScaler("cpu", init_scale=4.0, process_group=groups[rank])
    scaler.scale(param.sum()).backward()
    if rank == 0:
        param.grad.fill_(torch.inf)
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    return scaler.get_scale(), param.item()


def test_the_ranks_of_the_process_group_agree_and_no_others(ranks):
    assert ranks.run(2, _alone) == [(2.0, 1.0), (4.0, 0.0)]


def _collectives(rank, world_size):
    """The all-reduces of two optimizers with gradients of several dtypes, or with none."""
    from torch.distributed.tensor.debug import CommDebugMode

    dtypes = [torch.float16, torch.bfloat16, torch.float32] if rank == 0 else []
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes] or [nn.Parameter(torch.ones(1))]
    optimizers = [torch.optim.SGD(params[:1]), torch.optim.SGD(params[1:] or [nn.Parameter(torch.ones(0))])]
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for param in params if rank == 0 else []:
        param.grad = torch.ones_like(param)
    with CommDebugMode() as mode:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return mode.get_total_counts()


def test_each_optimizer_costs_one_collective_on_every_rank(ranks):
    assert ranks.run(2, _collectives) == [2, 2]


def _dtensors(rank, world_size):
    """The collectives of one step over DTensors of two dtypes, with an infinity on rank 1; and what the parameters are."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (world_size,))
    shards = [torch.ones(2, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    params = [nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)])) for shard in shards]
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    for param in params:
        param.grad = torch.ones_like(param)
    if rank == 1:
        params[0].grad.to_local()[0] = torch.inf
    with CommDebugMode() as mode:
        scaler.step(torch.optim.SGD(params, lr=1.0))
    return mode.get_total_counts(), [param.to_local().tolist() for param in params]


def test_dtensors_are_checked_as_shards_in_the_same_one_collective(ranks):
    assert ranks.run(2, _dtensors) == [(1, [[1.0, 1.0]] * 2)] * 2


def _train(rank, world_size, api, bad):
    """Losses of a sharded model, at the step `bad` of which one element of rank 1's shard is infinite; and the scales."""
    model = build_net(width=5)
    if api == "fsdp1":
        policy = torch_backend.ModuleWrapPolicy({Block})
        model = torch_backend.FullyShardedDataParallel(model, auto_wrap_policy=policy)
    else:
        for block in model.blocks:
            torch_backend.fully_shard(block)
        torch_backend.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    losses, scales = [], []
    for step in range(4):
        loss = loss_of(model, 0, rank)
        scaler.scale(loss).backward()
        if step == bad and rank == 1:
            grad = next(p.grad for p in model.parameters() if p.grad is not None)
            getattr(grad, "_local_tensor", grad).view(-1)[:1] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.parametrize("api", ["fsdp1", "fsdp2"])
def test_a_sharded_model_skips_the_step_as_a_whole(ranks, api):
    good = ranks.run(2, _train, api, None)
    for rank, (losses, scales) in enumerate(ranks.run(2, _train, api, 1)):
        # Powers of two scale exactly: after the skipped step everything is as one step earlier.
        before = good[rank][0]
        assert losses == [*before[:2], before[1], before[2]] and before[1] != before[2]
        assert scales == [8.0, 4.0, 4.0, 4.0]


def test_outputs_keep_their_dtype_and_their_form():
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    half, Outputs = torch.ones((), dtype=torch.float16), namedtuple("Outputs", "a b")
    given = [half, (torch.ones(2), torch.ones((), dtype=torch.bfloat16))]
    found = scaler.scale(given)
    assert torch.equal(found[0], 4 * half) and found[0].dtype == torch.float16
    assert type(found) is list and type(found[1]) is tuple and found[1][1].dtype == torch.bfloat16
    assert torch.equal(found[1][0], torch.full((2,), 4.0))
    assert scaler.scale(Outputs(half, half)) == Outputs(4 * half, 4 * half)
    assert list(scaler.scale(iter([half]))) == [4 * half]
    assert ShardedGradScaler("cpu").scale(half).item() == torch.inf == _torchs("cpu").scale(half).item()
    for wrong in (3, "loss", {"loss": half}, None):
        with pytest.raises(UsageError, match="expected a tensor or an iterable of tensors"):
            scaler.scale(wrong)


def test_a_scaler_that_is_not_enabled_does_nothing():
    scaler = ShardedGradScaler("cpu", enabled=False)
    param = nn.Parameter(torch.ones(1))
    loss = (2 * param).sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    assert param.item() == -1.0 and scaler.get_scale() == 1.0
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert ShardedGradScaler().is_enabled() == torch.cuda.is_available()


def _grown(rank, world_size, which):
    param = nn.Parameter(torch.zeros(1))
    scaler = SCALERS[which]("cpu", init_scale=2.0**127, growth_interval=1)
    scaler.scale((0 * param).sum()).backward()
    scaler.step(torch.optim.SGD([param]))
    scaler.update()
    return scaler.get_scale()


def test_a_scale_that_would_grow_past_float32_stays(ranks):
    """torch's grows to infinity on CPU, and every step after that is skipped."""
    assert ranks.run(2, _grown, "ours") == [2.0**127] * 2
    assert ranks.run(2, _grown, "torch") == [torch.inf] * 2


def test_arguments_and_state_are_torchs():
    ours, theirs = ShardedGradScaler("cpu", 8.0, 0.25, 3.0, 5), _torchs("cpu", 8.0, 0.25, 3.0, 5)
    assert ours.state_dict() == theirs.state_dict()
    ours.load_state_dict(theirs.state_dict() | {"scale": 2.0})
    assert ours.get_scale() == 2.0
    defaults = [(p.name, p.default) for p in inspect.signature(_torchs("cpu").__init__).parameters.values()]
    assert [(p.name, p.default) for p in inspect.signature(ours.__init__).parameters.values()] == defaults


REFUSED = [
    ({"init_scale": 0.0}, "a number above 0 as init_scale, got 0.0"),
    ({"init_scale": float("inf")}, "init_scale, got inf"),
    ({"init_scale": "8"}, "init_scale, got '8'"),
    ({"backoff_factor": 1.0}, "a number above 0 and below 1 as backoff_factor, got 1.0"),
    ({"growth_factor": 1.0}, "a number above 1 as growth_factor, got 1.0"),
    ({"growth_interval": 0}, "a whole number above 0 as growth_interval, got 0"),
    ({"growth_interval": 1.5}, "growth_interval, got 1.5"),
    ({"process_group": (1, 2)}, r"process_group one group of all ranks .* got \(1, 2\)"),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=[next(iter(o)) + str(i) for i, (o, _) in enumerate(REFUSED)]
)
def test_settings_out_of_range_are_refused_by_name(options, message):
    with pytest.raises(UsageError, match=message):
        ShardedGradScaler("cpu", **options)


def test_without_a_process_group_the_first_step_says_what_to_do():
    scaler = ShardedGradScaler("cpu")
    param = nn.Parameter(torch.ones(1))
    scaler.scale(param.sum()).backward()
    with pytest.raises(UsageError, match=r"init_process_group first, or use torch\.amp\.GradScaler"):
        scaler.step(torch.optim.SGD([param]))


class GroupLike:
    """A rank, a size, and an all-reduce that leaves the tensor as it is."""

    def __init__(self, size):
        self._size = size

    def rank(self):
        return 0

    def size(self):
        return self._size

    def allreduce(self, *_):
        return self

    def wait(self):
        return True

    def get_future(self):
        raise AssertionError("nothing is asynchronous here")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("which", SCALERS)
def test_scalers_take_group_stand_ins_without_default_group(which, size):
    assert not dist.is_initialized()
    scaler = SCALERS[which]("cpu", init_scale=2.0, process_group=GroupLike(size))
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.tensor([float("inf")])
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.ones(1))
    assert scaler.step(optimizer) is None
    scaler.update()
    assert param.item() == 1.0 and scaler.get_scale() == 1.0


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_wrappers_take_group_stand_ins(use_orig_params):
    for size in (1, 2):
        model = torch_backend.FullyShardedDataParallel(
            nn.Linear(4, 4),
            process_group=GroupLike(size),
            use_orig_params=use_orig_params,
        )
        assert model.world_size == size
        assert sum(param.numel() for param in model.parameters()) == 20 // size

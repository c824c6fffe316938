"""fully_shard where torch's has no peer: what torch refuses, gets wrong, or cannot do on the CPU, beside closed forms and plain
training (R08, R12, R17, R27, R28, R29)."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportOptionalMemberAccess=false
# pyright: reportOptionalOperand=false, reportPrivateImportUsage=false

import inspect
import os
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import torch_backend
from crossframe.errors import ReplacedError, UnsupportedError
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import (
    Both,
    hybrid_mesh,
    linears,
    mesh_of,
    parallel,
    sharded_net,
    trained,
    values,
)
from tests.on_torch.helpers.models import build_net, loss_of
from tests.on_torch.helpers.scripts import PACKAGES, Side, difference, grads, inputs, raised
from torch_backend.engine._unit import unit_of
from torch_backend.fsdp2._fsdp_module import sharded_class

ROOT = Path(__file__).parents[3]


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _plain_net(num_ranks: int, steps: int, dtype: torch.dtype, factor: float | None = None) -> dict[str, Tensor]:
    """The net of `sharded_net`, trained on all ranks' batches by one process."""
    model = build_net(dtype, depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (loss_of(model, step, rank) / (factor or num_ranks)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def _largest_difference(expected: dict[str, Tensor], model: nn.Module) -> float:
    full = {name: _full(param.detach()) for name, param in model.named_parameters()}
    assert expected.keys() == full.keys()
    return max((expected[name] - full[name]).abs().max().item() for name in full)


# The same names


def _public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def _arguments(fn: Any) -> list[tuple[str, Any, str]]:
    """Names, kinds and defaults; of records as they are printed."""
    return [(p.name, p.kind, repr(p.default)) for p in inspect.signature(fn).parameters.values()]


@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="of torch 2.13")
def test_R32_all_of_torchs_names_are_there_with_their_arguments():
    theirs = import_module("torch.distributed.fsdp")
    names = import_module("torch.distributed.fsdp._fully_shard").__all__
    assert set(names) <= set(torch_backend.__all__)
    assert _public(theirs.FSDPModule) <= _public(torch_backend.FSDPModule)
    for name in _public(theirs.FSDPModule):
        ours = getattr(torch_backend.FSDPModule, name)
        assert _arguments(ours) == _arguments(getattr(theirs.FSDPModule, name)), name
    for name in names:
        expected, found = _arguments(getattr(theirs, name)), _arguments(getattr(torch_backend, name))
        if name == "fully_shard":
            assert [each for each in found if each[0] not in ("layout", "block_fn")] == expected
        elif name not in ("FSDPModule", "UnshardHandle"):
            assert found == expected, name


class _Renaming(nn.Linear):
    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "kernel"}


def test_a_sharded_class_keeps_its_own_fqn_modifiers():
    """torch.distributed.checkpoint.state_dict looks them up in each module; a missing attribute is found by an exception."""
    assert sharded_class(_Renaming)._fqn_modifiers is _Renaming._fqn_modifiers
    assert vars(sharded_class(nn.Linear))["_fqn_modifiers"](nn.Linear(1, 1)) == {}


# Against plain training


def _against_plain(rank: int, world_size: int, options: dict[str, Any], factor: float | None) -> float:
    side = Side("torch_backend", rank, world_size)
    if options.pop("hybrid", False):
        options["mesh"] = hybrid_mesh()
    model = sharded_net(side, build_net(torch.float64, depth=2), **options)
    if factor is not None:
        for unit in (model, *model.blocks):
            unit.set_gradient_divide_factor(factor)
    trained(side, model, steps=3)
    return _largest_difference(_plain_net(world_size, 3, torch.float64, factor), model)


# Sums of four terms in another order: a few roundings of 1.1e-16 in values near 1, through three steps. A wrong gradient is 1e-2.
TOLERANCE = 1e-12


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, None),
        ({"hybrid": True}, None),
        ({"reshard_after_forward": 2}, None),
        ({"hybrid": True, "reshard_after_forward": False}, 3.0),
        ({}, 3.0),
    ],
    ids=["four_shards", "hybrid", "R08_halves", "R27_hybrid_factor", "R27_factor"],
)
def test_R28_four_ranks_train_as_one(ranks, options, factor):
    for largest in ranks.run(4, _against_plain, options, factor):
        assert largest < TOLERANCE


def _factor_in_float32(rank: int, world_size: int) -> list[Tensor]:
    """Gradients that sum exactly, with a factor that torch's gloo refuses."""
    model = nn.Linear(4, 3, bias=False)
    torch_backend.fully_shard(model)
    model.set_gradient_divide_factor(8.0)
    model(torch.full((1, 4), rank + 1.0)).sum().backward()
    return [_full(model.weight.grad)]


def test_R27_a_factor_on_gloo_divides_the_sum(ranks):
    for (grad,) in ranks.run(2, _factor_in_float32):
        assert torch.equal(grad, torch.full((3, 4), 3 / 8))


def _tensor_parallel(rank: int, world_size: int, how: str) -> float:
    side = Side("torch_backend", rank, world_size)
    model, plain = parallel(side, how, torch.float64), parallel(None, how, torch.float64)
    data = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(15), dtype=torch.float64)
    mine = data[rank // 2]
    if how == "sequence":
        mine = mine.chunk(2, dim=1)[rank % 2]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DTensor, about the order of its own gathers
        for _ in range(2):
            model(mine).square().sum().backward()
            (sum(plain(part).square().sum() for part in data) / 2).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return _largest_difference({name: param.detach() for name, param in plain.named_parameters()}, model)


@pytest.mark.parametrize("how", ["columns", "sequence"])
def test_R28_tensor_and_data_parallel_ranks_train_as_one(ranks, how):
    for largest in ranks.run(4, _tensor_parallel, how):
        assert largest < TOLERANCE


# Where torch raises or is wrong


def _after_inference_mode(rank: int, world_size: int) -> list[Any]:
    side = Side("torch_backend", rank, world_size)
    results = []
    for reshard in (True, False, None):
        model = sharded_net(side, **({} if reshard is None else {"reshard_after_forward": reshard}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with torch.inference_mode():
            loss_of(model, 0, rank)
        results.append(_same(trained(side, sharded_net(side)), trained(side, model, optimizer=optimizer)))
    return results


def _same(a: list[Any], b: list[Any]) -> bool:
    """Two results of one side."""
    return difference(a, b) == ""


def test_R12_a_forward_in_inference_mode_changes_no_later_step(ranks):
    assert ranks.run(2, _after_inference_mode) == [[True] * 3] * 2


def _edited_behind_what_is_kept(rank: int, world_size: int) -> list[bool]:
    """Whether a training sees an edit of the shards after an evaluation that left full parameters there: torch, and we."""
    seen = []
    for package in PACKAGES:
        model = Side(package, rank, world_size).fully_shard(nn.Linear(2, 2, bias=False), reshard_after_forward=False)
        shard = model.weight
        with torch.no_grad():
            model(torch.ones(1, 2))
            shard.fill_(3.0)
        seen.append(bool((model(torch.ones(1, 2)) == 6).all()))
    return seen


def test_R12_a_training_sees_shards_that_were_edited_after_an_evaluation(ranks):
    # torch computes with what the evaluation gathered.
    assert ranks.run(2, _edited_behind_what_is_kept) == [[False, True]] * 2


def _stepped_behind_what_is_kept(rank: int, world_size: int) -> list[bool]:
    """Whether an evaluation sees a step of the optimizer since the last one: torch, and we."""
    seen = []
    for package in PACKAGES:
        model = Side(package, rank, world_size).fully_shard(nn.Linear(2, 2, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            before = model(torch.ones(1, 2))
            optimizer.step()
            seen.append(bool(torch.allclose(model(torch.ones(1, 2)), before - 2)))
    return seen


def test_R12_an_evaluation_sees_the_step_since_the_last(ranks):
    # The root is kept after the first evaluation, and torch takes it as it is.
    assert ranks.run(2, _stepped_behind_what_is_kept) == [[False, True]] * 2


def _after_a_failed_backward(rank: int, world_size: int, resets: bool) -> tuple[bool, bool]:
    """Whether torch and we train after it as if it had not been."""
    results = []
    for package in PACKAGES:
        side = Side(package, rank, world_size)
        model, fails = sharded_net(side), [True]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def fail(*_: Any, fails: list[bool] = fails) -> None:
            if fails:
                fails.pop()
                raise KeyError("once")

        model.blocks[0].register_full_backward_hook(fail)
        assert raised(lambda model=model: loss_of(model, 0, rank).backward()).kind is KeyError
        if resets or package == "torch.distributed.fsdp":
            model.reset_iter_state()
        results.append(_same(trained(side, sharded_net(side)), trained(side, model, optimizer=optimizer)))
    return results[0], results[1]


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="this torch cannot be reset"
)
@pytest.mark.parametrize("resets", [True, False])
def test_R17_a_failed_backward_leaves_nothing_behind(ranks, resets):
    # torch keeps the full gradients that the failed backward has left, and adds them to the next.
    assert ranks.run(2, _after_a_failed_backward, resets) == [(False, True)] * 2


def _reset_while_gradients_wait(rank: int, world_size: int) -> bool:
    side = Side("torch_backend", rank, world_size)
    model = sharded_net(side)
    model.set_requires_gradient_sync(False)
    loss_of(model, 7, rank).backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    return _same(trained(side, sharded_net(side)), trained(side, model))


def test_R17_a_reset_forgets_gradients_that_were_not_reduced(ranks):
    assert ranks.run(2, _reset_while_gradients_wait) == [True, True]


def _converted_between_steps(rank: int, world_size: int) -> list[Any]:
    side = Side("torch_backend", rank, world_size)
    model, fresh = side.fully_shard(linears(4, 3, 5)), linears(4, 3, 5)
    model(inputs(side)).sum().backward()
    model.zero_grad()
    model.double()
    side.fully_shard(fresh.double())
    for each in (model, fresh):
        each(inputs(side).double()).sum().backward()
    return [_same(list(values(model).values()), list(values(fresh).values())), model[0].weight.dtype]


def test_R25_a_model_is_converted_between_steps(ranks):
    assert ranks.run(2, _converted_between_steps) == [[True, torch.float64]] * 2


def _replaced_on(rank: int, world_size: int, which: str) -> Any:
    """What a forward says after a DTensor on a mesh has replaced a parameter; its full values without an error."""
    meshes = hybrid_mesh()
    own = meshes["shard"]
    arrangements = {"renamed": [[0, 1], [2, 3]], "reversed": [[1, 0], [3, 2]], "other": [[0, 2], [1, 3]]}
    mesh = DeviceMesh(DEVICE.type, arrangements[which], mesh_dim_names=("outer", "inner"))["inner"]
    model = torch_backend.fully_shard(linears(4, 4), mesh=own)
    model[0].weight = nn.Parameter(distribute_tensor(torch.arange(16.0, device=DEVICE).view(4, 4), mesh, [Shard(0)]))
    said = raised(lambda: model(torch.full((2, 4), rank + 1.0, device=DEVICE)))
    return said if said is not None else _full(model[0].weight.detach())


@pytest.mark.parametrize(("which", "found"), [("reversed", "[1, 0]"), ("other", "[0, 2]")])
def test_R25_a_replacement_on_other_ranks_raises(ranks, which, found):
    told = ranks.run(4, _replaced_on, which)
    assert all(said.kind is ReplacedError for said in told)
    for part in ("'0.weight'", found, "[0, 1]", "device_mesh"):
        assert part in told[0].text


def test_R25_a_replacement_on_the_same_ranks_is_taken(ranks):
    """Its mesh may have other names."""
    for full in ranks.run(4, _replaced_on, "renamed"):
        assert torch.equal(full, torch.arange(16.0, device=DEVICE).view(4, 4))


def _says_what_is_gathered_later(rank: int, world_size: int) -> list[str]:
    model = torch_backend.fully_shard(nn.Linear(4, 2))
    x = inputs(Side("torch_backend", rank, world_size))
    model(x).sum().backward()
    local = model.weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
    local.fsdp_post_all_gather = lambda *args, **options: None
    later = raised(lambda: model(x))
    weight = nn.Parameter(Both(torch.ones(4, 4), torch.ones(4, 4)))
    linear = nn.Linear(4, 4, bias=False)
    linear.weight = weight
    parts = raised(lambda: torch_backend.fully_shard(linear, reshard_after_forward=2))
    assert later is not None and parts is not None
    assert linear.weight is weight and issubclass(parts.kind, NotImplementedError)
    return [later.text, parts.text]


def test_R33_a_gather_of_ones_own_is_refused_where_it_cannot_be(ranks):
    """Methods put on a shard after fully_shard, and reshard groups: torch takes the first and raises in the second's backward."""
    for later, parts in ranks.run(4, _says_what_is_gathered_later):
        assert "'weight'" in later and "before fully_shard" in later
        assert "'weight'" in parts and "reshard_after_forward" in parts


def _two_dtypes_become_real(rank: int, world_size: int, loads: bool) -> list[Any]:
    with torch.device("meta"):
        model = linears(4, 6, 3)
    model[1].bfloat16()
    torch_backend.fully_shard(model, offload_policy=torch_backend.CPUOffloadPolicy(pin_memory=False))
    given = {
        name: distribute_tensor(torch.full(param.shape, 2.0, dtype=param.dtype), param.device_mesh, param.placements)
        for name, param in model.named_parameters()
    }
    text = ""
    if loads:
        model.load_state_dict(given, assign=True)
    else:
        model[0].weight, model[0].bias = nn.Parameter(given["0.weight"]), nn.Parameter(given["0.bias"])
        refused = raised(lambda: model(torch.ones(2, 4)))
        text = "" if refused is None else refused.text
        torch.manual_seed(0)
        torch_backend.initialise_sharded(model)
    return [text, {name: [param.dtype, _full(param.detach())] for name, param in model.named_parameters()}]


@pytest.mark.parametrize("loads", [True, False], ids=["loaded", "partly assigned"])
def test_R38_two_dtypes_on_meta_become_real(ranks, loads):
    """Each of a unit's buckets when all of its parameters are real; what is real already keeps its values."""
    torch.manual_seed(0)
    drawn = nn.Linear(6, 3, dtype=torch.bfloat16)
    for text, named in ranks.run(2, _two_dtypes_become_real, loads):
        assert [dtype for dtype, _ in named.values()] == [torch.float32] * 2 + [torch.bfloat16] * 2
        assert all((named[name][1] == 2).all() for name in ("0.weight", "0.bias"))
        for name in ("weight", "bias"):
            expected = torch.full_like(getattr(drawn, name), 2) if loads else getattr(drawn, name)
            assert torch.equal(named[f"1.{name}"][1], expected)
        assert loads or ("1.weight, 1.bias" in text and "0.weight" not in text)


def _several_dtypes(rank: int, world_size: int) -> list[Any]:
    """Two dtypes in a unit, both trained; torch says no."""
    side = Side("torch_backend", rank, world_size)

    def build() -> nn.Sequential:
        model = linears(4, 3, 5)
        model[1].double()
        model[1].register_forward_pre_hook(lambda module, args: (args[0].double(),))
        return model

    model, plain = side.fully_shard(build()), build()
    model(inputs(side)).sum().backward()
    for r in range(world_size):
        plain(inputs(Side("", r, world_size))).sum().backward()
    return [
        torch.allclose(_full(a.grad), b.grad / world_size, rtol=1e-6) and a.dtype == b.dtype
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    ]


def test_R11_a_unit_may_train_several_dtypes(ranks):
    # One addition, which rounds once.
    assert ranks.run(2, _several_dtypes) == [[True] * 4] * 2


def _pinned(rank: int, world_size: int) -> bool:
    """Offload as it is by default; without an accelerator torch has no memory to pin."""
    side = Side("torch_backend", rank, world_size)
    offloaded = sharded_net(side, offload_policy=torch_backend.CPUOffloadPolicy())
    return _same(trained(side, sharded_net(side)), trained(side, offloaded))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is memory to pin")
def test_R33_offload_without_an_accelerator_changes_nothing(ranks):
    assert ranks.run(2, _pinned) == [True, True]


ONE_SHARD = [
    {},
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"low": True},
    {"across": True},
    {"offload": True},
]


def _life_of_one_shard(
    side: Side, low: bool = False, across: bool = False, offload: bool = False, **options: Any
) -> Any:
    """Training, forwards between steps, edits of the shards, gradients of two microbatches, a state dict, and full parameters."""
    if low:
        options["mp_policy"] = side.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if across:
        options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
    if offload:
        options["offload_policy"] = side.CPUOffloadPolicy(pin_memory=False)
    model = sharded_net(side, mesh=mesh_of((side.world_size, 1), ("replicate", "shard")), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    results = [trained(side, model, 2, optimizer)]
    for step in range(2, 4):
        with torch.no_grad():
            results.append(loss_of(model, step, side.rank))
            for module in model.modules():
                if isinstance(module, side.FSDPModule):
                    module.reshard()
            for param in model.parameters():
                param._local_tensor.mul_(0.75)
        for microbatch in range(2):
            model.set_requires_gradient_sync(microbatch == 1)
            loss_of(model, step + microbatch, side.rank).backward()
        optimizer.step()
        results.append(values(model))
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    results.append(trained(side, model, 1, optimizer))
    model.load_state_dict(state)
    results.append(trained(side, model, 1, optimizer))
    model.unshard()
    results.append([param.detach().clone() for param in model.parameters(recurse=False)])
    model.reshard()
    return model, results


def _one_shard(rank: int, world_size: int) -> list[str]:
    problems = []
    # Replicas sum gradients, to which precision and offload matter; how parameters are cut and freed shows on one rank.
    some = [ONE_SHARD[i] for i in ((0, 1, 2, 4) if world_size == 1 else (0, 3, 5))]
    for options in ONE_SHARD if os.environ.get(EXHAUSTIVE) else some:
        (_, theirs), (_, ours) = (_life_of_one_shard(Side(p, rank, world_size), **options) for p in PACKAGES)
        problems += [f"{options}: {line}" for line in difference(theirs, ours).splitlines()]
    return problems


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_R14_one_shard_trains_as_torch(ranks, num_ranks):
    assert ranks.run(num_ranks, _one_shard) == [[]] * num_ranks


class _Misaligned(nn.Module):
    """A weight after three other elements: kernels add in another order where it is not aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(3, 1, bias=False)
        self.linear = nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale.weight.sum()


def _misaligned(rank: int, world_size: int) -> tuple[bool, bool]:
    outputs, mesh = [], mesh_of((1,), ("shard",))
    for package in PACKAGES:
        torch.manual_seed(0)
        model = _Misaligned()
        Side(package, rank, world_size).fully_shard(model, mesh=mesh)
        outputs.append(model(torch.randn(1, 512, generator=torch.Generator().manual_seed(1))))
    line = torch_backend.fully_shard(_Misaligned(), mesh=mesh, layout="flat")
    return torch.equal(*outputs), unit_of(line).buckets[0].buffer.is_shard


def test_R14_one_shard_computes_with_aligned_parameters(ranks):
    """Per parameter as torch, so that bits agree; a line is not copied, and its parameters lie where they lie in the shard."""
    assert ranks.run(1, _misaligned) == [(True, True)]


def _through_a_checkpoint(rank: int, world_size: int, folder: str, saves: int) -> bool:
    """Written by one package, sharded over all ranks, and read by the other; both then train alike."""
    path = str(Path(folder) / f"{PACKAGES[saves]}")
    sides = [Side(package, rank, world_size) for package in PACKAGES]
    model, fresh = sharded_net(sides[saves]), sharded_net(sides[1 - saves], build_net(depth=2, seed=5))
    trained(sides[saves], model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)
        state = {"model": fresh.state_dict()}
        checkpoint.load(state, checkpoint_id=path)
    fresh.load_state_dict(state["model"])
    return _same(trained(sides[saves], model), trained(sides[1 - saves], fresh))


@pytest.mark.parametrize("saves", [0, 1], ids=["written_by_torch", "written_by_ours"])
def test_R36_a_distributed_checkpoint_goes_from_one_to_the_other(ranks, tmp_path, saves):
    assert ranks.run(2, _through_a_checkpoint, str(tmp_path), saves) == [True, True]


class _Doubling(nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        with torch.no_grad():
            self.weight.mul_(2)


class _Extra(nn.Linear):
    noted = 0

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None:
        self.noted = state


class _Scalar(nn.Linear):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("scale", torch.ones(()))


class _Overriding(nn.Linear):
    noted = 0

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.noted += 1
        return super().load_state_dict(*args, **kwargs)


def _loaded(rank: int, world_size: int, package: str, kind: type[nn.Module], how: str) -> list[Any]:
    """What a model has after it loaded a state dict, and what its modules noted on the way."""
    api, called = import_module(package), []
    models = []
    for fill in (0.25, 0.5):
        model = nn.Sequential(nn.Linear(4, 4), kind(4, 4))
        for value in (*model.parameters(), *model.buffers()):
            value.data.fill_(fill)
        api.fully_shard(model[1])
        models.append(api.fully_shard(model))
    model, state = models[0], dict(models[1].state_dict())
    if how == "after a forward":  # the root keeps its parameters unsharded
        model(torch.ones(1, 4)).sum()
    elif how == "with a hook":
        model[0].register_load_state_dict_post_hook(lambda module, _: called.append(type(module).__name__))
    elif how == "of one element":
        state["1.scale"] = state["1.scale"].reshape(1)
    elif how == "of no data":
        state["1.scale"] = torch.empty((), device="meta")
    elif how == "without its extra state":
        del state["1._extra_state"]
    part = {key.removeprefix("1."): value for key, value in state.items() if key.startswith("1.")}
    try:
        result = model[1].load_state_dict(part) if kind is _Overriding else model.load_state_dict(state)
    except RuntimeError as error:
        return [str(error).partition(" in ")[0]]
    values = [
        value.full_tensor() if isinstance(value, DTensor) else value
        for value in model.state_dict().values()
        if isinstance(value, Tensor)
    ]
    return [[value.tolist() for value in values], called, getattr(model[1], "noted", 0), list(result.missing_keys)]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (nn.Linear, "plainly"),
        (nn.Linear, "after a forward"),
        (nn.Linear, "with a hook"),
        (_Doubling, "plainly"),
        (_Extra, "plainly"),
        (_Extra, "without its extra state"),
        (_Overriding, "plainly"),
        (_Scalar, "of one element"),
        (_Scalar, "of no data"),
    ],
)
def test_R36_a_model_loads_as_its_modules_do(ranks, kind, how):
    """A state dict is copied at once only into modules that load as nn.Module does."""
    theirs, ours = ([ranks.run(2, _loaded, package, kind, how)[0]] for package in PACKAGES)
    assert ours == theirs


def _not_contiguous(rank: int, world_size: int) -> bool:
    side = Side("torch_backend", rank, world_size)
    transposed, plain = nn.Linear(3, 4), nn.Linear(3, 4)
    values_ = torch.arange(12.0).view(3, 4)
    transposed.weight, plain.weight = nn.Parameter(values_.t()), nn.Parameter(values_.t().contiguous())
    transposed.bias, plain.bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    for model in (transposed, plain):
        side.fully_shard(model)
        model(inputs(side, width=3)).sum().backward()
    expected, found = (
        [[_full(p.detach()), _full(p.grad)] for p in model.parameters()] for model in (plain, transposed)
    )
    return _same(expected, found)


def test_R07_a_parameter_that_is_not_contiguous_is_cut_by_rows(ranks):
    # torch has NotImplementedError.
    assert ranks.run(2, _not_contiguous) == [True, True]


def _twice(rank: int, world_size: int) -> list[Any]:
    side = Side("torch_backend", rank, world_size)
    model = sharded_net(side)
    loss = loss_of(model, 0, rank)
    loss.backward(retain_graph=True)
    once = grads(model)
    loss.backward()
    return [_same([2 * each for each in once], grads(model))]


def test_R28_a_graph_is_gone_through_twice(ranks):
    # Twice the same gradient is its double, exactly.
    assert ranks.run(2, _twice) == [[True]] * 2


def _unused(rank: int, world_size: int) -> list[Any]:
    """Rank 0 uses the first and the third, rank 1 the second and the third; nobody the fourth."""

    class Four(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(4))

        def forward(self, rank: int) -> Tensor:
            return (rank + 1) * self.parts[rank].sum() + self.parts[2].sum()

    model = torch_backend.fully_shard(Four())
    results = []
    for _ in range(2):
        model(rank).backward()
        results.append([None if p.grad is None else _full(p.grad).tolist() for p in model.parameters()])
    return results


def test_R29_ranks_leave_different_parameters_unused(ranks):
    once = [[0.5, 0.5], [1.0, 1.0], [1.0, 1.0], None]
    twice = [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0], None]
    assert ranks.run(2, _unused) == [[once, twice]] * 2


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early, self.late = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, uses_late: bool) -> Tensor:
        return self.late(x) if uses_late else self.early(x)


def _late_gradient(rank: int, world_size: int) -> bool:
    """A parameter that the microbatches without reduction did not reach has a gradient in the dtype of compute, beside others in
    that of the reduction."""
    policy = torch_backend.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = torch_backend.fully_shard(_TwoLayers(), mp_policy=policy)
    alone = torch_backend.fully_shard(_TwoLayers(), mp_policy=policy)
    x = torch.linspace(0, 1, 6).view(2, 3)
    model.set_requires_gradient_sync(False)
    model(x, False).sum().backward()
    model.set_requires_gradient_sync(True)
    (model(x, False).sum() + model(x, True).sum()).backward()
    (alone(x, False).sum() + alone(x, True).sum()).backward()
    pairs = [(_full(m.late.weight.grad), _full(m.early.weight.grad)) for m in (model, alone)]
    return torch.equal(pairs[0][0], pairs[1][0]) and torch.equal(pairs[0][1], 2 * pairs[1][1])


def test_R15_a_gradient_that_comes_late_is_reduced_with_those_that_waited(ranks):
    assert all(ranks.run(2, _late_gradient))


def _rows_between(rank: int, world_size: int, num_rows: int) -> list[Any]:
    model = nn.Linear(3, num_rows, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(num_rows).view(-1, 1))
    torch_backend.fully_shard(model, reshard_after_forward=2)
    output = model(torch.ones(1, 3))
    shown = model.weight
    rows = _full(shown)[:, 0].tolist()
    output.sum().backward()
    return [rows, isinstance(shown, DTensor), _full(model.weight)[:, 0].tolist()]


@pytest.mark.parametrize("num_rows", [1, 5, 6, 8])
def test_R08_rows_are_right_between_forward_and_backward(ranks, num_rows):
    right = [float(i) for i in range(num_rows)]
    assert ranks.run(4, _rows_between, num_rows) == [[right, True, right]] * 4


def _built_for_gpus(rank: int, world_size: int) -> str:
    """The device of the default mesh, with a torch that was built for CUDA on a machine without GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        built = lambda check_available=False: None if check_available else torch.device("cuda")  # noqa: E731
        patch.setattr(torch.accelerator, "current_accelerator", built)
        model = torch_backend.fully_shard(nn.Linear(3, 4))
        model(torch.ones(1, 3)).sum().backward()
    return model.weight.device_mesh.device_type


def test_a_build_for_gpus_shards_on_the_cpu_of_a_machine_without_one(ranks):
    assert ranks.run(2, _built_for_gpus) == ["cpu"] * 2


def test_departures_show_torch_wrong_and_ours_right():
    result = subprocess.run(
        [sys.executable, "-m", "experiments.spec.departures"], capture_output=True, text=True, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    cases = [dict(lines[i : i + 4]) for i in range(0, len(lines), 4)]
    assert [next(iter(case)) for case in cases] == ["R08", "R27", "R29"]
    for case in cases:
        assert case["ours"] == case["right"] != case["torch"]


def _typed(rank, world_size):
    import spmd_types

    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("data",))
    model = nn.Linear(4, 4)
    with spmd_types.set_current_mesh(frozenset({spmd_types.MeshAxis.of(mesh.get_group("data"))})):
        spmd_types.assert_type(model.weight, {mesh.get_group("data"): spmd_types.R})
    with pytest.raises(UnsupportedError, match="parameter 'weight' has types of spmd_types"):
        torch_backend.fully_shard(model, mesh=mesh)


def test_parameters_with_types_that_shards_would_lose_are_refused(ranks):
    pytest.importorskip("spmd_types", reason="no library of the development environment needs it")
    ranks.run(2, _typed)

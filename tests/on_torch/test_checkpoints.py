"""Checkpoints of torch.distributed.checkpoint, from any way to shard a model to any other, at other world sizes (R36, R37).

[Note: one truth] The gradient of each element is a small integer that its place and the step alone decide. It is the same on all
ranks and its average is exact; what AdamW makes of it is elementwise. So one model without sharding is the truth for all, bit
for bit, at every world size.
"""

import functools
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

import torch_backend
import torch_backend.wrap
from tests.conftest import EXHAUSTIVE
from tests.on_torch.layouts import LAYOUTS, mesh_of
from torch_backend.piece_tensor import PieceTensor

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS = 2
WRAPPED = "_fsdp_wrapped_module."
HYBRID = " hybrid"
WORLD_SIZES = (1, 2, 3, 4)
FSDP2 = (*LAYOUTS, *(layout + HYBRID for layout in LAYOUTS))
FSDP1 = ("FSDP1", "FSDP1 flat", "FSDP1 mesh", "FSDP1 flat mesh", "FSDP1 mesh hybrid", "FSDP1 flat mesh hybrid")
THEIRS = ("torch FSDP1", "torch FSDP1 flat", "torch FSDP1 mesh", "torch FSDP2")
FACES = ("plain", *FSDP2, *FSDP1, *THEIRS)
# Uneven on 2, 3 and 4 ranks, some without a row for each.
SHAPES = ((5, 3), (1,), (2, 7), (9,), (3, 1, 2), (4, 4), (1, 5), (17,), (7, 2), (13, 1))


class Part(nn.Module):
    """Some parameters, each of which adds its elements, times small integers, to the loss; and buffers."""

    def __init__(self, shapes: list[tuple[int, ...]], generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__()
        self.names = [f"p{i}" for i in range(len(shapes))]
        for name, shape in zip(self.names, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        self.register_buffer("scale", torch.randn(3, generator=generator).to(dtype))
        self.register_buffer("count", torch.randint(99, (), generator=generator))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)

    def forward(self, loss: Tensor, factor: int) -> Tensor:
        for name in self.names:
            param = getattr(self, name)
            whole = torch.arange(param.numel()).remainder(7).sub(3).mul(factor).view(param.shape)
            loss = loss + (param.float() * whole).sum()
        return loss


class Net(nn.Module):
    """Parts of float32, of bfloat16, frozen, and never used; two of the root's own share a parameter."""

    def __init__(self, seed: int, drawn: int = 0) -> None:
        super().__init__()
        shapes, generator = random.Random(drawn), torch.Generator().manual_seed(seed)

        def part(dtype: torch.dtype = torch.float32) -> Part:
            return Part(shapes.choices(SHAPES, k=shapes.randint(1, 4)), generator, dtype)

        self.first, self.last = part(), part()
        self.last.p0 = self.first.p0
        self.one, self.low, self.frozen, self.unused = part(), part(torch.bfloat16), part(), part()
        self.frozen.requires_grad_(False)

    def forward(self, factor: int) -> Tensor:
        loss = torch.zeros(())
        for part in (self.first, self.one, self.low, self.frozen, self.last):
            loss = part(loss, factor)
        return loss

    def units(self) -> list[nn.Module]:
        """The parts that are units of their own."""
        return [self.one, self.low, self.frozen, self.unused]


def built(face: str, seed: int, drawn: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in some manner, and its optimizer of two groups."""
    model: Any = Net(seed, drawn)
    layout, mesh = face.removesuffix(HYBRID), mesh_of(2, 2) if face.endswith(HYBRID) else None
    package: Any = torch.distributed.fsdp if face.startswith("torch") else torch_backend
    units = model.units()
    if layout in LAYOUTS or layout == "torch FSDP2":
        options = {"layout": layout} if layout in LAYOUTS else {}
        for module in (*model.units(), model):
            package.fully_shard(module, mesh=mesh or mesh_of(dist.get_world_size()), **options)
    elif "FSDP1" in face:
        model = package.FullyShardedDataParallel(
            model,
            sharding_strategy=package.ShardingStrategy.HYBRID_SHARD if mesh else package.ShardingStrategy.FULL_SHARD,
            use_orig_params="flat" not in face,
            device_mesh=mesh or (mesh_of(dist.get_world_size()) if "mesh" in face else None),
            device_id=torch.device("cpu"),
            auto_wrap_policy=package.wrap.CustomPolicy(lambda module: module in units),
        )
    else:
        assert face == "plain"
    groups = [[], []]
    for name, param in model.named_parameters():
        groups[name.replace(WRAPPED, "").startswith("one")].append(param)
    return model, torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 0.002}], lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step, of gradients and learning rates of its own."""
    model(step + 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] *= 0.75


def trained(face: str, num_steps: int, drawn: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After so many steps."""
    model, optimizer = built(face, 1, drawn)
    for step in range(num_steps):
        train(model, optimizer, step)
    return model, optimizer


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor | PieceTensor) else value


def content(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All of both by name: parameters, buffers, state, groups; in full."""
    return in_model(model) | in_optimizer(model, optimizer)


def in_model(model: nn.Module) -> dict[str, Any]:
    """Full parameters, and buffers, by name."""
    found: dict[str, Any] = {name: buffer for name, buffer in model.named_buffers() if not name.endswith("unsaved")}
    if package_of(model) is None:
        found |= {name: whole(param.detach()) for name, param in model.named_parameters(remove_duplicate=False)}
    else:
        with package_of(model).FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found |= {name: param.detach().clone() for name, param in model.named_parameters(remove_duplicate=False)}
    return {name.replace(WRAPPED, ""): value for name, value in found.items()}


def in_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Full state, and groups, by the names of parameters."""
    if package_of(model) is not None:
        with typed(model, "FULL"):
            by_name = package_of(model).FullyShardedDataParallel.optim_state_dict(model, optimizer)
        state, groups = by_name["state"], by_name["param_groups"]
    else:
        names = {param: name for name, param in model.named_parameters()}
        state = {names[param]: values for param, values in optimizer.state.items()}
        groups = [{**group, "params": [names[param] for param in group["params"]]} for group in optimizer.param_groups]
    found = {f"{key} of {name}": whole(value) for name, values in state.items() for key, value in values.items()}
    for group in groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        found |= {f"group of {name}": settings for name in group["params"]}
    return found


def package_of(model: nn.Module) -> Any:
    """Where a FullyShardedDataParallel is from; None of another model."""
    for package in (torch_backend, torch.distributed.fsdp):
        if isinstance(model, package.FullyShardedDataParallel):
            return package
    return None


def typed(model: nn.Module, kind: str) -> Any:
    """Inside, the state dicts of an FSDP1 model are of that type."""
    package = package_of(model)
    # Not offloaded: torch's moments overwrite one another on the CPU then.
    optim_config = getattr(package, f"{kind.title()}OptimStateDictConfig")(offload_to_cpu=False)
    settings = package.StateDictType[f"{kind}_STATE_DICT"], None, optim_config
    return package.FullyShardedDataParallel.state_dict_type(model, *settings)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Where two are not of the same bits."""
    wrong = [f"only in one: {key}" for key in set(found) ^ set(expected)]
    for key in set(found) & set(expected):
        a, b = found[key], expected[key]
        if isinstance(b, Tensor):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
        else:
            same = a == b
        wrong += [] if same else [f"{key}: {shown(a)} is not {shown(b)}"]
    return sorted(wrong)


def shown(value: Any) -> str:
    """In one short line."""
    text = " ".join(f"{value.dtype} {value.tolist()}".split()) if isinstance(value, Tensor) else repr(value)
    return text[:80]


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1, 1).contiguous().view(torch.uint8)


@functools.cache
def truth(num_steps: int, drawn: int = 0) -> dict[str, Any]:
    """See [Note: one truth]."""
    found = content(*trained("plain", num_steps, drawn))
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in found.items()}


# As a user does it: see "Checkpoints" in the README.


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved, or what a checkpoint is loaded into: of each tensor this rank's part."""
    if package_of(model) is None:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with typed(model, "SHARDED"):
        by_name = package_of(model).FullyShardedDataParallel.optim_state_dict(model, optimizer)
        return {"model": model.state_dict(), "optimizer": by_name}


def prime(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has not stepped the state that is loaded into, by a step that changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param) if param.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def load(path: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint, also where the optimizer had no state of some parameters, and has none."""
    prime(optimizer)
    found = state_of(model, optimizer)
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    by_name = found["optimizer"]["state"]
    for name in [name for name in by_name if not any(key.startswith(f"optimizer.state.{name}.") for key in saved)]:
        del by_name[name]
    # As it is by default, torch forgets ShardedTensors of which this rank has nothing.
    dcp.load(found, checkpoint_id=path, planner=DefaultLoadPlanner(flatten_sharded_tensors=False))
    if package_of(model) is None:
        set_model_state_dict(model, found["model"])
        set_optimizer_state_dict(model, optimizer, found["optimizer"], options=StateDictOptions(strict=False))
        return
    with typed(model, "SHARDED"):
        model.load_state_dict(found["model"])
        wrapper = package_of(model).FullyShardedDataParallel
        optimizer.load_state_dict(wrapper.optim_state_dict_to_load(model, optimizer, found["optimizer"]))


@dataclass(frozen=True)
class Saved:
    """A checkpoint."""

    face: str
    world_size: int
    drawn: int
    folder: str

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.face} on {self.world_size}, drawn {self.drawn}"


def quiet(work: Callable[..., Any]) -> Callable[..., Any]:
    """Without what torch has to say of its own interfaces."""

    @functools.wraps(work)
    def run(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work(*args)

    return run


@quiet
def _save(rank: int, world_size: int, checkpoints: list[Saved]) -> list[str]:
    wrong = []
    for saved in checkpoints:
        model, optimizer = trained(saved.face, NUM_STEPS, saved.drawn)
        dcp.save(state_of(model, optimizer), checkpoint_id=saved.path)
        found, expected = content(model, optimizer), truth(NUM_STEPS, saved.drawn)
        wrong += [f"{saved}: {line}" for line in differences(found, expected)]
    return wrong


@quiet
def _load(rank: int, world_size: int, cases: list[tuple[Saved, str]]) -> list[str]:
    wrong = []
    for saved, face in cases:
        model, optimizer = built(face, 2, saved.drawn)
        load(saved.path, model, optimizer)
        lines = differences(content(model, optimizer), truth(NUM_STEPS, saved.drawn))
        train(model, optimizer, NUM_STEPS)
        lines += [
            f"{line}, a step later"
            for line in differences(content(model, optimizer), truth(NUM_STEPS + 1, saved.drawn))
        ]
        wrong += [f"{saved} into {face} on rank {rank} of {world_size}: {line}" for line in lines]
    return wrong


def _assert_same(ranks: Any, world_size: int, work: Callable[..., Any], cases: list[Any]) -> None:
    seconds = 20 + 4 * len(cases)
    wrong = [line for lines in ranks.run(world_size, work, cases, seconds=seconds) for line in lines] if cases else []
    assert not wrong, f"{len(wrong)} differences, the first of them:\n" + "\n".join(wrong[:5])


def faces_on(world_size: int) -> list[str]:
    """Those that there are on so many ranks."""
    return [face for face in FACES if world_size == 4 or not face.endswith(HYBRID)]


def test_R36_R37_a_checkpoint_goes_from_any_sharding_to_any_other_at_any_world_size(ranks, tmp_path):
    """Also between torch's own and ours. The short form: each once as the one that saves, and each once as the one that loads
    at each world size, of those of one seed."""
    checkpoints, cases = chosen(str(tmp_path))
    for world_size in WORLD_SIZES:
        _assert_same(ranks, world_size, _save, [saved for saved in checkpoints if saved.world_size == world_size])
    for world_size in WORLD_SIZES:
        _assert_same(ranks, world_size, _load, [(saved, face) for saved, face, size in cases if size == world_size])


def chosen(folder: str) -> tuple[list[Saved], list[tuple[Saved, str, int]]]:
    """Checkpoints, and which of them what loads at which world size."""
    rng = random.Random(0)
    if os.environ.get(EXHAUSTIVE):
        checkpoints = [
            Saved(face, size, drawn, folder) for size in WORLD_SIZES for face in faces_on(size) for drawn in range(2)
        ]
        cases = [(saved, face, size) for saved in checkpoints for size in WORLD_SIZES for face in faces_on(size)]
        return checkpoints, cases
    checkpoints = []
    for i, face in enumerate(FACES):
        size = 4 if face.endswith(HYBRID) else (2, 3, 4)[i % 3]
        checkpoints.append(Saved(face, size, i, folder))
    cases = []
    for i, face in enumerate(FACES):
        size = 4 if face.endswith(HYBRID) else WORLD_SIZES[i % 4]
        cases += [(saved, face, size) for saved in rng.sample(checkpoints, 2)]
    return checkpoints, cases

"""Checkpoints of torch.distributed.checkpoint, from any way to shard a model to any other, at other world sizes (R36, R37).

[Note: one truth] The gradient of each element is a small integer that its place and the step alone decide. It is the same on all
ranks and its average is exact; what AdamW makes of it is elementwise. So one model without sharding is the truth for all, bit
for bit, at every world size.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportReturnType=false

import contextlib
import functools
import gc
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile, record_function

import torch_backend
import torch_backend.wrap
from crossframe.errors import CrossframeError
from experiments.bench.memory import WATCHED, peak_bytes
from tests.conftest import EXHAUSTIVE
from tests.on_torch.helpers.layouts import LAYOUTS, mesh_of
from torch_backend.pieces._piece_tensor import PieceTensor

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS = 1
WRAPPED = "_fsdp_wrapped_module."
HYBRID = " hybrid"
WORLD_SIZES = (1, 2, 3, 4)
FSDP2 = (*LAYOUTS, *(layout + HYBRID for layout in LAYOUTS))
FSDP1 = ("FSDP1", "FSDP1 flat", "FSDP1 mesh", "FSDP1 flat mesh", "FSDP1 mesh hybrid", "FSDP1 flat mesh hybrid")
THEIRS = ("torch FSDP1", "torch FSDP1 flat", "torch FSDP1 mesh", "torch FSDP2")
APIS = ("plain", *FSDP2, *FSDP1, *THEIRS)
# Uneven on 2, 3 and 4 ranks, some without a row for each. Few: a DTensor works out each operator anew for each shape.
SHAPES = ((5, 3), (1,), (9,), (3, 1, 2), (4, 4))


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


def built(api: str, seed: int = 0, drawn: int = 0, model: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in some manner, and its optimizer of two groups."""
    model = Net(seed, drawn) if model is None else model
    layout, mesh = api.removesuffix(HYBRID), mesh_of(2, 2) if api.endswith(HYBRID) else None
    package: Any = torch.distributed.fsdp if api.startswith("torch") else torch_backend
    units = model.units()
    if layout in LAYOUTS or layout == "torch FSDP2":
        options = {"layout": layout} if layout in LAYOUTS else {}
        for module in (*model.units(), model):
            package.fully_shard(module, mesh=mesh or mesh_of(dist.get_world_size()), **options)
    elif "FSDP1" in api:
        model = package.FullyShardedDataParallel(
            model,
            sharding_strategy=package.ShardingStrategy.HYBRID_SHARD if mesh else package.ShardingStrategy.FULL_SHARD,
            use_orig_params="flat" not in api,
            device_mesh=mesh or (mesh_of(dist.get_world_size()) if "mesh" in api else None),
            device_id=torch.device("cpu"),
            auto_wrap_policy=package.wrap.CustomPolicy(lambda module: module in units),
        )
    else:
        assert api == "plain"
    groups = [[], []]
    for name, param in model.named_parameters():
        groups[name.replace(WRAPPED, "").startswith(("one", "1."))].append(param)
    return model, torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "lr": 0.002}], lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step, of gradients and learning rates of its own."""
    model(step + 1).backward()
    optimizer.step()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] *= 0.75


def trained(api: str, num_steps: int, drawn: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After so many steps."""
    model, optimizer = built(api, 1, drawn)
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
    if not optimizer.state:
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

    api: str
    world_size: int
    drawn: int
    folder: str

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.api} on {self.world_size}, drawn {self.drawn}"


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
        model, optimizer = trained(saved.api, NUM_STEPS, saved.drawn)
        dcp.save(state_of(model, optimizer), checkpoint_id=saved.path)
        found, expected = content(model, optimizer), truth(NUM_STEPS, saved.drawn)
        wrong += [f"{saved}: {line}" for line in differences(found, expected)]
    return wrong


@quiet
def _load(rank: int, world_size: int, cases: list[tuple[Saved, str]]) -> list[str]:
    wrong = []
    for saved, api in cases:
        model, optimizer = built(api, 2, saved.drawn)
        load(saved.path, model, optimizer)
        lines = differences(content(model, optimizer), truth(NUM_STEPS, saved.drawn))
        train(model, optimizer, NUM_STEPS)
        lines += [
            f"{line}, a step later"
            for line in differences(content(model, optimizer), truth(NUM_STEPS + 1, saved.drawn))
        ]
        wrong += [f"{saved} into {api} on rank {rank} of {world_size}: {line}" for line in lines]
    return wrong


def _assert_same(ranks: Any, world_size: int, work: Callable[..., Any], cases: list[Any]) -> None:
    seconds = 20 + 4 * len(cases)
    wrong = [line for lines in ranks.run(world_size, work, cases, seconds=seconds) for line in lines] if cases else []
    assert not wrong, f"{len(wrong)} differences, the first of them:\n" + "\n".join(wrong[:5])


def apis_on(world_size: int) -> list[str]:
    """Those that there are on so many ranks."""
    return [api for api in APIS if world_size == 4 or not api.endswith(HYBRID)]


@pytest.mark.exhaustive
def test_R36_R37_a_checkpoint_goes_from_any_sharding_to_any_other_at_any_world_size(ranks, tmp_path):
    """Also between torch's own and ours. The short form: one half saves and the other loads, those with replicas at 4
    ranks and the others at fewer in turn."""
    checkpoints, cases = chosen(str(tmp_path))
    for world_size in WORLD_SIZES:
        _assert_same(ranks, world_size, _save, [saved for saved in checkpoints if saved.world_size == world_size])
    for world_size in WORLD_SIZES:
        _assert_same(ranks, world_size, _load, [(saved, api) for saved, api, size in cases if size == world_size])


def chosen(folder: str) -> tuple[list[Saved], list[tuple[Saved, str, int]]]:
    """Checkpoints, and which of them what loads at which world size."""
    rng = random.Random(0)
    if os.environ.get(EXHAUSTIVE):
        checkpoints = [
            Saved(api, size, drawn, folder) for size in WORLD_SIZES for api in apis_on(size) for drawn in range(2)
        ]
        cases = [(saved, api, size) for saved in checkpoints for size in WORLD_SIZES for api in apis_on(size)]
        return checkpoints, cases
    checkpoints = []
    for i, api in enumerate(APIS[::2]):
        size = 4 if api.endswith(HYBRID) else (2, 3)[i % 2]
        checkpoints.append(Saved(api, size, i, folder))
    cases = []
    for i, (api, saved) in enumerate(zip(APIS[1::2], rng.sample(checkpoints, len(checkpoints)), strict=False)):
        size = 4 if api.endswith(HYBRID) else (1, 2, 3)[i % 3]
        cases.append((saved, api, size))
    return checkpoints, cases


# What does not fit


def local_bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that this rank holds."""
    named = [*model.named_parameters(), *model.named_buffers()]
    named += [
        (f"state {i} {key}", value)
        for i, param in enumerate(param for group in optimizer.param_groups for param in group["params"])
        for key, value in optimizer.state.get(param, {}).items()
    ]
    return {name: own(value).detach().clone() for name, value in named}


def own(value: Tensor) -> Tensor:
    """What of it is here."""
    if isinstance(value, PieceTensor):
        return value.local
    return value.to_local() if isinstance(value, DTensor) else value


def spoiled(state: dict[str, Any], how: str) -> dict[str, Any]:
    """A model's state dict with something wrong in it."""
    state = dict(state)
    match how:
        case "missing":
            del state["one.p0"], state["first.scale"]
        case "extra":
            state["one.p9"] = state["nowhere"] = torch.zeros(3)
        case "misshapen":
            state["one.p0"] = torch.zeros(99, 2)
            state["frozen.scale"] = torch.zeros(4)
        case "no tensor":
            state["one.p0"] = 3
        case "another model's":
            return {name: torch.zeros(2) for name in ("weight", "bias")}
        case "on another mesh":
            elsewhere = [Shard(0), Replicate()]
            state["one.p0"] = distribute_tensor(whole(state["one.p0"]), mesh_of(dist.get_world_size(), 1), elsewhere)
    return state


NAMES = {
    "missing": ("one.p0", "first.scale"),
    "extra": ("one.p9", "nowhere"),
    "misshapen": ("one.p0", "frozen.scale"),
    "no tensor": ("one.p0",),
    "another model's": ("weight", "bias", "one.p0", "first.scale", "unused.p0"),
    "on another mesh": ("one.p0",),
}


@quiet
def _refuse(rank: int, world_size: int, api: str, kind: str) -> list[str]:
    """Every way to be wrong, on all ranks and on the last alone: what was not refused by all the names, or changed something."""
    model, optimizer = trained(api, 1)
    source, _ = built(api, 2)
    wrong = []

    def shown_as(module: nn.Module) -> Any:
        return typed(module, kind) if package_of(module) else contextlib.nullcontext()

    with shown_as(source):
        right = source.state_dict()
    before = local_bits(model, optimizer)
    for how, alone, strict in product(NAMES, (False, True), (True, False)):
        if how == "on another mesh" and (alone or "FSDP1" in api):  # a mesh is made by all ranks
            continue
        given = dict(right) if alone and rank < world_size - 1 else spoiled(right, how)
        case = f"{how}{' on one rank' if alone else ''}{'' if strict else ', not strict'}, rank {rank}"
        said = "nothing"
        try:
            with shown_as(model):
                model.load_state_dict(given, strict=strict)
        except RuntimeError as error:
            said = str(error) if isinstance(error, CrossframeError) else f"torch's {type(error).__name__}"
        # Without `strict` what is missing or too much is no fault, as long as all ranks load the same.
        fine = not strict and not alone and how in ("missing", "extra", "another model's")
        if fine and said != "nothing":
            wrong.append(f"{case}: refused: {said}")
        if fine:
            for name, value in before.items():
                restore(model, name, value)
            continue
        wrong += [f"{case}: {name!r} not in: {said}" for name in NAMES[how] if not alone and name not in said]
        wrong += [f"{case}: said {said}"] * (said == "nothing")
        changed = differences(local_bits(model, optimizer), before)
        wrong += [f"{case}: {line}" for line in changed]
    return wrong


def restore(model: nn.Module, name: str, value: Tensor) -> None:
    """Put back what this rank held."""
    for found, kept in (*model.named_parameters(), *model.named_buffers()):
        if found == name:
            with torch.no_grad():
                own(kept.detach()).copy_(value)


@pytest.mark.parametrize(
    "api, kind", [*((layout, "") for layout in LAYOUTS), ("FSDP1", "SHARDED"), ("FSDP1 flat mesh", "FULL")]
)
def test_R36_a_model_state_dict_that_does_not_fit_changes_nothing_on_any_rank(ranks, api, kind):
    """Missing, extra and misshapen entries, what is no tensor, another model's, a tensor on another mesh: all of the names are
    listed; and where one rank alone was given such, all refuse."""
    wrong = [line for lines in ranks.run(2, _refuse, api, kind) for line in lines]
    assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:8])


@quiet
def _cast(rank: int, world_size: int, layout: str) -> list[str]:
    model, _ = built(layout, 1)
    source, _ = built(layout, 2)
    model.load_state_dict({name: value.double() for name, value in source.state_dict().items()})
    return differences(in_model(model), in_model(source))


def test_R36_another_dtype_is_converted_as_torch_does(ranks):
    for layout in LAYOUTS:
        wrong = ranks.run(2, _cast, layout)
        assert wrong == [[], []], f"{layout}: {wrong}"


@quiet
def _load_another(rank: int, world_size: int, saved: Saved, apis: list[str]) -> list[str]:
    """A checkpoint of a model of other shapes and other names."""
    wrong = []
    for api in apis:
        model, optimizer = built(api, 3, saved.drawn + 1)
        prime(optimizer)
        before = local_bits(model, optimizer)
        try:
            load(saved.path, model, optimizer)
            wrong.append(f"{api} on rank {rank} loaded")
        except CheckpointException as error:
            wrong += [f"{api} on rank {rank} said: {error}"] * ("model." not in str(error))
        wrong += [f"{api} on rank {rank}: {line}" for line in differences(local_bits(model, optimizer), before)]
    return wrong


def test_R36_a_checkpoint_of_another_model_changes_nothing_on_any_rank(ranks, tmp_path):
    saved = Saved("per_param", 2, 0, str(tmp_path))
    _assert_same(ranks, 2, _save, [saved])
    apis = ["plain", *LAYOUTS, "FSDP1", "FSDP1 flat mesh"]
    wrong = [line for lines in ranks.run(2, _load_another, saved, apis) for line in lines]
    assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:8])


@quiet
def _refuse_optimizer(rank: int, world_size: int, api: str) -> list[str]:
    """Optimizer state with something wrong in it, on all ranks."""
    wrong = []
    model, optimizer = trained(api, 1)
    source = trained(api, 2)
    before = local_bits(model, optimizer)
    for how in ("misshapen", "unknown"):
        given = state_of(*source)["optimizer"]
        by_name = given["state"]
        if how == "misshapen":
            by_name["one.p0"]["exp_avg"] = torch.zeros(99, 2)
        else:
            by_name["nowhere"] = dict(by_name["one.p0"])
        said = "nothing"
        try:
            with typed(model, "SHARDED"):
                wrapper = package_of(model).FullyShardedDataParallel
                optimizer.load_state_dict(wrapper.optim_state_dict_to_load(model, optimizer, given))
        except CrossframeError as error:
            said = str(error)
        name = "nowhere" if how == "unknown" else "one.p0"
        wrong += [f"{how}, rank {rank}: {name} not in: {said}"] * (name not in said)
        wrong += [f"{how}, rank {rank}: {line}" for line in differences(local_bits(model, optimizer), before)]
    return wrong


@pytest.mark.parametrize("api", ["FSDP1", "FSDP1 flat mesh"])
def test_R37_optimizer_state_that_does_not_fit_changes_nothing_on_any_rank(ranks, api):
    wrong = [line for lines in ranks.run(2, _refuse_optimizer, api) for line in lines]
    assert not wrong, f"{len(wrong)} wrong, the first of them:\n" + "\n".join(wrong[:8])


# Saving beside training


@functools.cache
def _beside() -> dist.ProcessGroup | None:
    """A group for what is saved beside training, whose collectives would meet those of training in its own."""
    return dist.new_group()


@quiet
def _save_beside(rank: int, world_size: int, api: str, path: str) -> list[str]:
    model, optimizer = trained(api, NUM_STEPS)
    saving: Any = dcp.async_save(state_of(model, optimizer), checkpoint_id=path, process_group=_beside())
    train(model, optimizer, NUM_STEPS)  # while it is written
    saving.result()
    other, restored = built(api, 2)
    load(path, other, restored)
    return differences(content(other, restored), truth(NUM_STEPS))


@pytest.mark.parametrize("api", ["per_param", "ragged", "FSDP1 mesh"])
def test_R36_R37_what_is_saved_beside_training_is_of_the_moment_when_it_was_asked_for(ranks, tmp_path, api):
    for wrong in ranks.run(2, _save_beside, api, str(tmp_path / "checkpoint")):
        assert not wrong, "\n".join(wrong[:5])


# Memory


class Blocks(nn.Sequential):
    """Equal units, each of one parameter that is far larger than its shards."""

    NUM, NUMEL = 4, 64 * 256

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(64, 256, bias=False) for _ in range(self.NUM)))

    def units(self) -> list[nn.Module]:
        return list(self)

    def forward(self, factor: int) -> Tensor:
        return torch.stack([block(torch.ones(1, 64)).sum() for block in self]).sum() * factor


@quiet
def _sharded_memory(rank: int, world_size: int, api: str, path: str) -> int:
    """The largest piece of memory that was asked for while a checkpoint was saved and loaded."""
    model, optimizer = built(api, model=Blocks())
    train(model, optimizer, 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        dcp.save(state_of(model, optimizer), checkpoint_id=path)
        load(path, model, optimizer)
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return max(event.nbytes() for event in events if event.name() == "[memory]")


@pytest.mark.parametrize("api", [*LAYOUTS, "FSDP1", "FSDP1 flat mesh"])
def test_R36_no_rank_has_a_full_parameter_during_a_sharded_save_or_load(ranks, tmp_path, api):
    full = 4 * Blocks.NUMEL
    for largest in ranks.run(4, _sharded_memory, api, str(tmp_path / "checkpoint")):
        assert largest < full / 2, f"{largest} bytes at once, and a full parameter has {full}"


@quiet
def _full_memory(rank: int, world_size: int, api: str) -> float:
    """The most that a full state dict on rank 0 took, in units."""
    model, optimizer = built(api, model=Blocks())
    train(model, optimizer, 0)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function(WATCHED):
        if package_of(model) is None:
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        else:
            config = package_of(model).FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            kind = package_of(model).StateDictType.FULL_STATE_DICT
            with package_of(model).FullyShardedDataParallel.state_dict_type(model, kind, config):
                model.state_dict()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    return peak_bytes(events) / (4 * Blocks.NUMEL)


@pytest.mark.parametrize("api", ["FSDP1", "FSDP1 flat mesh", "per_param"])
def test_R36_a_full_save_takes_one_unit_more_than_its_result(ranks, api):
    first, other = ranks.run(2, _full_memory, api)
    print(f"{api}: {first:.2f} and {other:.2f} units, for a result of {Blocks.NUM}")
    # What the other ranks take under fully_shard is torch's own doing.
    assert first <= Blocks.NUM + 1.01 and other <= (2.01 if "FSDP1" in api else first)

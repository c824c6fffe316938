"""Random trees under `FullyShardedDataParallel`, saved by one of torch's and ours and loaded by one of them: options, how they
are drawn, and what a run does with them (R36, R37).

A run trains, saves the model's state dict and the optimizer's, loads both into a model with other values and its new optimizer,
and trains on. Who saves and who loads are two arguments, so that a case has four histories, all of them equal.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from types import ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpointing
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from tests.on_torch.helpers.paired_runs import Case, drawn, loss_of
from tests.on_torch.helpers.random_trees import Grower, Part, build_tree
from tests.on_torch.programs.differential_fsdp1 import HYBRIDS, WrapOptions, WrappedRun, draw_options

TYPES = ("FULL", "SHARDED", "LOCAL")
OPTIMIZERS = ("sgd", "momentum", "adam", "amsgrad")
STEPS_AFTER = 2


@dataclass(frozen=True, repr=False)
class StateOptions(WrapOptions):
    """How a tree is wrapped, trained, saved and loaded.

    Attributes:
        optimizer: one of OPTIMIZERS.
        kind: the type of the state dicts, one of TYPES.
        rank0_only: the first rank alone gets a full one.
        offload: what state dicts hold is moved to the CPU, where it lies here.
        groups: the optimizer has two groups of parameters, with other learning rates.
        without: whose gradients are dropped ahead of the last step: "" for nobody's, or "unit" for those of the first one.
        checkpointed: activations of some modules are checkpointed: "before" or "after" they are wrapped, or "" for never.
        legacy: optimizers are saved and loaded by the older functions.
        amid: where state dicts are taken: "" between steps, "summoned", or "forward" for between forward and backward.
        spoilt: what is wrong with the state dict that is loaded, without `strict`: "missing" or "extra" keys, "dtype".
    """

    api: ClassVar[str] = "state"
    optimizer: str = "adam"
    steps: int = 1
    kind: str = "FULL"
    rank0_only: bool = False
    offload: bool = False
    groups: bool = False
    without: str = ""
    checkpointed: str = ""
    legacy: bool = False
    amid: str = ""
    spoilt: str = ""

    def simpler(self) -> Iterator[Any]:
        """Options that are simpler by one thing each."""
        if self.steps == 1:
            yield replace(self, steps=0, without="")
        if self.optimizer != "sgd":
            yield replace(self, optimizer="sgd")
        yield from super().simpler()


# Drawing


def draw_case(seed: int, world_size: int) -> Case:
    """The case of a seed. At 3 and 4 ranks the tree computes exactly, so that all is compared bit for bit."""
    rng = random.Random(f"state {seed} at {world_size}")
    options = draw_state_options(rng, world_size)
    by_size = options.wrap == "size"  # units are other modules than those that are marked
    dtypes = ("float32", "float32", "float64")
    grower = Grower(
        rng,
        exact=world_size > 2,
        per_param_frozen=options.use_orig_params,
        batch_norms=options.mixed is None or (options.wrap != "hand" and options.mixed.ignores is None),
        dtypes=(rng.choice(dtypes),) if by_size or rng.random() < 0.7 else dtypes,
        ignores=rng.random() < 0.35,
        freezes=options.use_orig_params or not by_size,
        shares=not by_size,
        shares_units=options.wrap == "hand",
    )
    return Case(grower.tree(), options, world_size)


def draw_state_options(rng: random.Random, world_size: int) -> StateOptions:
    """Random options; what is about training alone is as by default."""
    wrapping = draw_options(rng, max(2, world_size), bits=True)
    kept = (
        "sharding_strategy",
        "use_orig_params",
        "mixed",
        "mesh",
        "shard_size",
        "wrap",
        "inner",
        "mixed_in",
        "ignored",
    )
    given = {name: getattr(wrapping, name) for name in kept}
    if world_size == 1 and given["sharding_strategy"] in HYBRIDS:
        given.update(sharding_strategy="FULL_SHARD", mesh="", shard_size=0)
    elif given["sharding_strategy"] not in HYBRIDS:
        given["mesh"] = drawn(rng, 0.4, "mesh", "")
    kind = rng.choice(TYPES if given["mesh"] != "mesh" else TYPES[:2])
    low_grads = given["mixed"] is not None and given["mixed"].keep_low_precision_grads
    return StateOptions(
        **given,
        optimizer=rng.choice(OPTIMIZERS[:2] if low_grads else OPTIMIZERS),
        steps=rng.choice((0, 1, 1, 1, 2)),
        kind=kind,
        rank0_only=kind == "FULL" and rng.random() < 0.3,
        offload=rng.random() < 0.3,
        groups=rng.random() < 0.5,
        without=drawn(rng, 0.2, "unit", ""),
        checkpointed=drawn(rng, 0.2, lambda: rng.choice(("before", "after")), ""),
        legacy=kind != "LOCAL" and rng.random() < 0.4,
        amid=drawn(rng, 0.2, lambda: rng.choice(("summoned", "forward")), ""),
        spoilt=drawn(rng, 0.3, lambda: rng.choice(("missing", "extra", "dtype")), "") if kind != "LOCAL" else "",
    )


# Describing what a state dict holds


def local_of(value: Any) -> list[Tensor]:
    """The tensors of a value that this rank has: at most one."""
    if isinstance(value, DTensor):
        return [value.to_local()]
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value] if isinstance(value, Tensor) else []


def described(value: Any) -> tuple[Any, ...]:
    """What a value is, but for the elements that this rank has."""
    if isinstance(value, DTensor):
        ranks = value.device_mesh.mesh.tolist()
        return ("DTensor", tuple(value.shape), value.dtype, value.placements, ranks, value.requires_grad, value.device)
    if isinstance(value, ShardedTensor):
        about = value.metadata()
        parts = [(m.shard_offsets, m.shard_sizes, str(m.placement)) for m in about.shards_metadata]
        own = [(s.metadata.shard_offsets, s.metadata.shard_sizes) for s in value.local_shards()]
        return ("ShardedTensor", tuple(value.size()), value.dtype, parts, own, about.tensor_properties.requires_grad)
    if isinstance(value, Tensor):
        return (type(value).__name__, tuple(value.shape), value.dtype, value.requires_grad, value.device)
    return (type(value).__name__, value)


def storages_of(model: nn.Module) -> set[int]:
    """Where the elements of parameters lie."""
    return {param.untyped_storage().data_ptr() for param in model.parameters() if param.numel()}


def lies_in(storages: set[int], tensor: Tensor) -> bool:
    """Whether the tensor's elements are in one of these storages."""
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in storages


def has_second_names(model: nn.Module) -> bool:
    """Whether a parameter has several names."""
    return any(
        node.kind == "tied" or node.ties or node.again
        for m in model.modules()
        if isinstance(m, Part)
        for node in [m.node]
    )


# Saving and loading


class StateRun(WrappedRun):
    """A run that saves with `saver` and loads with `api`."""

    def __init__(self, case: Case, api: ModuleType, rank: int, saver: ModuleType | None = None) -> None:
        super().__init__(case, api, rank)
        self.loader, self.api = api, saver or api

    @property
    def options(self) -> StateOptions:
        """Those of the case."""
        return self.case.options

    def train(self) -> None:
        """Train, save, load into another model, train on."""
        self.begin(other=False)
        for step in range(self.options.steps):
            self.step = step
            self.one_step(drops=self.options.without == "unit" and step == self.options.steps - 1)
        saved, optim_state = self.save()
        state = dict(saved) if self.options.kind != "FULL" else from_file(saved, all_ranks=not self.options.rank0_only)
        self.step = 100
        self.one_step()
        self.note_entries("after another step", saved)
        self.api = self.loader
        self.begin(other=True)
        self.load(state, optim_state)
        for step in range(200, 200 + STEPS_AFTER):
            self.step = step
            self.one_step()
            for name, param in self.params():
                self.note("param", param, name)
            for name, buffer in self.model.named_buffers():
                self.note("buffer", buffer, name)
        self.note_full()

    def begin(self, *, other: bool) -> None:
        """A model and its optimizer; with `other` values than those of the tree."""
        torch.manual_seed(0)
        root, _ = build_tree(self.case.tree)
        if other:
            self.change(root)
        if self.options.checkpointed == "before":
            checkpoint(root)
        self.model = self.wrap(root)
        if self.options.checkpointed == "after":
            checkpoint(self.model)
        self.call = self.model
        self.optimizer = self.optimizer_over(self.model)

    @torch.no_grad()
    def change(self, root: nn.Module) -> None:
        """Give parameters and buffers other values."""
        for tensor in (*root.parameters(), *root.buffers()):
            tensor.copy_(torch.rand(tensor.shape) if tensor.is_floating_point() else torch.full(tensor.shape, 7))

    def optimizer_over(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer of the options, with rates that are powers of two."""
        params: Any = list(model.parameters())
        if self.options.groups and len(params) > 1:
            half = (len(params) + 1) // 2
            params = [{"params": params[:half], "lr": 2.0**-5, "name": "first"}, {"params": params[half:]}]
        match self.options.optimizer:
            case "adam":
                return torch.optim.Adam(params, lr=2.0**-6)
            case "amsgrad":
                return torch.optim.AdamW(params, lr=2.0**-6, amsgrad=True)
            case "momentum":
                return torch.optim.SGD(params, lr=2.0**-7, momentum=0.5)
        return torch.optim.SGD(params, lr=2.0**-6)

    def one_step(self, *, drops: bool = False) -> None:
        """Forward, backward and the optimizer's step; with `drops` without the gradients of one unit."""
        self.forward_backward(f"step {self.step}")
        if drops:
            for param in unit_params(self.model, self.api):
                param.grad = None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state dicts, noted."""
        options, fsdp = self.options, self.api.FullyShardedDataParallel
        owned = storages_of(self.model)
        with fsdp.state_dict_type(self.model, *self.settings()):
            if options.amid == "summoned":
                with fsdp.summon_full_params(self.model):
                    state = self.model.state_dict()
            elif options.amid == "forward":
                stream, given, weights = self.batch()
                output = self.call(stream, given=given)
                state = self.model.state_dict()
                self.finish(output, weights)
            else:
                state = self.model.state_dict()
            optim_state = self.save_optimizer(fsdp)
        if options.legacy and options.kind == "FULL" and optim_state:
            self.rekey(optim_state)
        # torch registers the second names of parameters anew, so that they come last in their module.
        state = dict(sorted(state.items())) if has_second_names(self.model) else dict(state)
        self.note("keys", list(state))
        self.note_entries("saved", state)
        self.note("not copied", [key for key, value in state.items() for t in local_of(value) if lies_in(owned, t)])
        self.note_optimizer("optimizer", optim_state)
        # Buffers are the model's own, and under torch the optimizer's tensors where nothing is sharded.
        buffers = {key: state[key].clone() for key in self.buffer_keys() if key in state}
        own = tree_map(lambda value: value.clone() if type(value) is Tensor else value, optim_state)
        return {**state, **buffers}, own

    def rekey(self, full: dict[str, Any]) -> None:
        """Note the optimizer's state by the numbers of parameters of the model without wrappers, and by names again."""
        torch.manual_seed(0)
        plain, _ = build_tree(self.case.tree)
        optimizer, types = self.optimizer_over(plain), self.api.OptimStateKeyType
        rekeyed: Any = full
        for kind in (types.PARAM_ID, types.PARAM_NAME):
            try:
                rekeyed = self.api.FullyShardedDataParallel.rekey_optim_state_dict(
                    rekeyed, kind, plain, optim=optimizer
                )
            except RuntimeError as error:  # several names for one parameter
                self.note("rekeyed", error)
                return
            self.note_optimizer(f"as {kind.name}", rekeyed)

    def finish(self, output: Any, weights: Tensor) -> None:
        """A backward without a step."""
        total = loss_of(self.case, output, weights)
        if total.requires_grad:
            total.backward()
        self.optimizer.zero_grad()

    def buffer_keys(self) -> set[str]:
        """Those of state dicts."""
        names = [name for name, _ in self.model.named_buffers(remove_duplicate=False)]
        return {n.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "") for n in names}

    def settings(self) -> tuple[Any, Any, Any]:
        """The type of state dicts and its configurations."""
        options, api = self.options, self.api
        name = options.kind.capitalize()
        rank0 = {"rank0_only": options.rank0_only} if options.kind == "FULL" else {}
        config = getattr(api, f"{name}StateDictConfig")(offload_to_cpu=options.offload, **rank0)
        optim_config = getattr(api, f"{name}OptimStateDictConfig")(offload_to_cpu=options.offload, **rank0)
        return api.StateDictType[f"{options.kind}_STATE_DICT"], config, optim_config

    def save_optimizer(self, fsdp: Any) -> dict[str, Any]:
        """The optimizer's state dict."""
        options = self.options
        if options.legacy and options.kind == "FULL":
            return fsdp.full_optim_state_dict(self.model, self.optimizer, rank0_only=options.rank0_only)
        if options.legacy:
            fsdp.get_state_dict_type(self.model)  # where there is a mesh, it says that DTensors are wanted
            return fsdp.sharded_optim_state_dict(self.model, self.optimizer)
        return fsdp.optim_state_dict(self.model, self.optimizer)

    def load(self, state: dict[str, Any], optim_state: dict[str, Any]) -> None:
        """Into the model and the optimizer that were just begun."""
        options, fsdp = self.options, self.api.FullyShardedDataParallel
        self.spoil(state)
        with fsdp.state_dict_type(self.model, *self.settings()):
            local = options.kind == "LOCAL" and options.use_orig_params  # torch loads these, and then refuses them
            found = self.model.load_state_dict(state, strict=not (options.spoilt or local))
            self.note("loaded", (list(found.missing_keys), [] if local else list(found.unexpected_keys)))
            for name, param in self.params():
                self.note("param", param, name)
            own = self.load_optimizer(fsdp, optim_state)
        self.note_optimizer("to load", own)
        self.optimizer.load_state_dict(own)
        self.note_optimizer("afterwards", self.optimizer.state_dict())

    def spoil(self, state: dict[str, Any]) -> None:
        """As the options say."""
        names = [name for name, value in state.items() if local_of(value) or isinstance(value, ShardedTensor)]
        match self.options.spoilt:
            case "missing":
                for name in names[::2]:
                    del state[name]
            case "extra":
                state["strange"] = torch.ones(1)
                state[f"{names[0]}.strange"] = torch.ones(1)
            case "dtype" if self.options.kind == "FULL":
                state.update({k: v.double() if v.is_floating_point() else v for k, v in state.items()})

    def load_optimizer(self, fsdp: Any, state: dict[str, Any]) -> dict[str, Any]:
        """What the new optimizer loads."""
        options, model, optimizer = self.options, self.model, self.optimizer
        if options.legacy and options.kind == "FULL":
            if options.rank0_only:
                given = state if self.rank == 0 else None
                return fsdp.scatter_full_optim_state_dict(given, model, optim=optimizer)
            return fsdp.shard_full_optim_state_dict(state, model, optim=optimizer)
        if options.legacy:
            return fsdp.flatten_sharded_optim_state_dict(state, model, optimizer)
        return fsdp.optim_state_dict_to_load(model, optimizer, state)

    def note_entries(self, what: str, entries: dict[Any, Any]) -> None:
        """Each value of a dict: what it is, and the elements of it that this rank has."""
        for key, value in entries.items():
            self.note(f"{what}: kind", described(value), str(key))
            for tensor in local_of(value):
                self.note(what, tensor, str(key))

    def note_optimizer(self, what: str, state: dict[str, Any]) -> None:
        """An optimizer's state dict, without the order of names in it, which says nothing."""
        self.note(f"{what}: keys", (list(state), sorted(state.get("state", {}), key=str)))
        for name, entries in sorted(state.get("state", {}).items(), key=lambda item: str(item[0])):
            self.note(f"{what}: names", sorted(entries), str(name))
            self.note_entries(what, {f"{name}.{key}": entries[key] for key in sorted(entries)})
        self.note(f"{what}: groups", state.get("param_groups"))


def checkpoint(model: nn.Module) -> None:
    """Checkpoint the activations of every second module that can be."""
    kinds = ("square", "vector", "embedding")
    parts = [m for m in model.modules() if isinstance(m, Part) and m.node.kind in kinds and not m.node.ignored]
    chosen = set(parts[::2])
    checkpointing.apply_activation_checkpointing(model, check_fn=lambda module: module in chosen)


def unit_params(model: nn.Module, api: ModuleType) -> list[nn.Parameter]:
    """The parameters of the last unit that has some."""
    units = [m for m in model.modules() if isinstance(m, api.FullyShardedDataParallel)]
    for unit in reversed(units):
        inside = {id(p) for m in unit.modules() if m is not unit and m in units for p in m.parameters()}
        own = [p for p in unit.parameters() if id(p) not in inside]
        if own:
            return own
    return []


def from_file(state: dict[str, Any], *, all_ranks: bool) -> dict[str, Any]:
    """As torch.load reads it where torch.save wrote it: each rank its own, or all the first one's."""
    file = BytesIO()
    torch.save(state, file)
    held = [file.getvalue()]
    if not all_ranks:
        dist.broadcast_object_list(held)
    return torch.load(BytesIO(held[0]))

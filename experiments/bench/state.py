"""State of a model and of its optimizer on two ranks over gloo: time and memory to make, save, load and take it over."""

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from experiments.bench.contestants import LAYOUTS, PACKAGES, counterpart, ours, theirs
from experiments.bench.figure import TIMES, Figure, Section, median_figure
from experiments.bench.ranks import GLOO, on_ranks
from experiments.bench.resident import Resident
from experiments.bench.sizes import Sizes
from experiments.bench.timing import CLOCKS, Times, alternate, ratios, slowest
from experiments.bench.training import LEARNING_RATE, definition_of, losses, meet
from experiments.models.gpt import GPTConfig

FSDP1 = "torch FSDP1"
WORLD_SIZE = 2
LIMIT = 1.0
# What is measured, in this order.
MAKE, TAKE = "sharded state dict", "load of a sharded state dict"
MAKE_FULL, TAKE_FULL = "full state dict on rank 0", "load of a full state dict"
MAKE_OPTIM, TAKE_OPTIM = "optimizer's state dict", "load of the optimizer's state dict"
MAKE_OPTIM_FULL = "full optimizer's state dict on rank 0"
SAVE, LOAD = "sharded save to files", "sharded load from files"
OPERATIONS = (MAKE, TAKE, MAKE_FULL, TAKE_FULL, MAKE_OPTIM, TAKE_OPTIM, MAKE_OPTIM_FULL, SAVE, LOAD)
# In memory where there is such a folder, so that no disk is measured.
IN_MEMORY = Path("/dev/shm")
_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
_FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def state_sections(sizes: Sizes) -> list[Section]:
    """Time everyone in alternation, one operation after the other, and count everyone's memory."""
    names = [*ours(), *theirs()]
    model = f"GPT of {definition_of(sizes.gpt).numel / 1e6:.1f} million parameters in float32, a unit a block, FULL_SHARD, AdamW"
    what = (
        f"{model}; {WORLD_SIZE} ranks of one thread, gloo. Files hold the model's state and the optimizer's, written and read "
        "by torch.distributed.checkpoint in a folder in memory, if there is one. FSDP1's state dicts are of SHARDED_STATE_DICT "
        "and of FULL_STATE_DICT with rank0_only, those of fully_shard of "
        "torch.distributed.checkpoint.state_dict."
    )
    timed = on_ranks(WORLD_SIZE, GLOO, _times, names, sizes.gpt, sizes.state_rounds)
    taken = {
        operation: {clock: slowest([by_rank[operation][clock] for by_rank in timed]) for clock in CLOCKS}
        for operation in OPERATIONS
    }
    # In processes of their own, where nothing is left of others.
    counted = {name: fullest(on_ranks(WORLD_SIZE, GLOO, _peaks, name, sizes.gpt)) for name in names}
    how = f"{what} {sizes.state_rounds} rounds; the rank that takes longest."
    counting = (
        f"{what} The most memory that a process held during an operation, beyond what it held before the model was built: "
        "parameters, the optimizer's state, what is saved or loaded, and what is needed on the way, on the rank with most of "
        "it. The kernel counts it; memory that is freed goes back to it at once. Files in memory are not counted."
    )
    return [
        Section("Time of state dicts and checkpoints", how, time_figures(taken)),
        Section("Peak memory of state dicts and checkpoints", counting, memory_figures(counted)),
    ]


def _compared() -> list[tuple[str, str, float | None]]:
    """Each of ours, beside which of torch's, with a limit. What lies flat has to be cut into rows for a state dict, as torch's
    FSDP1 does and its fully_shard, which stores rows, need not; so those layouts have no peer, and stand beside both."""
    pairs: list[tuple[str, str, float | None]] = [
        (name, counterpart(name), LIMIT) for name in ours() if name not in ours(LAYOUTS[1:])
    ]
    return pairs + [(name, other, None) for name in ours(LAYOUTS[1:]) for other in (counterpart(name), FSDP1)]


def time_figures(taken: Mapping[str, Mapping[str, Times]]) -> tuple[Figure, ...]:
    """Ours to torch's own, operation by operation; the same in time of the processor; then all times."""
    compared = _compared()
    return (
        *(
            median_figure(
                f"{operation}: {name} to {other}", ratios(taken[operation]["wall"], name, other), TIMES, limit
            )
            for operation in OPERATIONS
            for name, other, limit in compared
        ),
        *(
            median_figure(
                f"{operation}: {name} to {other}, time of the processor",
                ratios(taken[operation]["processor"], name, other),
                TIMES,
            )
            for operation in OPERATIONS
            for name, other, _ in compared
        ),
        *(
            median_figure(f"{operation}: {name}", [1e3 * seconds for seconds in times], "ms")
            for operation in OPERATIONS
            for name, times in taken[operation]["wall"].items()
        ),
    )


def fullest(by_rank: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The bytes of the rank that has most, by operation.

    >>> fullest([{"save": 3, "load": 5}, {"save": 4, "load": 1}])
    {'save': 4, 'load': 5}
    """
    return {operation: max(peaks[operation] for peaks in by_rank) for operation in by_rank[0]}


def memory_figures(peaks: Mapping[str, Mapping[str, int]]) -> tuple[Figure, ...]:
    """Ours to torch's own, operation by operation; then all peaks.

    Args:
        peaks: bytes by contestant and operation.
    """
    return (
        *(
            Figure(f"{operation}: {name} to {other}", peaks[name][operation] / peaks[other][operation], TIMES, limit)
            for operation in OPERATIONS
            for name, other, limit in _compared()
        ),
        *(
            Figure(f"{operation}: {name}", by_operation[operation] / 1e6, "MB")
            for operation in OPERATIONS
            for name, by_operation in peaks.items()
        ),
    )


class _Wrapped:
    """State of an FSDP1 model, as its users ask for it."""

    def __init__(self, package: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._fsdp, kinds = package.FullyShardedDataParallel, package.StateDictType
        # Not offloaded: on the CPU torch's moments overwrite one another then, and its full state dicts end the process.
        self._sharded = (
            kinds.SHARDED_STATE_DICT,
            package.ShardedStateDictConfig(),
            package.ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
        self._full = (
            kinds.FULL_STATE_DICT,
            package.FullStateDictConfig(rank0_only=True),
            package.FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
        )

    def make(self) -> dict[str, Any]:
        with self._fsdp.state_dict_type(self._model, *self._sharded):
            return self._model.state_dict()

    def take(self, state: dict[str, Any]) -> None:
        with self._fsdp.state_dict_type(self._model, *self._sharded):
            self._model.load_state_dict(state)

    def make_full(self) -> dict[str, Any]:
        with self._fsdp.state_dict_type(self._model, *self._full):
            return self._model.state_dict()

    def take_full(self, state: dict[str, Any]) -> None:
        with self._fsdp.state_dict_type(self._model, self._full[0]):  # every rank has it
            self._model.load_state_dict(state)

    def make_optim(self) -> dict[str, Any]:
        with self._fsdp.state_dict_type(self._model, *self._sharded):
            return self._fsdp.optim_state_dict(self._model, self._optimizer)

    def take_optim(self, state: dict[str, Any]) -> None:
        with self._fsdp.state_dict_type(self._model, *self._sharded):
            self._optimizer.load_state_dict(self._fsdp.optim_state_dict_to_load(self._model, self._optimizer, state))

    def make_optim_full(self) -> dict[str, Any]:
        with self._fsdp.state_dict_type(self._model, *self._full):
            return self._fsdp.optim_state_dict(self._model, self._optimizer)


class _Sharded:
    """State of a model under fully_shard."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def make(self) -> dict[str, Any]:
        return get_model_state_dict(self._model)

    def take(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self._model, state)

    def make_full(self) -> dict[str, Any]:
        return get_model_state_dict(self._model, options=_FULL)

    def take_full(self, state: dict[str, Any]) -> None:
        # torch puts what it distributes into the dict that it is given.
        set_model_state_dict(self._model, dict(state) if dist.get_rank() == 0 else {}, options=_FROM_RANK_0)

    def make_optim(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self._model, self._optimizer)

    def take_optim(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self._model, self._optimizer, state)

    def make_optim_full(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self._model, self._optimizer, options=_FULL)


class _Contestant:
    """A model after a step of training, and what is done with its state."""

    def __init__(self, name: str, config: GPTConfig, folder: str) -> None:
        model, loss = losses(name, config, 1, config.context, "cpu")
        optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        package, _, api = name.partition(" ")
        is_sharded = api in LAYOUTS
        state = _Sharded(model, optimizer) if is_sharded else _Wrapped(PACKAGES[package], model, optimizer)
        self._state, self._path = state, f"{folder}/{name}"
        self._inputs: dict[str, Any] = {}
        self._without: dict[str, Callable[[], object]] = {
            MAKE: state.make,
            MAKE_FULL: state.make_full,
            MAKE_OPTIM: state.make_optim,
            MAKE_OPTIM_FULL: state.make_optim_full,
            SAVE: self._save,
            LOAD: self._load,
        }
        self._with: dict[str, Callable[[dict[str, Any]], object]] = {
            TAKE: state.take,
            TAKE_FULL: state.take_full,
            TAKE_OPTIM: state.take_optim,
        }

    def prepare(self, operation: str, full: dict[str, Any]) -> None:
        """Have what an operation takes. `full` is the full state dict of the model."""
        # Clones, since what a model shows may be its own memory, and torch copies nothing onto itself.
        if operation == TAKE:
            self._inputs[TAKE] = {name: value.clone() for name, value in self._state.make().items()}
        elif operation == TAKE_FULL:
            self._inputs[TAKE_FULL] = full
        elif operation == TAKE_OPTIM:
            self._inputs[TAKE_OPTIM] = self._state.make_optim()
        elif operation == LOAD:
            self._save()

    def run(self, operation: str) -> None:
        """Do it, and drop what it makes."""
        if operation in self._with:
            self._with[operation](self._inputs[operation])
        else:
            self._without[operation]()

    def forget(self) -> None:
        """Drop what was prepared."""
        self._inputs.clear()

    def _save(self) -> None:
        save({"model": self._state.make(), "optimizer": self._state.make_optim()}, checkpoint_id=self._path)

    def _load(self) -> None:
        found = {"model": self._state.make(), "optimizer": self._state.make_optim()}
        load(found, checkpoint_id=self._path)
        self._state.take(found["model"])
        self._state.take_optim(found["optimizer"])


def _full_state(config: GPTConfig) -> dict[str, Any]:
    module, _ = definition_of(config).make_torch()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@contextmanager
def _folder() -> Iterator[str]:
    """One for all ranks, empty."""
    made = [tempfile.mkdtemp(dir=IN_MEMORY if IN_MEMORY.is_dir() else None) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made)
    try:
        yield made[0]
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(made[0])


def _times(_rank: int, names: list[str], config: GPTConfig, rounds: int) -> dict[str, dict[str, Times]]:
    taken, full = {}, _full_state(config)
    with _folder() as folder:
        contestants = {name: _Contestant(name, config, folder) for name in names}
        for operation in OPERATIONS:
            for contestant in contestants.values():
                contestant.prepare(operation, full)
            steps = {name: partial(contestant.run, operation) for name, contestant in contestants.items()}
            taken[operation] = alternate(steps, rounds, lambda: meet("cpu"), warm_up=1)
            for contestant in contestants.values():
                contestant.forget()
    return taken


def _peaks(_rank: int, name: str, config: GPTConfig) -> dict[str, int]:
    resident, peaks = Resident(), {}
    with _folder() as folder:
        before = resident.num_bytes
        contestant = _Contestant(name, config, folder)
        full = _full_state(config)
        for operation in OPERATIONS:
            contestant.prepare(operation, full)
            contestant.run(operation)  # once before, for what stays
            gc.collect()
            resident.forget_peak()
            contestant.run(operation)
            peaks[operation] = resident.peak_bytes - before
            contestant.forget()
    return peaks

"""The environment of this process: flags and libraries of torch, states of its generators, and the model's modules."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from crossframe.environment import Environment, Fact, collect, digest
from torch_backend.recorder._float32_precision import (
    allows_tf32_in_convolutions,
    allows_tf32_in_matmul,
    matmul_precision,
)
from torch_backend.recorder._manifest import program, program_with
from torch_backend.recorder._module_tree import class_name, named_modules

# Facts of the program that are stated in another section, or under the full name of the flag.
_STATED_ELSEWHERE = ("processor", "python", "tf32", "matmul", "deterministic")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_BACKENDS: Any = torch.backends
_CUDA: Any = torch.cuda
_ATTRIBUTES = (
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "torch.backends.cuda.matmul.allow_fp16_accumulation",
    "torch.backends.cudnn.benchmark",
    "torch.backends.cudnn.deterministic",
    "torch.backends.cudnn.enabled",
)
_FLAGS: dict[str, Callable[[], Any]] = {
    **{name: partial(attrgetter(name.removeprefix("torch.")), torch) for name in _ATTRIBUTES},
    "torch.backends.cuda.matmul.allow_tf32": allows_tf32_in_matmul,
    "torch.backends.cudnn.allow_tf32": allows_tf32_in_convolutions,
    "torch.get_float32_matmul_precision": matmul_precision,
    "torch.get_default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
    "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "torch.get_num_interop_threads": torch.get_num_interop_threads,
    "version of CUDA": lambda: torch.version.cuda,
    "version of cuDNN": lambda: _BACKENDS.cudnn.version() if torch.cuda.is_available() else None,
    "version of NCCL": lambda: ".".join(map(str, _CUDA.nccl.version())) if torch.cuda.is_available() else None,
}


def environment_of(model: nn.Module | None = None, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Environment:
    """The environment of this process.

    Args:
        model: the trained model, whose modules and device are stated; None: only the device that torch would use is.
        optimizers: those of the model.
    """
    if model is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = "cpu" if accelerator is None else accelerator.type
        described = program(device)
    else:
        device = next((param.device.type for param in model.parameters()), "cpu")
        described = program_with(model, optimizers, device)
    facts: dict[str, Fact] = {name: fact for name, fact in described.items() if name not in _STATED_ELSEWHERE}
    modules = {} if model is None else dict(_modules(model))
    return collect(facts | dict(_flags()), _random_states(device), modules)


def _flags() -> Iterator[tuple[str, Fact]]:
    for name, read in _FLAGS.items():
        try:
            yield name, read()
        except (AttributeError, RuntimeError):  # unknown to this version of torch
            continue


def _random_states(device: str) -> dict[str, str]:
    """Digests of the states of the generators of the CPU and of the accelerator, if this process uses it.

    Args:
        device: the device type of the model.
    """
    found = {"torch": digest(torch.get_rng_state().numpy().tobytes())}
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        # Reading the state would initialise an accelerator that the script does not use. mps does not state whether it is used.
        is_initialized = getattr(module, "is_initialized", lambda: False)
        if device == accelerator.type or is_initialized():
            found[f"torch.{accelerator.type}"] = digest(module.get_rng_state().numpy().tobytes())
    return found


def _modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Each module by canonical name: its class, its options, and whether it is in evaluation."""
    for place in named_modules(model):
        try:
            options = _ADDRESS.sub("", " ".join(place.module.extra_repr().split()))
        except Exception:  # extra_repr of a user's module may need what it does not have yet
            options = "..."
        yield (
            place.name or "(root)",
            f"{class_name(place.module)}({options})" + ("" if place.module.training else " in evaluation"),
        )

"""Starts a recording: the first rank writes the manifest, and perturbed runs change their initial parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crossframe.keras_models import is_keras
from crossframe.param_map import identity_map
from crossframe.recording import Manifest, create_recording
from crossframe.recording.known_settings import EPS_HAT, GROUPS, NOT_RECORDED, PER_RANK
from crossframe.recording.manifest import MANIFEST_NAME
from crossframe.recording.perturbed_runs import perturbed_values
from crossframe.recording.program import MODEL_RANKS, OPTIMIZER_KERNEL, program_of
from crossframe.recording.run_options import RunOptions
from torch_backend.compat._dtypes import to_numpy
from torch_backend.ranks._consensus import agree, withdraw
from torch_backend.recorder._float32_precision import allows_tf32_in_convolutions, matmul_precision
from torch_backend.recorder._model_ranks import full, set_full
from torch_backend.recorder._model_view import ModelView
from torch_backend.recorder._module_tree import class_name, innermost, is_compiled, named_modules

_PACKAGES = ("torch", "numpy")
_TITLE = "beginning of a recording"


def move(view: ModelView, perturbed_run: int) -> None:
    """Set this rank's shards to the initial values of a perturbed run. `.data`: a graph may have saved the parameters already."""
    for held in view.held:
        if held.gathered:
            whole = full(held.param.data, held.partition)
            set_full(held.param.data, _moved(held.name, whole, perturbed_run, 0), held.partition)
        else:
            here = held.of(held.param.data)
            here.copy_(_moved(held.name, here, perturbed_run, held.start))


def _moved(name: str, values: Tensor, perturbed_run: int, start: int) -> Tensor:
    """Elements of a parameter from `start` on, with the values of a perturbed run."""
    found = perturbed_values(name, to_numpy(values), perturbed_run, start)
    integers = found.view(f"int{8 * found.itemsize}")  # torch cannot read numpy's bfloat16
    return torch.from_numpy(integers).view(values.dtype).to(values.device)


def manifest_of(
    view: ModelView,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    options: RunOptions,
    name: str | None,
) -> Manifest:
    """The manifest of a run, from what is known before the first step."""
    device = device_of(view)
    dtype, inner = view.compute_dtype, innermost(model)
    if is_keras(inner):
        dtype = inner.compute_dtype  # type: ignore[assignment]  # of its policy
    if torch.is_autocast_enabled(device):
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    found: dict[str, Any] = {"engine": view.engine.name}
    rate = None
    if optimizers:
        group = optimizers[0].param_groups[0]
        rate = float(group["lr"]) if "lr" in group else None
        found["optimizer"] = type(optimizers[0]).__name__
        common = _options(group)
        found |= {option: value for option, value in common.items() if option != "lr"}
        if others := _other_groups(view, optimizers, common):
            found[GROUPS] = others
    if view.left_out:
        found[NOT_RECORDED] = list(view.left_out)
    if alone := [place.name for place in named_modules(model) if _sees_its_rank(place.module)]:
        found[PER_RANK] = alone
    names = [spec.name for _, layout in view.units for spec in layout.params]
    described = program_with(model, optimizers, device)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes > view.mesh.world_size:
        described[MODEL_RANKS] = processes // view.mesh.world_size
    return options.manifest(
        framework="torch",
        model=name or class_name(inner),
        dtype=dtype,
        mesh=view.mesh,
        learning_rate=rate,
        terms=None,
        param_map=identity_map(names),
        units=view.units,
        strategy=view.engine.strategy.value,
        packages=_PACKAGES,
        program=described,
        stated=found,
    )


def program_with(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: str) -> dict[str, Any]:
    """The description of the program that trains a model (`program`)."""
    described = program(device, compiled=any(map(is_compiled, model.modules()))) | {
        "channels_last": _is_channels_last(model)
    }
    if optimizers:
        described[OPTIMIZER_KERNEL] = _optimizer_kernel(optimizers[0], on_cpu=device == "cpu")
    return described


def device_of(view: ModelView) -> str:
    """The device type of the parameters."""
    return next((held.param.device.type for held in view.held), "cpu")


def _is_channels_last(model: nn.Module) -> bool:
    """Whether weights of convolutions are stored with channels last, for which other kernels are used."""
    weights = (param for param in model.parameters() if param.ndim == 4 and not param.is_contiguous())
    return any(param.is_contiguous(memory_format=torch.channels_last) for param in weights)


def _optimizer_kernel(optimizer: torch.optim.Optimizer, *, on_cpu: bool) -> str:
    """The implementation of the optimizer's step, by its flags; without any, torch uses foreach on accelerators only."""
    flags = optimizer.param_groups[0]
    if flags.get("fused"):
        return "fused"
    foreach = flags.get("foreach")
    is_foreach = "foreach" in flags and (not on_cpu if foreach is None else foreach)
    kernel = "foreach" if is_foreach else "for-loop"
    return f"{kernel} on tensors" if flags.get("capturable") or flags.get("differentiable") else kernel


def program(device: str, *, compiled: bool = False, threads: int | None = None) -> dict[str, Any]:
    """Everything on which torch's bits depend (`crossframe.recording.program`).

    CPU operators are deterministic for a fixed number of threads; those of an accelerator only if requested.

    Args:
        device: the type of the compute device.
        compiled: whether any module is compiled.
        threads: the number of threads of each rank. None: that of this process.
    """
    on_cpu = device == "cpu"
    named = device if on_cpu or device != "cuda" else f"{device} {torch.cuda.get_device_name()}"
    return program_of(
        device=named,
        deterministic=on_cpu or torch.are_deterministic_algorithms_enabled(),
        compiled=compiled,
        threads=torch.get_num_threads() if threads is None else threads,
        capability=torch.backends.cpu.get_cpu_capability(),
        matmul=matmul_precision(),
        mkldnn=bool(torch.backends.mkldnn.enabled),  # type: ignore[attr-defined]
        tf32=allows_tf32_in_convolutions(),
        attention=" ".join(name for name, is_on in _attention_kernels().items() if is_on),
    )


def _attention_kernels() -> dict[str, bool]:
    backends = torch.backends.cuda
    return {
        "flash": backends.flash_sdp_enabled(),
        "efficient": backends.mem_efficient_sdp_enabled(),
        "math": backends.math_sdp_enabled(),
        "cudnn": backends.cudnn_sdp_enabled(),
    }


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer options of a parameter group."""
    found: dict[str, Any] = {}
    for option in ("lr", "weight_decay", "momentum", "eps", EPS_HAT):
        if option in group and not isinstance(group[option], tuple | list):  # Adafactor has two epsilons
            found[option] = float(group[option])
    if "betas" in group:
        found["betas"] = [float(x) for x in group["betas"]]
    return found


def _other_groups(
    view: ModelView, optimizers: Sequence[torch.optim.Optimizer], common: dict[str, Any]
) -> list[dict[str, Any]]:
    """The parameter groups whose options differ from the first one."""
    names: dict[int, list[str]] = {}
    for held in view.held:
        names.setdefault(id(held.param), []).append(held.name)
    found = []
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        own = [name for param in group["params"] for name in names.get(id(param), ())]
        if own and (options := _options(group)) != common:
            found.append({"params": own} | options)
    return found


def _sees_its_rank(module: nn.Module) -> bool:
    """Whether a module normalises over the samples of its rank."""
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training


def created(options: RunOptions, manifest: Manifest, view: ModelView) -> Manifest:
    """Create the recording on the first rank, and return its manifest on all ranks.

    Raises:
        RecordingError: a directory that cannot be written.
        AgreementError: this error on another rank, or different units on this rank.
    """
    path, fields = options.path, manifest.to_json()
    subjects = [(f"unit {unit['name']!r}", {"layout": str(unit)}) for unit in fields["units"]]
    run = {name: str(fields[name]) for name in ("model", "dtype", "mesh", "schedule", "detail", "learning_rate")}
    try:
        if view.creates:
            create_recording(path, manifest, overwrite=options.overwrite)
        agree(view.groups, _TITLE, [("run", run), *subjects], advice="record the same run on every rank")
        made = manifest if view.creates else Manifest.read(path)
        advice = (
            "another job has begun to record into the same directory, or ranks see different disks; record into another"
        )
        agree(view.groups, _TITLE, [(f"{path / MANIFEST_NAME}", {"token": made.token})], advice=advice)
        return made
    except Exception as error:
        # A RuntimeError, as AgreementError is one, is raised on the other ranks too.
        if view.creates and not isinstance(error, RuntimeError):
            withdraw(view.groups, _TITLE, error)
        raise

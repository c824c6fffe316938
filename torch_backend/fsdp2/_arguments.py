"""Checks and converts the arguments of `fully_shard`."""

import warnings
from typing import Any

from torch import nn

from crossframe.api import Api
from crossframe.errors import AssertedError, MeshError, UsageError, WrongTypeError
from crossframe.mesh import MeshSpec
from crossframe.quoting import quote
from crossframe.step import StepSettings
from crossframe.step.settings import reshard_choice
from torch_backend.compat._fully_shard_api import MixedPrecisionPolicy
from torch_backend.compat._torch_classes import as_ours
from torch_backend.engine._unit_options import UnitOptions
from torch_backend.fsdp2._fsdp_module import FSDPModule


def modules_to_shard(given: Any) -> list[nn.Module]:
    """The given modules, except those inside other given modules."""
    if isinstance(given, nn.Module):
        modules = [given]
    elif isinstance(given, list | tuple) and given and all(isinstance(module, nn.Module) for module in given):
        inner = {id(module) for outer in given for module in outer.modules() if module is not outer}
        modules = [module for module in dict.fromkeys(given) if id(module) not in inner]
    else:
        raise WrongTypeError(f"fully_shard: expected a module or a list of modules, got {type(given).__name__}")
    for module in modules:
        name = type(module).__name__
        if isinstance(module, FSDPModule):
            raise AssertedError(f"fully_shard: this {name} is sharded already; shard a module once")
        if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
            raise UsageError(f"fully_shard: a {name} has no forward; shard the modules inside it")
    return modules


def as_record(argument: str, given: Any, *kinds: type) -> Any:
    """Convert an argument, possibly of PyTorch's class of the same name, to the first matching kind."""
    for kind in kinds:
        record = as_ours(given, kind)
        if isinstance(record, kind):
            return record
    expected = " or ".join(kind.__name__ for kind in kinds)
    raise UsageError(f"fully_shard: expected {argument} to be of type {expected}, got {quote(given)}")


def reshard_setting(asked: Any, num_shards: int) -> bool | int:
    """`reshard_after_forward` in the form of the step settings."""
    if asked is None or isinstance(asked, bool):
        return asked is not False
    if not isinstance(asked, int):
        raise MeshError(
            f"fully_shard: expected reshard_after_forward to be True, False, None or a number, got {quote(asked)}"
        )
    choice = reshard_choice(asked, num_shards)
    if choice is False:
        warnings.warn("reshard_after_forward=1 keeps the parameters, as False does; True reshards", stacklevel=3)
    return choice


def unit_options(step: StepSettings, policy: MixedPrecisionPolicy, mesh: MeshSpec) -> UnitOptions:
    """Convert arguments to the options of a unit."""
    return UnitOptions(
        Api.FSDP2,
        step,
        input_dtype=policy.param_dtype if policy.policy.casts_inputs(Api.FSDP2, is_root=False) else None,
        output_dtype=policy.output_dtype,
        settings={
            "mesh": f"{mesh.replicate} x {mesh.shard} (replicate x shard)",
            "mp_policy": str(policy),
        },
    )

"""The public interface of a package of FSDP as data: modules, their names, and what these are.

`python -m tests.on_torch.programs.public_names` writes that of torch.distributed.fsdp, as installed, to public_names.json, with
which test_public_names compares torch_backend. Run it for a new version of torch.
"""

import dataclasses
import enum
import inspect
import json
import re
import types
import warnings
from abc import ABC
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

FILE = Path(__file__).with_suffix(".json")

# The modules of torch that scripts import, each with the one to import from here.
MODULES = {
    "torch.distributed.fsdp": "torch_backend",
    "torch.distributed.fsdp.api": "torch_backend.api",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "torch_backend.fully_sharded_data_parallel",
    "torch.distributed.fsdp.wrap": "torch_backend.wrap",
    "torch.distributed.fsdp.sharded_grad_scaler": "torch_backend.sharded_grad_scaler",
    "torch.distributed.fsdp._fully_shard": "torch_backend._fully_shard",
    "torch.distributed.fsdp._fully_shard._fsdp_api": "torch_backend._fully_shard._fsdp_api",
    "torch.distributed._composable.fsdp": "torch_backend",
    "torch.distributed._composable.fsdp.fully_shard": "torch_backend.fully_shard",
}


def public_names(module: types.ModuleType) -> list[str]:
    """The names in a module's `__all__`, and the names without underscore that torch.distributed.fsdp itself defines."""
    own = {name for name, value in vars(module).items() if not name.startswith("_") and _is_own(value)}
    return sorted(own | set(getattr(module, "__all__", ())))


def described(value: Any) -> dict[str, Any]:
    """What a function or a class is, in words that do not depend on the package."""
    if not inspect.isclass(value):
        attributes = sorted(name for name in vars(value) if not name.startswith("_"))
        return {"kind": "function", "parameters": _parameters(value), "attributes": attributes}
    if issubclass(value, enum.Enum):
        return {"kind": "enum", "members": {member.name: member.value for member in value}}
    is_record = dataclasses.is_dataclass(value)
    own = [base for base in value.__mro__ if _is_own(base)]
    inherited = {name for base in value.__mro__ if base not in own for name in vars(base)}
    methods, others = {}, []
    for name in sorted({name for base in own for name in vars(base)}):
        is_public = name in ("__init__", "__call__") or not (name.startswith("_") or name in inherited)
        if is_public and callable(getattr(value, name)):
            methods[name] = _parameters(getattr(value, name))
        elif is_public and not (is_record and name in value.__dataclass_fields__):
            others.append(name)
    bases = [base.__name__ for base in value.__mro__ if not base.__name__.startswith("_") and base is not ABC]
    found = {"kind": "class", "bases": bases, "methods": methods, "attributes": others}
    return found | {"frozen": value.__dataclass_params__.frozen} if is_record else found  # type: ignore[attr-defined]


def _is_own(value: Any) -> bool:
    module = str(getattr(value, "__module__", ""))
    return not isinstance(value, types.ModuleType) and module.startswith(("torch.distributed.fsdp", "torch_backend"))


def _parameters(function: Any) -> str:
    """Its parameters as they are written, without annotations."""
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found, keywords = [], False
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.KEYWORD_ONLY and not keywords:
            found.append("*")
        keywords = keywords or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        default = "" if each.default is each.empty else f"={_shown(each.default)}"
        found.append(f"{marks.get(each.kind, '')}{each.name}{default}")
    return ", ".join(found)


def _shown(value: Any) -> str:
    if isinstance(value, dist.ProcessGroup):
        return "None"  # torch reads the default group when it is imported
    return re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", re.sub(r" at 0x\w+", "", repr(value)))


def attributes_of_wrappers(package: types.ModuleType) -> list[str]:
    """The public attributes that a FullyShardedDataParallel has beyond those of any module. Needs a process group of one rank."""
    wrapped = package.FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu"))
    return sorted(name for name in vars(wrapped).keys() - vars(nn.Module()).keys() if not name.startswith("_"))


def of_torch() -> dict[str, Any]:
    """The interface of torch's package: the names of each module, their definitions, and the attributes of instances."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        modules = {name: import_module(name) for name in MODULES}
        names, definitions = {}, {}
        for module, found in modules.items():
            values = {name: getattr(found, name) for name in public_names(found)}
            names[module] = {name: f"{value.__module__}.{value.__qualname__}" for name, value in values.items()}
            definitions |= {names[module][name]: described(value) for name, value in values.items()}
        return {
            "modules": names,
            "definitions": definitions,
            "instances": attributes_of_wrappers(modules["torch.distributed.fsdp"]),
        }


if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    FILE.write_text(json.dumps(of_torch(), indent=1, sort_keys=True) + "\n")
    dist.destroy_process_group()

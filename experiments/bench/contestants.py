"""Who is measured: torch's own sharding and ours, built by one and the same code from two packages with the same names.

A contestant is called by its package and its interface, for instance "our FSDP1" or "torch FSDP2". Another strategy or mode is
another line of `_FACES`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.fsdp.wrap
from torch import nn
from torch._dynamo import OptimizedModule
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torch_backend
import torch_backend.wrap

OURS, THEIRS = "our", "torch"
PACKAGES: dict[str, Any] = {OURS: torch_backend, THEIRS: torch.distributed.fsdp}
AGAIN = " again"
BARE, DDP = "bare", "torch DDP"

_FSDP1_POLICY, _FSDP2_POLICY = "MixedPrecision", "MixedPrecisionPolicy"


@dataclass(frozen=True)
class Dtypes:
    """What a model is computed and reduced in, which is stored in float32."""

    computed: torch.dtype
    reduced: torch.dtype


# A package, a module, the classes of the modules that become units, and dtypes (None: as it is stored).
Api = Callable[[Any, nn.Module, set[type[nn.Module]], Dtypes | None], nn.Module]


def _fsdp1(
    package: Any, module: nn.Module, units: set[type[nn.Module]], dtypes: Dtypes | None, **options: Any
) -> nn.Module:
    if dtypes is not None:
        policy = getattr(package, _FSDP1_POLICY)
        options["mixed_precision"] = policy(param_dtype=dtypes.computed, reduce_dtype=dtypes.reduced)
    device = next(module.parameters()).device
    wrapped = package.wrap.ModuleWrapPolicy(units)
    return package.FullyShardedDataParallel(module, auto_wrap_policy=wrapped, device_id=device, **options)


def _fsdp2(
    package: Any, module: nn.Module, units: set[type[nn.Module]], dtypes: Dtypes | None, **options: Any
) -> nn.Module:
    if dtypes is not None:
        policy = getattr(package, _FSDP2_POLICY)
        options["mp_policy"] = policy(param_dtype=dtypes.computed, reduce_dtype=dtypes.reduced)
    # Without a mesh the model would move to a GPU, where there is one.
    device = next(module.parameters()).device.type
    options.setdefault("mesh", init_device_mesh(device, (dist.get_world_size(),)))
    for inner in module.modules():
        if type(inner) in units:
            package.fully_shard(inner, **options)
    return package.fully_shard(module, **options)


def _compiled(
    api: Api, package: Any, module: nn.Module, units: set[type[nn.Module]], dtypes: Dtypes | None, **options: Any
) -> nn.Module:
    """torch.compile around each unit, and sharding around that, as torchtitan does it."""
    for name, inner in list(module.named_modules()):
        if type(inner) in units:
            module.set_submodule(name, torch.compile(inner))  # type: ignore[arg-type]
    return api(package, module, {OptimizedModule}, dtypes, **options)


COMPILED = " compiled"
_FACES: dict[str, Api] = {
    "FSDP1": partial(_fsdp1, use_orig_params=True),
    "FSDP1 flat": partial(_fsdp1, use_orig_params=False),
    "FSDP2": _fsdp2,
    "FSDP2 flat": partial(_fsdp2, layout="flat"),
    "FSDP2 ragged": partial(_fsdp2, layout="ragged"),
}
APIS = tuple(_FACES)
_FACES |= {api + COMPILED: partial(_compiled, _FACES[api]) for api in APIS}
# The layouts of `fully_shard`. torch has the first alone, which all are compared with.
LAYOUTS = ("FSDP2", "FSDP2 flat", "FSDP2 ragged")


def ours(apis: Sequence[str] = APIS) -> list[str]:
    """Our contestants.

    >>> ours(("FSDP1", "FSDP2"))
    ['our FSDP1', 'our FSDP2']
    """
    return [f"{OURS} {api}" for api in apis]


def theirs(apis: Sequence[str] = APIS) -> list[str]:
    """What torch has beside them.

    >>> theirs(("FSDP1", "FSDP2", "FSDP2 flat"))
    ['torch FSDP1', 'torch FSDP2']
    """
    return list(dict.fromkeys(map(counterpart, ours(apis))))


def counterpart(name: str) -> str:
    """torch's contestant for one of ours.

    >>> counterpart("our FSDP1 flat")
    'torch FSDP1 flat'
    >>> counterpart("our FSDP2 flat")
    'torch FSDP2'
    >>> counterpart("our FSDP2 flat compiled")
    'torch FSDP2 compiled'
    """
    api = name.removeprefix(f"{OURS} ")
    plain = api.removesuffix(COMPILED)
    return f"{THEIRS} {LAYOUTS[0] if plain in LAYOUTS else plain}{api[len(plain) :]}"


def mixes_precision(name: str) -> bool:
    """Whether a contestant can compute in another dtype than it is stored in."""
    package, _, api = name.removesuffix(COMPILED).partition(" ")
    return hasattr(PACKAGES[package], _FSDP2_POLICY if api in LAYOUTS else _FSDP1_POLICY)


def build(
    name: str, module: nn.Module, units: set[type[nn.Module]], dtypes: Dtypes | None = None, **options: Any
) -> nn.Module:
    """The module as a contestant trains it, on all ranks of the default group.

    Args:
        name: of a contestant; followed by AGAIN, it is the same one.
        units: classes of the modules that are sharded as units of their own.
        dtypes: to compute and reduce in; None: as the module is stored. BARE and DDP know no other.
        options: further ones of the interface.
    """
    if name == BARE:
        return module
    if name == DDP:
        return DistributedDataParallel(module)
    package, _, api = name.removesuffix(AGAIN).partition(" ")
    return _FACES[api](PACKAGES[package], module, units, dtypes, **options)

"""Whether a state dict fits a sharded model, asked before anything of it is loaded: what is refused has changed nothing (R36).

torch's `load_state_dict` copies entry by entry and lists at its end what did not fit. Here the outermost sharded module, whose
turn comes first, looks at all entries below it, and all ranks hear of what any of them found. Then they agree on what they load,
since it will be exchanged between them.
"""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import is_tensor_like

from crossframe.errors import AgreementError, StateDictError
from torch_backend.exposure.flat import FLAT_PARAM
from torch_backend.exposure.registration import ShardedParams
from torch_backend.piece_moves import is_over
from torch_backend.piece_tensor import PieceTensor
from torch_backend.rounds import agree, withdraw
from torch_backend.slots import canonical_name
from torch_backend.unit import UNIT, unit_of

TITLE = "loading of a state dict"

# Sharded modules below one that has been checked, with all that is below it.
_checked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
# What the calls of `load_state_dict` that are under way were given as `strict`: torch does not tell it to hooks.
_strict: list[bool] = []


@contextmanager
def strictly(strict: bool) -> Iterator[None]:
    """Around `load_state_dict` of a sharded module: whether missing and unexpected entries are wrong. Of a plain module around
    sharded ones it is not known, and misshapen entries alone are found beforehand."""
    _strict.append(strict)
    try:
        yield
    finally:
        _strict.pop()


def check_load(module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Called by every sharded module before it loads its part of a state dict; the outermost one checks all.

    Args:
        state: under names without wrappers.
        prefix: the module's own.

    Raises:
        StateDictError: on all ranks of the module's mesh; the message lists what is wrong on the rank where it was found.
    """
    if module in _checked:
        _checked.discard(module)
        return
    mesh = unit_of(module).mesh
    groups = [some.group for some in (mesh.shards, mesh.replicas) if some.size > 1]
    if wrong := list(_wrong(module, state, prefix, strict=bool(_strict and _strict[-1]))):
        error = StateDictError(f"the state dict does not fit the model, and nothing was loaded: {'; '.join(wrong)}")
        withdraw(groups, TITLE, error)
        raise error
    said = [(f"entry {key!r}", _described(state[key])) for key in sorted(state) if key.startswith(prefix)]
    try:
        agree(groups, TITLE, said, advice="load the same state dict on every rank")
    except AgreementError as error:
        raise StateDictError(f"nothing was loaded: {error}") from error
    _checked.update(inner for inner in module.modules() if inner is not module and UNIT in inner.__dict__)


def _described(value: Any) -> dict[str, str]:
    if not isinstance(value, Tensor):
        return {"kind": type(value).__name__}
    return {"kind": type(value).__name__, "shape": str(list(value.shape)), "dtype": str(value.dtype)}


def _wrong(module: nn.Module, state: Mapping[str, Any], prefix: str, *, strict: bool) -> Iterator[str]:
    expected, optional, opaque = _expected(module, prefix)
    own = {key: value for key, value in state.items() if key.startswith(prefix)}
    if strict:
        missing = [key for key in expected if key not in own and key not in optional]
        unexpected = [
            key
            for key in own
            if key not in expected and not key.endswith("_extra_state") and not key.startswith(tuple(opaque))
        ]
        if missing:
            yield f"missing {', '.join(map(repr, missing))}"
        if unexpected:
            yield f"unexpected {', '.join(map(repr, unexpected))}"
    for key, (shape, like) in expected.items():
        value: Any = own.get(key)
        if key not in own:
            continue
        if not is_tensor_like(value):  # lightning's are read from their file when they are copied
            yield f"{key!r} is a {type(value).__name__} and no tensor"
        elif tuple(value.shape) != shape and not (not shape and tuple(value.shape) == (1,)):
            yield f"{key!r} has shape {tuple(value.shape)}, expected {shape}"
        elif isinstance(like, DTensor) and not isinstance(value, DTensor):
            yield (
                f"{key!r} is a {type(value).__name__} and the parameter a DTensor (distribute_tensor makes one of it; of whole "
                "state dicts set_model_state_dict does, with StateDictOptions(full_state_dict=True))"
            )
        elif isinstance(value, DTensor) and like is not None and not _is_over(value.device_mesh, like):
            yield f"{key!r} is on {value.device_mesh}, expected {like.device_mesh}, or its full_tensor()"


def _is_over(mesh: DeviceMesh, like: DTensor | PieceTensor) -> bool:
    return mesh == like.device_mesh if isinstance(like, DTensor) else is_over(mesh, like.place)


def _expected(module: nn.Module, prefix: str) -> tuple[dict[str, tuple[tuple[int, ...], Any]], set[str], set[str]]:
    """The entries that a module loads: by key their shapes, and the DTensors that they are copied into; which of them may lack;
    and below which prefixes modules have their own way of loading, of which nothing is known."""
    found: dict[str, tuple[tuple[int, ...], Any]] = {}
    optional: set[str] = set()
    opaque: set[str] = set()
    shapes: dict[str, tuple[int, ...]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        if UNIT in inner.__dict__:
            unit = unit_of(inner)
            for bucket in unit.buckets:
                # Under FSDP1 what is registered has other names or shapes.
                if not isinstance(bucket.exposure, ShardedParams):
                    for spec in unit.params_at(bucket, canonical_name(path)):
                        shapes |= {prefix + name: spec.shape for name in (spec.name, *spec.aliases)}
    for path, inner in module.named_modules(remove_duplicate=False):
        name = canonical_name(path)
        at = f"{prefix}{name}." if name else prefix
        if at.startswith(tuple(opaque)):
            continue
        if _has_its_own_way(inner):
            opaque.add(at)
            continue
        for attribute, param in inner._parameters.items():
            if param is not None and attribute != FLAT_PARAM:
                key = at + attribute
                like = param if isinstance(param, DTensor | PieceTensor) else None
                found[key] = (shapes.get(key, tuple(param.shape)), like)
        for attribute, buffer in inner._buffers.items():
            if buffer is not None and attribute not in inner._non_persistent_buffers_set:
                found[at + attribute] = (tuple(buffer.shape), buffer if isinstance(buffer, DTensor) else None)
        if isinstance(inner, _NormBase):  # which takes state dicts from before it counted batches
            optional.add(f"{at}num_batches_tracked")
    for key, shape in shapes.items():
        if not key.startswith(tuple(opaque)):
            found.setdefault(key, (shape, None))
    return found, optional, opaque


def _has_its_own_way(module: nn.Module) -> bool:
    if isinstance(module, ActivationWrapper):
        return False
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    foreign = any(not getattr(hook, "__module__", "").startswith("torch_backend.") for hook in hooks)
    return (own and not isinstance(module, _NormBase)) or foreign

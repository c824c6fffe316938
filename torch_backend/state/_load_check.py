"""Checks that a state dict fits a sharded model before anything is loaded, so that an error changes nothing (R36).

torch's `load_state_dict` copies entry by entry, and at its end lists the entries that did not fit. Here the outermost sharded
module, which is loaded first, checks all entries below it, and an error on one rank is raised on all. Then the ranks agree that
they load the same entries, since these are exchanged between them.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.__future__ import get_swap_module_params_on_conversion
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import is_tensor_like

from crossframe.errors import AgreementError, StateDictError
from crossframe.lifecycle import UnitState
from crossframe.state import FLAT_PARAM, StateKind, state_key, unfit
from torch_backend.engine._unit import UNIT, Unit, unit_of
from torch_backend.mesh._tensor_parallel import TensorParallelParam
from torch_backend.param_registration._registered_params import ShardedParams
from torch_backend.pieces._piece_moves import is_over
from torch_backend.pieces._piece_tensor import PieceTensor
from torch_backend.pieces._sharded_tensors import shape_and_dtype
from torch_backend.ranks._consensus import agree, spans_ranks, withdraw

TITLE = "loading of a state dict"

# Sharded modules below one that has been checked.
_checked: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
# The argument `strict` of the calls of `load_state_dict` that are under way: torch does not pass it to hooks.
_strict: list[bool] = []


@contextmanager
def strictly(strict: bool) -> Iterator[None]:
    """Around `load_state_dict` of a sharded module: whether missing and unexpected entries are errors. If a plain module that
    contains sharded ones is loaded, this is not known, and only misshapen entries are found in advance."""
    _strict.append(strict)
    try:
        yield
    finally:
        _strict.pop()


def check_load(module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
    """Called by every sharded module before it loads its part of a state dict; the outermost one checks all entries.

    Args:
        state: with names without wrappers.
        prefix: of the module.

    Raises:
        StateDictError: on all ranks of the module's mesh; the message lists what is wrong on the rank where it was found.
    """
    if module in _checked:
        _checked.discard(module)
    else:
        expected, _ = _checked_entries(module, state, prefix)
        _checked.update(expected.sharded[1:])


def load_plainly(module: nn.Module, state: Mapping[str, Any]) -> bool:
    """Check a state dict, and copy it if each module loads as `nn.Module` does, shows its shards, and has exactly these entries.
    torch's `load_state_dict` would do the same, after a search for the entries of each module.

    Returns:
        Whether it was loaded. If not, torch's `load_state_dict` loads it, without another check.

    Raises:
        StateDictError: see `check_load`.
    """
    expected, seen = _checked_entries(module, state, "")
    entries, units = expected.entries, dict.fromkeys(map(unit_of, expected.sharded))
    plain = expected.plain and state.keys() == entries.keys() and not get_swap_module_params_on_conversion()
    plain = plain and all(unit.state == UnitState() for unit in units)
    if not plain or any(seen[key][1:2] != (param.shape,) or param.is_meta for key, (_, param) in entries.items()):
        _checked.update(expected.sharded)
        return False
    try:
        with torch.no_grad():
            for key, (_, param) in entries.items():
                param.copy_(state[key])
    except Exception:  # torch's loop copies the rest, and its error lists all that failed
        _checked.update(expected.sharded)
        return False
    for unit in units:
        for bucket in unit.buckets:
            bucket.registrar.adopt_loaded()
    return True


def _checked_entries(
    module: nn.Module, state: Mapping[str, Any], prefix: str
) -> tuple["_Expected", Mapping[str, tuple[Any, ...]]]:
    """The entries that a module loads, once all ranks have found that a state dict fits them, and the descriptions of the entries
    of the state dict; see `check_load`."""
    mesh = unit_of(module).mesh
    groups = [some.group for some in (mesh.shards, mesh.replicas) if some.size > 1]
    expected = _Expected(module, prefix)
    shards = tuple(expected.local)
    own = {key: state[key] for key in sorted(state) if key.startswith(prefix) and not key.startswith(shards)}
    seen = {key: _seen(value) for key, value in own.items()}
    if wrong := list(_wrong(expected, own, seen, strict=bool(_strict and _strict[-1]))):
        error = StateDictError(f"the state dict does not fit the model, and nothing was loaded: {'; '.join(wrong)}")
        withdraw(groups, TITLE, error)
        raise error
    try:
        if any(map(spans_ranks, groups)):
            advice = "load the same state dict on every rank"
            agree(groups, TITLE, lambda: _described(seen), brief=repr(seen), advice=advice)
    except AgreementError as error:
        raise StateDictError(f"nothing was loaded: {error}") from error
    return expected, seen


def _seen(value: Any) -> tuple[Any, ...]:
    """The description of an entry that ranks compare: the name of its type, and a tensor's shape and dtype."""
    if not isinstance(value, Tensor):
        return (type(value).__name__,)
    return type(value).__name__, *shape_and_dtype(value)


def _described(seen: Mapping[str, tuple[Any, ...]]) -> list[tuple[str, dict[str, str]]]:
    description = []
    for key, (kind, *more) in seen.items():
        settings = {"shape": str(list(more[0])), "dtype": str(more[1])} if more else {}
        description.append((f"entry {key!r}", {"kind": kind, **settings}))
    return description


def _wrong(
    expected: "_Expected", own: Mapping[str, Any], seen: Mapping[str, tuple[Any, ...]], *, strict: bool
) -> Iterator[str]:
    """What does not fit, in words.

    Args:
        own: the module's part of a state dict.
        seen: the descriptions of its entries.
        strict: whether missing and unexpected entries are errors.
    """
    entries, opaque = expected.entries, tuple(expected.opaque)
    found = {
        key: seen[key][1] if len(seen[key]) > 1 else _shape_of(value)
        for key, value in own.items()
        if key in entries or not (key.endswith("_extra_state") or key.startswith(opaque))
    }
    shapes = {key: shape for key, (shape, _) in entries.items()}
    yield from unfit(shapes, found, strict=strict, optional=expected.optional)
    for key, (_, like) in entries.items():
        if not isinstance(like, (DTensor, PieceTensor, TensorParallelParam)) or (value := own.get(key)) is None:
            continue
        if isinstance(value, DTensor) and isinstance(like, DTensor) and value._spec.mesh == like._spec.mesh:
            continue
        if is_tensor_like(value):
            yield from _of_another_mesh(key, value, like)


def _shape_of(value: Any) -> Any:
    """The shape of a value, or the name of its type if it has none. lightning's tensor-like objects are read later."""
    return value.shape if is_tensor_like(value) else type(value).__name__


def _of_another_mesh(key: str, value: Any, like: Any) -> Iterator[str]:
    """Reports a value on another mesh than its parameter, or without one.

    Args:
        like: the DTensor or PieceTensor that the value is copied into; under FSDP1, the DTensor that the parameter is a part of.
    """
    if not isinstance(value, DTensor):
        if isinstance(like, DTensor | TensorParallelParam):
            yield (
                f"{key!r} is a {type(value).__name__} and the parameter a DTensor (distribute_tensor makes one of it; of "
                "whole state dicts set_model_state_dict does, with StateDictOptions(full_state_dict=True))"
            )
    elif isinstance(like, TensorParallelParam):
        if not like.is_over(value.device_mesh):
            yield f"{key!r} is on {value.device_mesh}, expected {like.spec.mesh}, or that and the data parallel ranks"
    elif not _is_over(value.device_mesh, like):
        yield f"{key!r} is on {value.device_mesh}, expected {like.device_mesh}, or its full_tensor()"


def _is_over(mesh: DeviceMesh, like: DTensor | PieceTensor) -> bool:
    return mesh == like.device_mesh if isinstance(like, DTensor) else is_over(mesh, like.location)


class _Expected:
    """The entries that a module loads.

    Attributes:
        entries: shapes by key, each with the tensor that is registered; under FSDP1, the DTensor of tensor parallelism or None.
        optional: keys that may be missing.
        opaque: prefixes of modules that override how they load, so that their keys are unknown.
        local: prefixes of units that load a local state dict, which they check themselves.
        sharded: the sharded modules: the module, and those below it.
        plain: whether all modules load as `nn.Module` does, into tensors that are registered now.
    """

    def __init__(self, module: nn.Module, prefix: str) -> None:
        self.entries: dict[str, tuple[Sequence[int], Any]] = {}
        self.optional: set[str] = set()
        self.opaque: set[str] = set()
        self.local: set[str] = set()
        self.sharded: list[nn.Module] = []
        self.plain = True
        # The shapes of parameters of FSDP1's units: what is registered for them has another shape, or nothing is registered.
        self._shapes: dict[nn.Module, dict[str, tuple[tuple[int, ...], TensorParallelParam | None]]] = {}
        self._visit(module, prefix, known=True)
        self.plain = self.plain and not (self.opaque or self.local or self._shapes)

    def _visit(self, module: nn.Module, at: str, *, known: bool) -> None:
        """Visit a module and all modules below it. Recursion, since `named_modules` would take as long as the rest of the check.

        Args:
            at: its prefix.
            known: whether no module that contains it overrides how it loads.
        """
        if UNIT in module.__dict__:
            self.sharded.append(module)
            if _loads_own_shards(module):
                self.local.add(at)
                known = False
            else:
                self._take_shapes(unit_of(module))
        if known and _has_its_own_way(module):
            self.opaque.add(at)
            known = False
        if known:
            self._take_entries(module, at)
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            self.plain = False
        if module._load_state_dict_post_hooks:
            self.plain = self.plain and all(map(_is_of_ours, module._load_state_dict_post_hooks.values()))
        for name, child in module._modules.items():
            if child is not None:
                self._visit(child, f"{at}{name}." if state_key(name) else at, known=known)

    def _take_shapes(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            if not isinstance(bucket.registrar, ShardedParams):
                tp_params = bucket.registrar.tp_params or [None] * len(bucket.layout.params)
                for i, owner, attribute in bucket.registrar.registered:
                    tp_param = tp_params[i]
                    shape = bucket.layout.params[i].shape if tp_param is None else tp_param.shape
                    self._shapes.setdefault(owner, {})[attribute] = shape, tp_param

    def _take_entries(self, module: nn.Module, at: str) -> None:
        entries, shapes = self.entries, self._shapes.get(module)
        if shapes is not None:
            entries.update({at + attribute: entry for attribute, entry in shapes.items()})
        for attribute, param in module._parameters.items():
            if param is None or attribute == FLAT_PARAM:
                continue
            if shapes is None or attribute not in shapes:
                entries[at + attribute] = param.shape, param
                if isinstance(param, PieceTensor):
                    self.plain = False
        if not module._buffers:
            return
        for attribute, buffer in module._buffers.items():
            if buffer is not None and attribute not in module._non_persistent_buffers_set:
                entries[at + attribute] = buffer.shape, buffer
        if isinstance(module, _NormBase):  # old state dicts lack the count of batches
            self.optional.add(f"{at}num_batches_tracked")


def _loads_own_shards(module: nn.Module) -> bool:
    """Whether a sharded module loads local state dicts, of this rank's own shards (R36)."""
    settings = module.__dict__.get("_state_dict_settings")
    is_local = settings is not None and settings.state_dict_type.kind is StateKind.LOCAL
    return is_local and unit_of(module).mesh.spec.shard > 1


def _is_of_ours(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch_backend.")


def _has_its_own_way(module: nn.Module) -> bool:
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    if not module._load_state_dict_pre_hooks:
        return own and not isinstance(module, _NormBase)
    if isinstance(module, ActivationWrapper):
        return False
    hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
    foreign = not all(map(_is_of_ours, hooks))
    return (own and not isinstance(module, _NormBase)) or foreign

"""State dicts of a wrapped module, while its parameters are summoned: under the names of the module without wrappers."""

from typing import Any

from torch import nn

from crossframe.errors import UsageError
from torch_backend.slots import WRAPPED
from torch_backend.unit import unit_of


def refuse_sharded_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise UsageError for a state dict of shards."""
    unit = unit_of(module)
    if not unit.summoned:
        raise UsageError(
            f"state_dict of the sharded unit {unit.name!r} would hold this rank's shards under the names of full "
            "parameters; call it inside FullyShardedDataParallel.summon_full_params(module, writeback=False)"
        )


def strip_wrapper(module: nn.Module, state: dict, prefix: str, local_metadata: dict) -> None:
    """Names in a state dict are those of the module without wrappers."""
    for key in [key for key in state if key.startswith(f"{prefix}{WRAPPED}.")]:
        state[prefix + key.removeprefix(f"{prefix}{WRAPPED}.")] = state.pop(key)


def add_wrapper(module: nn.Module, state: dict, prefix: str, *rest: Any) -> None:
    """The inverse, for loading."""
    unit = unit_of(module)
    if not unit.summoned:
        raise UsageError(
            f"load_state_dict into the sharded unit {unit.name!r}: call it inside "
            "FullyShardedDataParallel.summon_full_params(module), where parameters have their full shapes"
        )
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}{WRAPPED}.{key.removeprefix(prefix)}"] = state.pop(key)

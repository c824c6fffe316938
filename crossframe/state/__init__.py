"""State dicts of models (R36) and of optimizers (R37), as names, shapes and pieces."""

from crossframe.state.model import (
    IncompatibleKeys,
    StateEntry,
    StateKind,
    TensorSpec,
    check_load,
    check_local_load,
    expected_tensors,
    state_entries,
)
from crossframe.state.names import (
    CHECKPOINT_WRAPPED,
    COMPILED,
    FLAT_PARAM,
    FSDP_WRAPPED,
    WRAPPERS,
    canonical_name,
    local_key,
    state_key,
    without_parts,
)
from crossframe.state.optim import flatten_state, gather_state, shard_state, unflatten_state
from crossframe.state.param_groups import grouped_units, state_by_id, state_by_name, ungrouped_units
from crossframe.state.roles import Role, Seen, agreed, classify, seen

__all__ = [
    "CHECKPOINT_WRAPPED",
    "COMPILED",
    "FLAT_PARAM",
    "FSDP_WRAPPED",
    "WRAPPERS",
    "IncompatibleKeys",
    "Role",
    "Seen",
    "StateEntry",
    "StateKind",
    "TensorSpec",
    "agreed",
    "canonical_name",
    "check_load",
    "check_local_load",
    "classify",
    "expected_tensors",
    "flatten_state",
    "gather_state",
    "grouped_units",
    "local_key",
    "seen",
    "shard_state",
    "state_by_id",
    "state_by_name",
    "state_entries",
    "state_key",
    "unflatten_state",
    "ungrouped_units",
    "without_parts",
]

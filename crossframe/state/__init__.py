"""State dicts of models (R36) and of optimizers (R37), as names, shapes and pieces."""

from crossframe.state.model_state_dict import StateKind, target_of, unfit
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
from crossframe.state.optim_state_dict import rekeyed_groups, role_in_full, unfit_state
from crossframe.state.roles import Description, Role, Seen, agreed, classify, merged, same_value, seen

__all__ = [
    "CHECKPOINT_WRAPPED",
    "COMPILED",
    "FLAT_PARAM",
    "FSDP_WRAPPED",
    "WRAPPERS",
    "Description",
    "Role",
    "Seen",
    "StateKind",
    "agreed",
    "canonical_name",
    "classify",
    "local_key",
    "merged",
    "rekeyed_groups",
    "role_in_full",
    "same_value",
    "seen",
    "state_key",
    "target_of",
    "unfit",
    "unfit_state",
    "without_parts",
]

"""The keys of state dicts: names of the unwrapped model (R36), and torch's key of a flat parameter."""

from collections.abc import Collection
from functools import lru_cache

from crossframe.errors import StateDictError
from crossframe.quoting import quote

# Wrapping a module adds one of these to the names of everything inside it.
FSDP_WRAPPED, CHECKPOINT_WRAPPED, COMPILED = "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"
WRAPPERS = frozenset({FSDP_WRAPPED, CHECKPOINT_WRAPPED, COMPILED})
_OUTSIDE_STATE_DICTS = WRAPPERS - {COMPILED}
FLAT_PARAM = "_flat_param"


def canonical_name(name: str) -> str:
    """The name of a module, parameter or buffer without the parts that wrapping added.

    Only whole parts between dots are removed: a module called `my_orig_mod` keeps its name. The name of a flat parameter stays
    too, since the unwrapped model has no such parameter.

    Raises:
        StateDictError: `name` is not a string.

    >>> canonical_name("_orig_mod.blocks.0._fsdp_wrapped_module._checkpoint_wrapped_module.weight")
    'blocks.0.weight'
    >>> canonical_name("_fsdp_wrapped_module.head._flat_param"), canonical_name("_fsdp_wrapped_module")
    ('head._flat_param', '')
    """
    if not isinstance(name, str):
        raise StateDictError(f"expected a string as a key of a state dict, got {quote(name)}")
    return without_parts(name, WRAPPERS)


@lru_cache(maxsize=1024)  # asked for each module whenever a state dict is loaded
def state_key(name: str) -> str:
    """The key of a module, parameter or buffer in torch's state dicts.

    It is the name without the parts that FSDP and activation checkpointing added. The part that torch.compile added stays, as in
    torch's keys.

    >>> state_key("_fsdp_wrapped_module.blocks.0._orig_mod._checkpoint_wrapped_module.weight")
    'blocks.0._orig_mod.weight'
    """
    return without_parts(name, _OUTSIDE_STATE_DICTS)


def without_parts(name: str, parts: Collection[str]) -> str:
    """A name without those of its parts between dots that are in `parts`.

    >>> without_parts("_orig_mod.blocks.0._fsdp_wrapped_module.weight", {"_fsdp_wrapped_module"})
    '_orig_mod.blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in parts)


def local_key(unit: str) -> str:
    """The key of a unit's flat parameter in a LOCAL state dict.

    >>> local_key(""), local_key("blocks.0")
    ('_flat_param', 'blocks.0._flat_param')
    """
    return f"{unit}.{FLAT_PARAM}" if unit else FLAT_PARAM

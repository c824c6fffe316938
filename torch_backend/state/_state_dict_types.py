"""State dict types and their configurations under FSDP1, by torch's names (R36, R37)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import nn

from crossframe.errors import AssertedError, StateDictConfigError, UsageError
from crossframe.quoting import quote
from crossframe.state import StateKind
from torch_backend.compat._torch_classes import as_ours

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class StateDictType(Enum):
    """What a state dict holds.

    - FULL_STATE_DICT: full tensors, as the module without wrappers has them.
    - LOCAL_STATE_DICT: this rank's shard of each flat parameter. It loads only at the world size that saved it.
    - SHARDED_STATE_DICT: of each parameter this rank's rows. It loads on any number of ranks.
    """

    FULL_STATE_DICT = auto()
    LOCAL_STATE_DICT = auto()
    SHARDED_STATE_DICT = auto()

    @property
    def kind(self) -> StateKind:
        """The core's name of it."""
        return StateKind[self.name.removesuffix("_STATE_DICT")]


class OptimStateKeyType(Enum):
    """The keys of parameters in an optimizer's state dict: names, or positions among the optimizer's parameters."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


@dataclass
class StateDictConfig:
    """Settings of the state dicts of a model.

    Attributes:
        offload_to_cpu: whether their tensors are on the CPU.
    """

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Settings of full state dicts.

    Attributes:
        rank0_only: whether only the first rank of the process group has entries. With `offload_to_cpu`, no other rank needs
            memory for them.
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Settings of local state dicts."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Settings of sharded state dicts.

    Attributes:
        _use_dtensor: whether they must hold DTensors, for which the module needs a `device_mesh`. They hold DTensors whenever
            there is a mesh, and ShardedTensors otherwise.
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Settings of the state dicts of an optimizer.

    Attributes:
        offload_to_cpu: whether their tensors are on the CPU.
    """

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Settings of full state dicts.

    Attributes:
        rank0_only: whether only the first rank gets one, and the others an empty dict.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Settings of local state dicts."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Settings of sharded state dicts.

    Attributes:
        _use_dtensor: see ShardedStateDictConfig.
    """

    _use_dtensor: bool = False


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


@dataclass
class StateDictSettings:
    """A type of state dicts with its settings, as `get_state_dict_type` returns them."""

    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


def settings_of(kind: Any, config: Any = None, optim_config: Any = None) -> StateDictSettings:
    """Settings from the arguments of `set_state_dict_type`. torch's own enum and records are accepted, since scripts mix imports.

    Raises:
        UsageError: no such type, or a record of another type.
    """
    found = as_ours(kind, StateDictType)
    if not isinstance(found, StateDictType):
        raise UsageError(f"state_dict_type: expected a StateDictType, got {quote(kind)}")
    return StateDictSettings(
        found,
        *(_record(given, expected) for given, expected in zip((config, optim_config), _CONFIGS[found], strict=True)),
    )


def _record(given: Any, expected: type) -> Any:
    if given is None:
        return expected()
    record = as_ours(given, expected)
    if not isinstance(record, expected):
        raise StateDictConfigError(
            f"expected a {expected.__name__} for this state_dict_type, got a {type(given).__name__}"
        )
    return record


class HasStateDictType(nn.Module):
    """A wrapper whose state dicts have a type, which a user sets for it and for all wrappers below."""

    _state_dict_settings: StateDictSettings

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Set the type of the state dicts of all wrappers in a module tree, and of those of its optimizer.

        Args:
            state_dict_config, optim_state_dict_config: settings of the type's classes; None for their defaults.

        Returns:
            The previous settings; the defaults if there are no wrappers.

        Raises:
            UsageError: no such type, settings of another type (also a RuntimeError), or wrappers whose settings differ (also an
                AssertionError).
        """
        settings = settings_of(state_dict_type, state_dict_config, optim_state_dict_config)
        before = HasStateDictType.get_state_dict_type(module)
        for wrapper in _wrappers(module):
            wrapper._state_dict_settings = settings
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The settings of the wrappers in a module tree.

        Raises:
            AssertedError: they differ.
        """
        found: list[StateDictSettings] = []
        for wrapper in _wrappers(module):
            if wrapper._state_dict_settings not in found:
                found.append(wrapper._state_dict_settings)
        if len(found) > 1:
            raise AssertedError(
                "the wrappers in this module have different types of state dicts, or different settings: "
                f"{', '.join(each.state_dict_type.name for each in found)}; call set_state_dict_type on the outermost module"
            )
        return found[0] if found else settings_of(StateDictType.FULL_STATE_DICT)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """A context with `set_state_dict_type`, after which the previous settings hold."""
        before = HasStateDictType.set_state_dict_type(
            module, state_dict_type, state_dict_config, optim_state_dict_config
        )
        try:
            yield
        finally:
            for wrapper in _wrappers(module):
                wrapper._state_dict_settings = before


def _wrappers(module: nn.Module) -> Sequence[HasStateDictType]:
    if not isinstance(module, nn.Module):
        raise UsageError(f"expected a module, got {quote(module)}")
    return [inner for inner in module.modules() if isinstance(inner, HasStateDictType)]

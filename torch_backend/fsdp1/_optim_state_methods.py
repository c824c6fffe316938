"""The methods of FullyShardedDataParallel for optimizer state, under torch's names (R37)."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from typing_extensions import deprecated

from crossframe.errors import AssertedError
from crossframe.quoting import quote
from torch_backend.compat._torch_classes import as_ours
from torch_backend.state._optim_state_dict import Names, rekey, save
from torch_backend.state._optim_state_load import to_load
from torch_backend.state._state_dict import HasStateDicts
from torch_backend.state._state_dict_types import HasStateDictType, OptimStateKeyType, StateDictType

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None
_OLD = "Use `{}`".format


class HasOptimStateDicts(HasStateDicts):
    """Adds optimizer state methods to the wrapper. All ranks must call them."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The optimizer state by parameter name, as full or sharded tensors, as set by `set_state_dict_type`.

        Args:
            model: the module with wrappers whose parameters the optimizer has.
            optim: the optimizer.
            optim_state_dict: a result of `optim.state_dict()`. None: calls it.
            group: with `rank0_only`, the state is returned on the first rank of this group. None: all ranks.

        Returns:
            "state" by parameter name and entry, and "param_groups" with names as "params". With `rank0_only`, an empty dict on
            other ranks.

        Raises:
            StateDictError: an entry that is neither elementwise nor a scalar, or a scalar that differs between ranks.
            UsageError: the optimizer has other parameters.
        """
        settings = HasStateDictType.get_state_dict_type(model)
        config: Any = settings.optim_state_dict_config
        return save(
            model,
            optim,
            optim.state_dict() if optim_state_dict is None else optim_state_dict,
            full=settings.state_dict_type is StateDictType.FULL_STATE_DICT,
            rank0_only=getattr(config, "rank0_only", False),
            offload=config.offload_to_cpu,
            group=group,
        )

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The inverse of `optim_state_dict`, for any wrapping and any number of ranks.

        Args:
            optim_state_dict: with full tensors or this rank's sharded tensors. With `rank0_only`, only the first rank's is used.
            is_named_optimizer: whether the optimizer's keys are names.
            load_directly: also load the result into `optim`.
            group: see `optim_state_dict`.

        Returns:
            An argument for `optim.load_state_dict`.

        Raises:
            StateDictError: the state does not fit the model or the optimizer; all mismatches are listed.
            AgreementError: ranks have different sharded states.
        """
        settings = HasStateDictType.get_state_dict_type(model)
        full = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        result = to_load(
            model,
            optim,
            optim_state_dict,
            rank0_only=full and getattr(settings.optim_state_dict_config, "rank0_only", False),
            group=group,
            by_name=is_named_optimizer,
        )
        if load_directly:
            optim.load_state_dict(result)
        return result

    @staticmethod
    @deprecated(_OLD("optim_state_dict"), category=FutureWarning)
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: OptimInput = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """`optim_state_dict` with full tensors on the CPU, independent of `set_state_dict_type`."""
        raw = optim.state_dict()
        return save(
            model, optim, raw, full=True, rank0_only=rank0_only, offload=True, group=group, given=_listed(optim_input)
        )

    @staticmethod
    @deprecated(_OLD("optim_state_dict"), category=FutureWarning)
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """`optim_state_dict` with sharded tensors on the CPU, independent of `set_state_dict_type`."""
        return save(model, optim, optim.state_dict(), full=False, rank0_only=False, offload=True, group=group)

    @staticmethod
    @deprecated(_OLD("optim_state_dict_to_load"), category=FutureWarning)
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` of full tensors that every rank has."""
        return to_load(model, optim, full_optim_state_dict, rank0_only=False, group=None, given=_listed(optim_input))

    @staticmethod
    @deprecated(_OLD("optim_state_dict_to_load"), category=FutureWarning)
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` of sharded tensors."""
        return to_load(model, optim, sharded_optim_state_dict, rank0_only=False, group=None)

    @staticmethod
    @deprecated(_OLD("optim_state_dict_to_load"), category=FutureWarning)
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """`optim_state_dict_to_load` of full tensors that only the first rank has."""
        return to_load(model, optim, full_optim_state_dict, rank0_only=True, group=group, given=_listed(optim_input))

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Replace parameter positions in an optimizer's state dict by names, or the reverse, for a model without wrappers.

        Args:
            optim_state_dict: with names, or positions among the optimizer's parameters, as keys.
            optim_state_key_type: the keys of the result.
            model: the model with these parameters.
            optim_input: the parameters or groups that the optimizer was constructed with; or pass `optim`.

        Raises:
            StateDictError: a key without a parameter, or flat parameters, which have no names.
        """
        key_type = as_ours(optim_state_key_type, OptimStateKeyType)
        if not isinstance(key_type, OptimStateKeyType):
            raise AssertedError(
                f"optim_state_key_type: expected an OptimStateKeyType, got {quote(optim_state_key_type)}"
            )
        to_names = key_type is OptimStateKeyType.PARAM_NAME
        names = Names(model, optim, _listed(optim_input), maybe_plain=True)
        return rekey(optim_state_dict, names, to_names=to_names)


def _listed(optim_input: OptimInput) -> Any:
    return None if optim_input is None else list(optim_input)

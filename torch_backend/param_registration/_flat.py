"""FlatRegistrar: FSDP1 with use_orig_params=False. The module registers one FlatParameter."""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from crossframe.state import FLAT_PARAM
from torch_backend.memory._reshard_group import ReshardGroupShard
from torch_backend.memory._store import ShardStore
from torch_backend.mesh._tensor_parallel import in_use, tensor_parallel_params
from torch_backend.modules._owned_params import OwnedParam
from torch_backend.param_registration._registered_params import (
    Registration,
    add_grad_to,
    adopt_data,
    full_params,
    left_by_user,
    point_at,
    register,
    registrations,
    shadow,
    sync_requires_grad,
    unshadow,
)


class _FlatParameterType(type(nn.Parameter)):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, nn.Parameter) and getattr(instance, "_fsdp_flattened", False)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterType):
    """The shard of a unit's flattened parameters, which is the only parameter that the user and the optimizer see.

    As in PyTorch, its type is nn.Parameter: for parameters of any subclass, optimizers on accelerators turn to a loop over
    parameters, which is slower and rounds otherwise.
    """

    def __new__(cls, data: Tensor, requires_grad: bool = True) -> "FlatParameter":
        param = nn.Parameter(data, requires_grad)
        # lightning looks for this attribute.
        param._fsdp_flattened = True  # type: ignore[attr-defined]
        return param  # type: ignore[return-value]


class FlatRegistrar:
    """Registers one flat parameter. While the unit is sharded, attributes are NaN tensors with the parameters' shapes and dtypes,
    so that code can read these at any time."""

    conceals_after_forward = True

    def __init__(
        self,
        module: nn.Module,
        owned: Sequence[OwnedParam],
        store: ShardStore,
        leaves: list[nn.Parameter],
        mesh: DeviceMesh | None,
    ) -> None:
        """
        Args:
            mesh: the mesh of the ranks, if known.
        """
        self._module, self._store = module, store
        self.tp_params = tensor_parallel_params([entry.param for entry in owned], mesh)
        self._places = list(registrations(owned))
        self.flat_param = FlatParameter(store.buffer, requires_grad=owned[0].spec.requires_grad)
        # The names of its parameters, as in PyTorch, for libraries.
        self.flat_param._fqns = [entry.spec.name for entry in owned]  # type: ignore[attr-defined]
        self._shown: list[nn.Parameter] = []
        for _, owner, attribute in self._places:
            del owner._parameters[attribute]
        module.register_parameter(FLAT_PARAM, self.flat_param)
        self.take_leaves(leaves)

    def take_leaves(self, leaves: list[nn.Parameter]) -> None:
        """Set attributes to NaN tensors."""
        self._leaves = leaves
        absent = [leaf.detach().new_full((), float("nan")).expand(leaf.shape) for leaf in leaves]
        self._absent = [
            nan if tp_param is None else tp_param.dtensor(nan)
            for nan, tp_param in zip(absent, self.tp_params or [None] * len(absent), strict=True)
        ]
        self.unuse()

    @property
    def registered(self) -> list[Registration]:
        """Where each parameter would be registered."""
        return self._places

    def show_full(self) -> None:
        """The flat parameter stays registered."""

    def show_sharded(self) -> None:
        """Attributes yield NaN."""
        self.unuse()

    def used_params(self, aliases: Sequence[Tensor]) -> Sequence[Tensor]:
        """The aliases, under tensor parallelism as DTensors."""
        return in_use(aliases, self.tp_params)

    def use(self, used: Sequence[Tensor]) -> None:
        """Attributes yield `used`."""
        shadow(self._places, used)

    def unuse(self) -> None:
        """Attributes yield NaN."""
        shadow(self._places, self._absent)

    def summon(self, full: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> None:
        """Register full parameters instead of the flat parameter."""
        assert grads is None, "refused: the gradient is the flat parameter's"
        self._shown = full_params(full, self._leaves, self.tp_params)
        self.show_state(self._shown)

    def dismiss(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Register the flat parameter again."""
        try:
            return self.left(), []
        finally:
            self.hide_state()
            self._shown = []

    def show_state(self, params: Sequence[nn.Parameter]) -> None:
        """Register these instead of the flat parameter."""
        self._module._parameters.pop(FLAT_PARAM, None)
        unshadow(self._places)
        register(self._places, params)

    def hide_state(self) -> None:
        """Register only the flat parameter."""
        for _, owner, attribute in self._places:
            owner._parameters.pop(attribute, None)
        self._module._parameters[FLAT_PARAM] = self.flat_param
        self.unuse()

    def left(self) -> list[Tensor]:
        """The registered full parameters."""
        return left_by_user(self._places, self._shown, self.tp_params, self._store.layout)

    def write_grads(self, full: Sequence[Tensor | None]) -> None:
        """None were shown."""

    def adopt(self) -> bool:
        """Adopt a flat parameter that was moved or assigned."""
        if self.flat_param.data_ptr() == self._store.buffer.data_ptr():  # both are 0 without elements
            return False
        adopt_data(self.flat_param, self._store.buffer, FLAT_PARAM, self._store.rank)
        return True

    def deregister(self) -> None:
        """The flat parameter is not registered."""
        del self._module._parameters[FLAT_PARAM]

    def put_back(self) -> Mapping[int, nn.Parameter]:
        """Original parameters are not registered."""
        return {}

    def put_in(self, others: Mapping[int, nn.Parameter]) -> None:
        """Original parameters are not registered."""

    def adopt_loaded(self) -> None:
        self.adopt()

    def follow(self, leaves: list[nn.Parameter], fn: Callable[[Tensor], Tensor]) -> None:
        """Set the flat parameter to the new buffer."""
        point_at(self.flat_param, self._store.buffer, fn)
        self._module._parameters[FLAT_PARAM] = self.flat_param
        self.take_leaves(leaves)

    def managed(self) -> list[nn.Parameter]:
        """The flat parameter."""
        return [self.flat_param]

    def whole_grads(self) -> list[Tensor]:
        """The flat parameter's gradient."""
        grad = self.flat_param.grad
        if grad is None:
            return []
        for run in self._store.layout.padding(self._store.rank):
            grad[run.start : run.stop] = 0
        return [grad]

    def show_group_shard(self, group_shard: ReshardGroupShard) -> None:
        """The flat parameter stays the shard."""

    def add_grad(self, shard: Tensor, reduced: Sequence[int], unused: Set[int]) -> None:
        """Set the gradient of the flat parameter to the reduced shard."""
        add_grad_to(self.flat_param, shard)

    def grads(self) -> list[Tensor | None]:
        """Parts of the flat parameter's gradient."""
        grad = self.flat_param.grad
        return [None] * len(self._leaves) if grad is None else list(self._store.split(grad))

    def sync_requires_grad(self) -> None:
        """Set which leaves require a gradient from the flat parameter."""
        sync_requires_grad(self.flat_param, self._leaves)

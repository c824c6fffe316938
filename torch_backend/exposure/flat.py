"""FSDP1 without original parameters."""

from collections.abc import Sequence

from torch import Tensor, nn

from torch_backend.exposure.registration import (
    add_grad_to,
    adopt_data,
    left_by_user,
    registrations,
    shadow,
    sync_requires_grad,
    unshadow,
)
from torch_backend.slots import OwnedParam
from torch_backend.store import ShardStore


class FlatParameter(nn.Parameter):
    """The shard of a unit's flattened parameters, as the one parameter that user and optimizer see."""


FLAT_PARAM = "_flat_param"


class FlatExposure:
    """One flat parameter. While the unit is not in use, attributes yield NaN in the parameters' shapes and dtypes: code may
    ask a parameter for these at any time, and what reads values that are not here notices."""

    conceals_after_forward = True

    def __init__(self, module: nn.Module, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter]):
        self._module, self._store, self._leaves = module, store, leaves
        self._places = list(registrations(owned))
        self._absent = [leaf.new_full((), float("nan")).expand(leaf.shape) for leaf in leaves]
        self.flat_param = FlatParameter(store.buffer, requires_grad=owned[0].spec.requires_grad)
        for _, owner, attribute in self._places:
            del owner._parameters[attribute]
        module.register_parameter(FLAT_PARAM, self.flat_param)
        self.unuse()

    def show_full(self) -> None:
        """The flat parameter stays registered."""

    def show_sharded(self) -> None:
        """Attributes yield NaN."""
        self.unuse()

    def use(self, aliases: Sequence[Tensor]) -> None:
        """Attributes yield `aliases`."""
        shadow(self._places, aliases)

    def unuse(self) -> None:
        """Attributes yield NaN."""
        shadow(self._places, self._absent)

    def summon(self) -> None:
        """The leaves become parameters, and the flat parameter none."""
        del self._module._parameters[FLAT_PARAM]
        unshadow(self._places)
        for i, owner, attribute in self._places:
            owner._parameters[attribute] = self._leaves[i]

    def dismiss(self) -> list[Tensor]:
        """Back to the flat parameter."""
        current = left_by_user(self._places, self._leaves)
        for _, owner, attribute in self._places:
            owner._parameters.pop(attribute, None)
        self._module._parameters[FLAT_PARAM] = self.flat_param
        self.unuse()
        return current

    def adopt(self) -> None:
        """The flat parameter may have been moved or assigned."""
        adopt_data(self.flat_param, self._store.buffer, "_flat_param", self._store.rank)

    def add_grad(self, shard: Tensor) -> None:
        """The gradient of the flat parameter is the whole reduced shard."""
        add_grad_to(self.flat_param, shard)

    def grads(self) -> list[Tensor | None]:
        """Parts of the flat parameter's gradient."""
        grad = self.flat_param.grad
        return [None] * len(self._leaves) if grad is None else list(self._store.split(grad))

    def sync_requires_grad(self) -> None:
        """The flat parameter speaks for all."""
        sync_requires_grad(self.flat_param, self._leaves)

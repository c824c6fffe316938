"""Code shared by the registrars: register parameters, shadow attributes, adopt parameters that the user replaced."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from crossframe.layout import Layout
from torch_backend.memory._optimizer_steps import count_like
from torch_backend.memory._reshard_group import ReshardGroupShard
from torch_backend.memory._store import ShardStore, copy_into
from torch_backend.mesh._tensor_parallel import TensorParallelParams, as_params, in_use
from torch_backend.modules._owned_params import OwnedParam

# A parameter's index in the layout, and a module and attribute under which it is registered.
Registration = tuple[int, nn.Module, str]


def registrations(owned: Sequence[OwnedParam]) -> Iterator[Registration]:
    """All registrations of all parameters; a shared parameter has several."""
    for i, entry in enumerate(owned):
        for module, attribute in entry.registrations:
            yield i, module, attribute


def shadow(where: Sequence[Registration], aliases: Sequence[Tensor]) -> None:
    """Set attributes to `aliases`, independent of the registered parameters."""
    for i, module, attribute in where:
        module.__dict__[attribute] = aliases[i]


def unshadow(where: Sequence[Registration]) -> None:
    """Remove aliases, so that attributes are the registered parameters."""
    for _, module, attribute in where:
        module.__dict__.pop(attribute, None)


def register(where: Sequence[Registration], params: Sequence[nn.Parameter]) -> None:
    """Register `params`, one for each parameter of the layout, under all of its names."""
    for i, owner, attribute in where:
        owner._parameters[attribute] = params[i]


def left_by_user(
    where: Sequence[Registration], shown: Sequence[nn.Parameter], tp_params: TensorParallelParams, layout: Layout
) -> list[Tensor]:
    """The data of summoned parameters on exit, with replacements under any name, ignoring deletions; for DTensors, this rank's
    parts."""
    current = list(shown)
    for i, owner, attribute in where:
        registered = owner._parameters.get(attribute)
        if registered is not None and registered is not shown[i]:
            current[i] = registered
    if not tp_params:
        return [param.data for param in current]
    return [
        param.data if tp_param is None else tp_param.local(param, spec.name).detach()
        for param, tp_param, spec in zip(current, tp_params, layout.params, strict=True)
    ]


def adopt_data(param: nn.Parameter, piece: Tensor, name: str, rank: int) -> None:
    """Copy a parameter's data, which a user has replaced, into `piece`, and let the parameter alias the piece again."""
    copy_into(piece, param.data, name, rank, tuple(piece.shape))
    param.data = piece


def full_params(
    full: Sequence[Tensor], leaves: Sequence[nn.Parameter], tp_params: TensorParallelParams
) -> list[nn.Parameter]:
    """Full parameters for the user, which require gradients as the leaves do."""
    return as_params(full, [leaf.requires_grad for leaf in leaves], tp_params)


def add_grad_to(param: nn.Parameter, grad: Tensor) -> None:
    """Accumulate a reduced gradient of the parameter's shape and dtype. The sum has the dtype of the gradient that was there."""
    if param.grad is None:
        set_grad(param, grad)
    else:
        param.grad.add_(grad)
    call_grad_hooks(param)


def point_at(param: nn.Parameter, data: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Set a parameter's data, possibly with another dtype or device, and apply `fn` to its gradient."""
    grad = param.grad
    param.grad = None
    param.data = data
    set_grad(param, None if grad is None else fn(grad))


def set_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    """Assign a gradient, which PyTorch requires to have the parameter's dtype on first assignment."""
    if grad is None or grad.dtype == param.dtype:
        param.grad = grad
    else:
        param.grad = torch.empty_like(param)
        param.grad.data = grad


def round_grads(params: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Round gradients, after their sum with those that were there, to the dtype in which they are kept (R33)."""
    for param in params:
        if param.grad is not None and param.grad.dtype != dtype:
            param.grad.data = param.grad.to(dtype)


def has_grad_hooks(param: nn.Parameter) -> bool:
    """Whether a parameter has hooks for accumulated gradients."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None)) or hasattr(param, "_in_backward_optimizers")


def call_grad_hooks(param: nn.Parameter) -> None:
    """Call hooks for accumulated gradients (an optimizer in backward) with the reduced gradient."""
    if param._post_accumulate_grad_hooks:
        for hook in param._post_accumulate_grad_hooks.values():
            hook(param)
    if "_in_backward_optimizers" in param.__dict__:  # set by torch.distributed.optim
        for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()


def sync_requires_grad(param: nn.Parameter, leaves: Sequence[nn.Parameter]) -> None:
    """Let leaves require a gradient if the user's parameter does."""
    for leaf in leaves:
        if leaf.requires_grad != param.requires_grad:
            leaf.requires_grad_(param.requires_grad)


class RegisteredParams:
    """The base of registrars with one parameter for each original one: `params` are registered while sharded, the leaves while
    unsharded.

    Attributes:
        params: the optimizer's parameters, in the layout's order.
        tp_params: see Registrar.
    """

    def __init__(
        self,
        owned: Sequence[OwnedParam],
        store: ShardStore,
        leaves: list[nn.Parameter],
        params: list[nn.Parameter],
        tp_params: TensorParallelParams = (),
    ) -> None:
        self._store, self.params, self.tp_params = store, params, tp_params
        self._places = list(registrations(owned))
        self._in_use = False
        self.take_leaves(leaves)

    def take_leaves(self, leaves: list[nn.Parameter]) -> None:
        """Set the unsharded parameters; under tensor parallelism, DTensors of them are registered."""
        self._leaves = self._full = leaves
        if self.tp_params:
            self._full = [
                leaf if tp_param is None else tp_param.registered(leaf)
                for leaf, tp_param in zip(leaves, self.tp_params, strict=True)
            ]

    @property
    def registered(self) -> list[Registration]:
        """Where each parameter is registered."""
        return self._places

    def show_full(self) -> None:
        """Register the full parameters."""
        register(self._places, self._full)

    def show_sharded(self) -> None:
        """Register the sharded parameters."""
        if self._in_use:
            self.unuse()
        register(self._places, self.params)

    def used_params(self, aliases: Sequence[Tensor]) -> Sequence[Tensor]:
        """The aliases, under tensor parallelism as DTensors."""
        return in_use(aliases, self.tp_params)

    def use(self, used: Sequence[Tensor]) -> None:
        """Attributes yield `used`."""
        self._in_use = True
        shadow(self._places, used)

    def unuse(self) -> None:
        """Attributes yield what is registered."""
        self._in_use = False
        unshadow(self._places)

    def sync_requires_grad(self) -> None:
        """Accumulate the gradient of each parameter."""
        for param, leaf in zip(self.params, self._leaves, strict=True):
            if leaf.requires_grad is not param.requires_grad:
                leaf.requires_grad_(param.requires_grad)
        if self.tp_params:
            for param, full in zip(self.params, self._full, strict=True):
                full.requires_grad_(param.requires_grad)

    def show_state(self, params: Sequence[nn.Parameter]) -> None:
        """Register these instead of the sharded parameters."""
        register(self._places, params)

    def hide_state(self) -> None:
        """Register the sharded parameters again."""
        register(self._places, self.params)

    def show_group_shard(self, group_shard: ReshardGroupShard) -> None:
        """The shards over all ranks stay registered."""

    def deregister(self) -> None:
        """None of them is registered."""
        for _, owner, attribute in self._places:
            owner._parameters.pop(attribute, None)

    def managed(self) -> list[nn.Parameter]:
        """All of them."""
        return self.params

    def registered_params(self) -> list[nn.Parameter]:
        """The registered object of each parameter, under its last name."""
        found = dict(enumerate(self.params))
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            found[i] = found[i] if registered is None else registered
        return list(found.values())

    def put_back(self) -> dict[int, nn.Parameter]:
        """Register our parameters again, and return the user's replacements by index."""
        others: dict[int, nn.Parameter] = {}
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            if registered is not None and registered is not self.params[i]:
                others[i] = registered
                owner._parameters[attribute] = self.params[i]
        return others

    def put_in(self, others: Mapping[int, nn.Parameter]) -> None:
        """Register these instead of our parameters."""
        for i, owner, attribute in self._places:
            if i in others:
                owner._parameters[attribute] = others[i]

    def _take_back_places(self, check: Callable[[int, nn.Parameter], None]) -> None:
        """Copy the data of replacements registered by load_state_dict(assign=True) or a user, and register our objects again to
        keep their identity (R25).

        Args:
            check: called with a parameter's index and the replacement; raises if it is invalid.
        """
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            if registered is not None and registered is not self.params[i]:
                check(i, registered)
                self._take_over(self.params[i], registered)
                owner._parameters[attribute] = self.params[i]

    def _take_new_objects(self, check: Callable[[int, nn.Parameter], None]) -> None:
        """Adopt replacements that a user registered as the parameters, so that the next optimizer can have them.

        Args:
            check: as above.
        """
        before, params = None, self.params
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            if registered is params[i] or registered is None:
                continue
            before = before or list(params)
            if registered is not before[i]:
                check(i, registered)
                count_like(registered, before[i])
                params[i] = registered
        if before is not None:
            register(self._places, params)

    def _take_over(self, param: nn.Parameter, other: nn.Parameter) -> None:
        param.data = other.data
        param.grad = other.grad


class ShardedParams(RegisteredParams):
    """The base of FSDP2's registrars."""

    conceals_after_forward = False
    _shown: Sequence[nn.Parameter] = ()

    def summon(self, full: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> None:
        """Register full parameters."""
        assert grads is None, "no interface asks for them"
        self._shown = full_params(full, self._leaves, self.tp_params)
        register(self._places, self._shown)

    def dismiss(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Register the sharded parameters again."""
        try:
            return self.left(), []
        finally:
            register(self._places, self.params)
            self._shown = []

    def left(self) -> list[Tensor]:
        """What is registered now."""
        return left_by_user(self._places, self._shown, self.tp_params, self._store.layout)

    def write_grads(self, full: Sequence[Tensor | None]) -> None:
        """None were shown."""

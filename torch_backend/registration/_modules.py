"""Code shared by the registrars: register parameters, shadow attributes, adopt parameters that the user replaced."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from crossframe.layout import Layout
from torch_backend.memory._optimizer_steps import count_like
from torch_backend.memory._reshard_group import GroupShard
from torch_backend.memory._store import ShardStore, copy_into
from torch_backend.mesh._tensor_parallel import Wholes, as_params, in_use
from torch_backend.modules._owned_params import OwnedParam

# A parameter's index in the layout, and a module and attribute under which it is registered.
Registration = tuple[int, nn.Module, str]


def registrations(owned: Sequence[OwnedParam]) -> Iterator[Registration]:
    """Every place of every parameter; a shared parameter has several."""
    for i, entry in enumerate(owned):
        for module, attribute in entry.registrations:
            yield i, module, attribute


def shadow(where: Sequence[Registration], aliases: Sequence[Tensor]) -> None:
    """Let attributes yield `aliases`, whatever is registered under them."""
    for i, module, attribute in where:
        module.__dict__[attribute] = aliases[i]


def unshadow(where: Sequence[Registration]) -> None:
    """Let attributes yield what is registered."""
    for _, module, attribute in where:
        module.__dict__.pop(attribute, None)


def register(where: Sequence[Registration], params: Sequence[nn.Parameter]) -> None:
    """Register `params`, one a parameter of the layout, under all its names."""
    for i, owner, attribute in where:
        owner._parameters[attribute] = params[i]


def left_by_user(
    where: Sequence[Registration], shown: Sequence[nn.Parameter], wholes: Wholes, layout: Layout
) -> list[Tensor]:
    """The data that a user who was shown `shown` has left there: what replaced a parameter under any of its names counts, what
    deleted one does not. Of DTensors, this rank's parts."""
    current = list(shown)
    for i, owner, attribute in where:
        registered = owner._parameters.get(attribute)
        if registered is not None and registered is not shown[i]:
            current[i] = registered
    if not wholes:
        return [param.data for param in current]
    return [
        param.data if whole is None else whole.local(param, spec.name).detach()
        for param, whole, spec in zip(current, wholes, layout.params, strict=True)
    ]


def adopt_data(param: nn.Parameter, piece: Tensor, name: str, rank: int) -> None:
    """Copy in what the user put in place of `piece`, in the piece's shape, and let the parameter alias the piece again."""
    if param.data_ptr() != piece.data_ptr():  # both are 0 where there are no elements
        copy_into(piece, param.data, name, rank, tuple(piece.shape))
        param.data = piece


def full_params(full: Sequence[Tensor], leaves: Sequence[nn.Parameter], wholes: Wholes) -> list[nn.Parameter]:
    """Parameters for a user to see: full values, trained or frozen as the leaves are."""
    return as_params(full, [leaf.requires_grad for leaf in leaves], wholes)


def add_grad_to(param: nn.Parameter, grad: Tensor) -> None:
    """Accumulate a reduced gradient of the parameter's shape, in the parameter's dtype or a lower one."""
    if param.grad is None:
        set_grad(param, grad)
    else:
        param.grad.add_(grad)
    call_grad_hooks(param)


def point_at(param: nn.Parameter, data: Tensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Give a parameter other data, of another dtype or elsewhere, and its gradient, to which `fn` is applied."""
    grad = param.grad
    param.grad = None
    param.data = data
    set_grad(param, None if grad is None else fn(grad))


def set_grad(param: nn.Parameter, grad: Tensor | None) -> None:
    """Let a parameter have a gradient, which torch wants to be of its dtype when it is first assigned."""
    if grad is None or grad.dtype == param.dtype:
        param.grad = grad
    else:
        param.grad = torch.empty_like(param)
        param.grad.data = grad


def has_grad_hooks(param: nn.Parameter) -> bool:
    """Whether anything is to be called once a gradient has been accumulated."""
    return bool(getattr(param, "_post_accumulate_grad_hooks", None)) or hasattr(param, "_in_backward_optimizers")


def call_grad_hooks(param: nn.Parameter) -> None:
    """Call what the user wants called once a gradient has been accumulated (an optimizer in the backward): it waits for the
    reduced gradient, not for autograd's."""
    if param._post_accumulate_grad_hooks:
        for hook in param._post_accumulate_grad_hooks.values():
            hook(param)
    if "_in_backward_optimizers" in param.__dict__:  # torch.distributed.optim left them there
        for optimizer in param._in_backward_optimizers:  # type: ignore[attr-defined]
            optimizer.step()
            optimizer.zero_grad()


def sync_requires_grad(param: nn.Parameter, leaves: Sequence[nn.Parameter]) -> None:
    """Let leaves require a gradient where the user's parameter does."""
    for leaf in leaves:
        if leaf.requires_grad != param.requires_grad:
            leaf.requires_grad_(param.requires_grad)


class RegisteredParams:
    """The part that both faces with a parameter of their own for each original one share: sharded, `params` are registered,
    unsharded, the leaves.

    Attributes:
        params: what the optimizer holds, in the layout's order.
        wholes: see Registrar.
    """

    def __init__(
        self,
        owned: Sequence[OwnedParam],
        store: ShardStore,
        leaves: list[nn.Parameter],
        params: list[nn.Parameter],
        wholes: Wholes = (),
    ) -> None:
        self._store, self.params, self.wholes = store, params, wholes
        self._places = list(registrations(owned))
        self._in_use = False
        self.take_leaves(leaves)

    def take_leaves(self, leaves: list[nn.Parameter]) -> None:
        """Full parameters are these from now on; under tensor parallelism DTensors of them are registered."""
        self._leaves = self._full = leaves
        if self.wholes:
            self._full = [
                leaf if whole is None else whole.registered(leaf)
                for leaf, whole in zip(leaves, self.wholes, strict=True)
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
        return in_use(aliases, self.wholes)

    def use(self, used: Sequence[Tensor]) -> None:
        """Attributes yield `used`."""
        self._in_use = True
        shadow(self._places, used)

    def unuse(self) -> None:
        """Attributes yield what is registered."""
        self._in_use = False
        unshadow(self._places)

    def sync_requires_grad(self) -> None:
        """One by one."""
        for param, leaf in zip(self.params, self._leaves, strict=True):
            if leaf.requires_grad is not param.requires_grad:
                leaf.requires_grad_(param.requires_grad)
        if self.wholes:
            for param, full in zip(self.params, self._full, strict=True):
                full.requires_grad_(param.requires_grad)

    def show_state(self, params: Sequence[nn.Parameter]) -> None:
        """Register these in the place of the sharded parameters."""
        register(self._places, params)

    def hide_state(self) -> None:
        """Register the sharded parameters again."""
        register(self._places, self.params)

    def show_part(self, part: GroupShard) -> None:
        """What is sharded over all ranks stays registered."""

    def deregister(self) -> None:
        """None of them is registered."""
        for _, owner, attribute in self._places:
            owner._parameters.pop(attribute, None)

    def managed(self) -> list[nn.Parameter]:
        """All of them."""
        return self.params

    def registered_params(self) -> list[nn.Parameter]:
        """What is registered for each parameter, by the last of its names."""
        found = dict(enumerate(self.params))
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            found[i] = found[i] if registered is None else registered
        return list(found.values())

    def put_back(self) -> dict[int, nn.Parameter]:
        """Register ours again where a user registered other objects, and return these by index, as they are."""
        others: dict[int, nn.Parameter] = {}
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            if registered is not None and registered is not self.params[i]:
                others[i] = registered
                owner._parameters[attribute] = self.params[i]
        return others

    def put_in(self, others: Mapping[int, nn.Parameter]) -> None:
        """Register these where ours are."""
        for i, owner, attribute in self._places:
            if i in others:
                owner._parameters[attribute] = others[i]

    def _take_back_places(self, check: Callable[[int, nn.Parameter], None]) -> None:
        """Where load_state_dict(assign=True) or a user registered another object, take its data over and register ours again,
        whose identity is kept (R25).

        Args:
            check: given a parameter's index and the other object, raises if it will not do.
        """
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            if registered is not None and registered is not self.params[i]:
                check(i, registered)
                self._take_over(self.params[i], registered)
                owner._parameters[attribute] = self.params[i]

    def _take_new_objects(self, check: Callable[[int, nn.Parameter], None]) -> None:
        """Where a user registered another object, that is the parameter from now on: the optimizer that is made next holds it.

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
    """What FSDP2's registrars share, whatever the type of a sharded parameter."""

    conceals_after_forward = False
    _shown: Sequence[nn.Parameter] = ()

    def summon(self, full: Sequence[Tensor], grads: Sequence[Tensor | None] | None) -> None:
        """Register full parameters."""
        assert grads is None, "no interface asks for them"
        self._shown = full_params(full, self._leaves, self.wholes)
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
        return left_by_user(self._places, self._shown, self.wholes, self._store.layout)

    def write_grads(self, full: Sequence[Tensor | None]) -> None:
        """None were shown."""

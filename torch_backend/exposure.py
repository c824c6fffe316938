"""What a unit's module shows when: the only place where the two interfaces differ in what is registered.

Three exposures, one a face and mode:

- `FlatExposure`: FSDP1 without original parameters. The module has one `FlatParameter`, which is the shard.
- `OriginalExposure`: FSDP1 with them. The user's own parameters stay registered; sharded, each is the piece held here.
- `DTensorExposure`: FSDP2. Sharded, a DTensor parameter; unsharded, the full leaf.

While a unit computes, module attributes yield what it computes with, aliases of the full leaves (see [Note: anchors] in
anchor.py). They are put into the instances' `__dict__`, which attribute lookup reads before `_parameters`, so that what is
registered is another matter: the full leaves, but for a flat parameter.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from crossframe.errors import ParamError
from torch_backend.slots import OwnedParam
from torch_backend.store import ShardStore


class FlatParameter(nn.Parameter):
    """The shard of a unit's flattened parameters, as the one parameter that user and optimizer see."""


FLAT_PARAM = "_flat_param"


class Exposure(Protocol):
    """What an engine asks of a face, for one bucket."""

    # Whether the module shows the shards again at the end of a forward after which full memory is kept.
    conceals_after_forward: bool

    def show_full(self) -> None:
        """Full parameters are registered."""
        ...

    def show_sharded(self) -> None:
        """What is sharded is registered, and attributes yield it."""
        ...

    def use(self, aliases: Sequence[Tensor]) -> None:
        """Attributes yield `aliases`, in the layout's order."""
        ...

    def unuse(self) -> None:
        """Attributes yield what is registered."""
        ...

    def summon(self) -> None:
        """Register full parameters under the original names, for the user."""
        ...

    def dismiss(self) -> list[Tensor]:
        """End `summon`. Returns what the user left as full parameters, in the layout's order."""
        ...

    def adopt(self) -> None:
        """Take over data that the user put in the place of a sharded parameter's (R25)."""
        ...

    def add_grad(self, shard: Tensor) -> None:
        """Accumulate a reduced gradient, of shape (padded_shard_numel,), into what the optimizer reads."""
        ...

    def grads(self) -> list[Tensor | None]:
        """The reduced gradient of each parameter's piece, 1-D, in the layout's order; None where there is none."""
        ...

    def sync_requires_grad(self) -> None:
        """Let the leaves require a gradient where the user's parameters do."""
        ...

    @property
    def version(self) -> int:
        """Grows whenever an optimizer or a user writes in place into a sharded parameter (though not by `.data`)."""
        ...


def _registrations(owned: Sequence[OwnedParam]) -> Iterator[tuple[int, nn.Module, str]]:
    for i, entry in enumerate(owned):
        for module, attribute in entry.registrations:
            yield i, module, attribute


def _shadow(places: Sequence[tuple[int, nn.Module, str]], aliases: Sequence[Tensor]) -> None:
    for i, module, attribute in places:
        module.__dict__[attribute] = aliases[i]


def _unshadow(places: Sequence[tuple[int, nn.Module, str]]) -> None:
    for _, module, attribute in places:
        module.__dict__.pop(attribute, None)


class FlatExposure:
    """One flat parameter. While the unit is not in use, attributes yield NaN in the parameters' shapes and dtypes: code may
    ask a parameter for these at any time, and what reads values that are not here notices."""

    conceals_after_forward = True

    def __init__(self, module: nn.Module, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter]):
        self._module, self._store, self._leaves = module, store, leaves
        self._places = list(_registrations(owned))
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
        _shadow(self._places, aliases)

    def unuse(self) -> None:
        """Attributes yield NaN."""
        _shadow(self._places, self._absent)

    def summon(self) -> None:
        """The leaves become parameters, and the flat parameter none."""
        del self._module._parameters[FLAT_PARAM]
        _unshadow(self._places)
        for i, owner, attribute in self._places:
            owner._parameters[attribute] = self._leaves[i]

    def dismiss(self) -> list[Tensor]:
        """Back to the flat parameter."""
        current = _left_by_user(self._places, self._leaves)
        for _, owner, attribute in self._places:
            owner._parameters.pop(attribute, None)
        self._module._parameters[FLAT_PARAM] = self.flat_param
        self.unuse()
        return current

    def adopt(self) -> None:
        """The flat parameter may have been moved or assigned."""
        _adopt(self.flat_param, self._store.buffer, "the flat parameter")

    def add_grad(self, shard: Tensor) -> None:
        """The gradient of the flat parameter is the whole reduced shard."""
        _add_grad(self.flat_param, shard)

    def grads(self) -> list[Tensor | None]:
        """Parts of the flat parameter's gradient."""
        grad = self.flat_param.grad
        return [None] * len(self._leaves) if grad is None else list(self._store.split(grad))

    def sync_requires_grad(self) -> None:
        """The flat parameter speaks for all."""
        _sync(self.flat_param, self._leaves)

    @property
    def version(self) -> int:
        """The flat parameter's."""
        return self.flat_param._version


class OriginalExposure:
    """The user's own parameter objects, kept for good: sharded, each is a 1-D view of the piece held here."""

    conceals_after_forward = True

    def __init__(self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter]):
        self._store, self._leaves = store, leaves
        self._places = list(_registrations(owned))
        self.params = [entry.param for entry in owned]
        self._hidden_grads: list[Tensor | None] = []
        self._point_at_pieces()

    def _point_at_pieces(self) -> None:
        for param, piece in zip(self.params, self._store.pieces, strict=True):
            param.data = piece

    def show_full(self) -> None:
        """Register the leaves."""
        _register(self._places, self._leaves)

    def show_sharded(self) -> None:
        """Register the user's parameters."""
        self.unuse()
        _register(self._places, self.params)

    def use(self, aliases: Sequence[Tensor]) -> None:
        """Attributes yield `aliases`."""
        _shadow(self._places, aliases)

    def unuse(self) -> None:
        """Attributes yield what is registered."""
        _unshadow(self._places)

    def summon(self) -> None:
        """The user's parameters hold the full values; gradients of pieces are put away meanwhile."""
        self._hidden_grads = [param.grad for param in self.params]
        for param, leaf in zip(self.params, self._leaves, strict=True):
            param.grad = None
            param.data = leaf.data

    def dismiss(self) -> list[Tensor]:
        """The user's parameters are pieces again, with their gradients, and are registered, whatever was put there."""
        current = _left_by_user(self._places, self.params)
        _register(self._places, self.params)
        self._point_at_pieces()
        for param, grad in zip(self.params, self._hidden_grads, strict=True):
            param.grad = grad
        self._hidden_grads = []
        return current

    def adopt(self) -> None:
        """Any of the parameters may have been moved or assigned, or replaced by another object."""
        store = self._store
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            if registered is not None and registered is not self.params[i]:
                # load_state_dict(assign=True) put another object here; the user's own keeps its identity (R25).
                self.params[i].data = registered.data
                owner._parameters[attribute] = self.params[i]
        for i, param in enumerate(self.params):
            _adopt(param, store.pieces[i], repr(store.layout.params[i].name))

    def add_grad(self, shard: Tensor) -> None:
        """Each piece gets its part of the reduced shard; a parameter without a piece here gets none."""
        for param, part in zip(self.params, self._store.split(shard), strict=True):
            if part.numel() and param.requires_grad:
                _add_grad(param, part)

    def grads(self) -> list[Tensor | None]:
        """The gradients of the user's parameters."""
        return [param.grad for param in self.params]

    def sync_requires_grad(self) -> None:
        """One by one."""
        for param, leaf in zip(self.params, self._leaves, strict=True):
            _sync(param, (leaf,))

    @property
    def version(self) -> int:
        """All of theirs: assigning `.data` leaves each parameter its own counter."""
        return sum(param._version for param in self.params)


class DTensorExposure:
    """DTensor parameters while sharded, the leaves themselves while unsharded, both truly registered."""

    conceals_after_forward = False

    def __init__(
        self, owned: Sequence[OwnedParam], store: ShardStore, leaves: list[nn.Parameter], mesh: DeviceMesh, rank: int
    ):
        self._store, self._leaves = store, leaves
        self._places = list(_registrations(owned))
        self._local_shapes = [store.layout.shard_shape(i, rank) for i in range(len(owned))]  # type: ignore[attr-defined]
        self._specs = [
            DTensorSpec(mesh, (Shard(0),), TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)) for leaf in leaves
        ]
        self.params = [
            nn.Parameter(self._dtensor(i, piece), requires_grad=owned[i].spec.requires_grad)
            for i, piece in enumerate(store.pieces)
        ]
        self.show_sharded()

    def _dtensor(self, i: int, piece: Tensor) -> DTensor:
        """Parameter i (or its gradient) from the elements that this rank holds of it; they are aliased, not copied."""
        return DTensor(piece.view(self._local_shapes[i]), self._specs[i], requires_grad=False)  # type: ignore[call-arg]

    def show_full(self) -> None:
        """Register the leaves."""
        _register(self._places, self._leaves)

    def show_sharded(self) -> None:
        """Register the DTensor parameters."""
        self.unuse()
        _register(self._places, self.params)

    def use(self, aliases: Sequence[Tensor]) -> None:
        """Attributes yield `aliases`."""
        _shadow(self._places, aliases)

    def unuse(self) -> None:
        """Attributes yield what is registered."""
        _unshadow(self._places)

    def summon(self) -> None:
        """Register the leaves."""
        _register(self._places, self._leaves)

    def dismiss(self) -> list[Tensor]:
        """Register the DTensor parameters again."""
        current = _left_by_user(self._places, self._leaves)
        _register(self._places, self.params)
        return current

    def adopt(self) -> None:
        """Local tensors may have been moved or assigned, or parameters replaced by other objects."""
        for i, owner, attribute in self._places:
            registered = owner._parameters.get(attribute)
            if registered is not None and registered is not self.params[i]:
                name = self._store.layout.params[i].name
                if not isinstance(registered, DTensor):
                    raise ParamError(
                        f"parameter {name!r} was replaced by a {type(registered).__name__}; expected a DTensor sharded "
                        "on dim 0 of the same mesh (use distribute_tensor), or copy into the parameter"
                    )
                self.params[i].data = registered.data
                owner._parameters[attribute] = self.params[i]
        for i, param in enumerate(self.params):
            local = param._local_tensor  # type: ignore[attr-defined]
            piece = self._store.pieces[i]
            if local.data_ptr() != piece.data_ptr() and piece.numel():
                _copy_into(piece, local, repr(self._store.layout.params[i].name), self._local_shapes[i])
                param.data = self._dtensor(i, piece)

    def add_grad(self, shard: Tensor) -> None:
        """Each parameter's gradient is a DTensor over its part of the reduced shard."""
        for i, (param, part) in enumerate(zip(self.params, self._store.split(shard), strict=True)):
            if param.requires_grad:
                if param.grad is None:
                    param.grad = self._dtensor(i, part)
                else:
                    param.grad._local_tensor.add_(part.view(self._local_shapes[i]))  # type: ignore[attr-defined]
                # The user's hooks (an optimizer in the backward) wait for the reduced gradient, not for autograd's.
                for hook in (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values():
                    hook(param)

    def grads(self) -> list[Tensor | None]:
        """The local tensors of the DTensor gradients."""
        return [None if p.grad is None else p.grad._local_tensor.flatten() for p in self.params]  # type: ignore[attr-defined]

    def sync_requires_grad(self) -> None:
        """One by one."""
        for param, leaf in zip(self.params, self._leaves, strict=True):
            _sync(param, (leaf,))

    @property
    def version(self) -> int:
        """All of their local tensors'."""
        # An optimizer may bump the one or the other.
        return sum(param._version + param._local_tensor._version for param in self.params)  # type: ignore[attr-defined]


def _register(places: Sequence[tuple[int, nn.Module, str]], params: Sequence[nn.Parameter]) -> None:
    for i, owner, attribute in places:
        owner._parameters[attribute] = params[i]


def _left_by_user(places: Sequence[tuple[int, nn.Module, str]], shown: Sequence[nn.Parameter]) -> list[Tensor]:
    """The data that a user who was shown `shown` left behind: what replaced a parameter under any of its names counts, what
    deleted one does not."""
    current = [param.data for param in shown]
    for i, owner, attribute in places:
        registered = owner._parameters.get(attribute)
        if registered is not None and registered is not shown[i]:
            current[i] = registered.data
    return current


def _adopt(param: nn.Parameter, piece: Tensor, name: str) -> None:
    """Copy in what the user put in place of `piece`, and let the parameter alias the piece again."""
    if param.data_ptr() != piece.data_ptr() and piece.numel():
        _copy_into(piece, param.data, name, tuple(piece.shape))
        param.data = piece


def _copy_into(piece: Tensor, value: Tensor, name: str, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ParamError(
            f"parameter {name}: its data was replaced outside summon_full_params; expected this rank's sharded shape "
            f"{shape}, got {tuple(value.shape)}; replace full values inside the context"
        )
    if value.dtype != piece.dtype or value.device != piece.device:
        raise ParamError(
            f"parameter {name}: expected {piece.dtype} on {piece.device}, as it was sharded, got {value.dtype} on "
            f"{value.device}; convert or move the module before sharding it"
        )
    with torch.no_grad():
        piece.view(shape).copy_(value)


def _add_grad(param: nn.Parameter, grad: Tensor) -> None:
    if param.grad is None:
        param.grad = grad
    else:
        param.grad.add_(grad)


def _sync(param: nn.Parameter, leaves: Sequence[nn.Parameter]) -> None:
    for leaf in leaves:
        if leaf.requires_grad != param.requires_grad:
            leaf.requires_grad_(param.requires_grad)

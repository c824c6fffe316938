"""DTensorRegistrar: FSDP2 with the per-parameter layout. Sharded parameters are DTensors."""

import functools
import itertools
from collections.abc import Callable, Sequence, Set
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from crossframe.errors import ReplacedError
from crossframe.layout import PerParamLayout
from torch_backend.compat._composable import replaced_by_replicate
from torch_backend.memory._gather import with_own_storage
from torch_backend.memory._reshard_group import ReshardGroupShard
from torch_backend.memory._store import ShardStore
from torch_backend.mesh._device_mesh import has_same_ranks
from torch_backend.mesh._placement import Placed
from torch_backend.modules._owned_params import OwnedParam
from torch_backend.param_registration._registered_params import (
    ShardedParams,
    call_grad_hooks,
    register,
)

# The method of tensors that take part in their all-gather, as an endless argument of `map`.
_EXTENDED = itertools.repeat("fsdp_pre_all_gather")


class DTensorRegistrar(ShardedParams):
    """Registers DTensors while sharded, and the leaves (DTensors of them under tensor parallelism) while unsharded."""

    def __init__(
        self,
        owned: Sequence[OwnedParam],
        store: ShardStore,
        leaves: list[nn.Parameter],
        placed: Sequence[Placed],
    ) -> None:
        """
        Args:
            placed: the placement of each parameter.
        """
        layout = store.layout
        assert isinstance(layout, PerParamLayout)
        self._local_shapes = _local_shapes(layout, store.rank)
        self._widths = [column.width for column in layout.columns]
        self._specs = [place.sharded for place in placed]
        is_whole = any(place.tp_param is not None for place in placed)
        super().__init__(owned, store, leaves, [], [place.tp_param for place in placed] if is_whole else [])
        locals_ = self._own_locals()
        self._local_strides = [local.stride() for local in locals_]
        with torch.no_grad():
            self.params = [
                _parameter(local, spec, entry.spec.requires_grad)
                for local, spec, entry in zip(locals_, self._specs, owned, strict=True)
            ]
        register(self._places, self.params)

    def _locals(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """This rank's local tensor of each parameter."""
        return [
            piece if piece.shape == shape else piece.view(shape)
            for piece, shape in zip(pieces, self._local_shapes, strict=True)
        ]

    def _own_locals(self) -> list[Tensor]:
        """This rank's local tensor of each parameter, on the device of the shard."""
        made = [with_own_storage(local) for local in self._locals(self._store.pieces)]
        self._known = [_address(local) for local in made]
        return made

    def used_params(self, aliases: Sequence[Tensor]) -> Sequence[Tensor]:
        """The aliases, under tensor parallelism as DTensors."""
        used = super().used_params(aliases)
        for each in used:
            each._is_param = True  # type: ignore[attr-defined]  # what a module looks up is an nn.Parameter
        return used

    def show_group_shard(self, group_shard: ReshardGroupShard) -> None:
        """Register DTensors over the reshard group; under tensor parallelism the shards stay registered."""
        mesh, layout = group_shard.mesh, group_shard.layout
        if self.tp_params or not isinstance(layout, PerParamLayout):
            return
        rank, shown = group_shard.communicator.rank, []
        with torch.no_grad():
            for i, (piece, leaf) in enumerate(zip(group_shard.pieces, self._leaves, strict=True)):
                placements = (Replicate(), Shard(layout.shard_dims[i]))
                local = piece.view(layout.shard_shape(i, rank))
                meta = TensorMeta(leaf.shape, leaf.stride(), leaf.dtype)
                shown.append(_parameter(local, DTensorSpec(mesh, placements, meta), self.params[i].requires_grad))
        register(self._places, shown)

    def adopt(self) -> bool:
        """Adopt local tensors that were moved or assigned, and parameters that were replaced."""
        self._take_new_objects(self._check_dtensor)
        return self._adopt_locals()

    def adopt_loaded(self) -> None:
        """Copy the data of parameters that load_state_dict(assign=True) registered, and register ours again, since an optimizer
        may have them."""
        self._take_back_places(self._check_dtensor)
        self._adopt_locals()

    def _adopt_locals(self) -> bool:
        # Almost always nothing was moved or assigned, and this is asked at each all-gather.
        current = [param._local_tensor for param in self.params]  # type: ignore[attr-defined]
        if list(map(Tensor.data_ptr, current)) == self._known and not any(map(hasattr, current, _EXTENDED)):
            return False
        writes = False
        for i, (param, known) in enumerate(zip(self.params, self._known, strict=True)):
            local = param._local_tensor  # type: ignore[attr-defined]
            if hasattr(local, next(_EXTENDED)):
                self._store.check_extended(i)
            # The tensor itself, or another of the same memory.
            if local.data_ptr() != known and not self._store.holds(i, local):
                self._store.take(i, local, self._local_shapes[i])
                param._local_tensor = self._own_locals()[i]  # type: ignore[attr-defined]
                writes = True
        return writes

    def _take_over(self, param: nn.Parameter, other: nn.Parameter) -> None:
        # A DTensor's data is the tensor that it wraps.
        param._local_tensor = other._local_tensor.detach()  # type: ignore[attr-defined]
        param.grad = other.grad

    def _check_dtensor(self, i: int, other: nn.Parameter) -> None:
        name = self._store.layout.params[i].name
        if not isinstance(other, DTensor):
            raise ReplacedError(
                f"parameter {name!r} was replaced by a {type(other).__name__}; expected a DTensor of placements "
                f"{self._specs[i].placements} on the same mesh (use distribute_tensor), or copy into the parameter"
                f"{replaced_by_replicate(next(owner for at, owner, _ in self._places if at == i))}"
            )
        if other._spec.placements != self._specs[i].placements:
            raise ReplacedError(
                f"parameter {name!r} was replaced by a DTensor of placements {other._spec.placements}, expected "
                f"{self._specs[i].placements}; redistribute it first"
            )
        found, expected = other._spec.mesh, self._specs[i].mesh
        if not has_same_ranks(found, expected):
            raise ReplacedError(
                f"parameter {name!r} was replaced by a DTensor on {found} of ranks {found.mesh.tolist()}, expected {expected} of "
                f"ranks {expected.mesh.tolist()}; distribute it on the parameter's device_mesh, or copy its full_tensor() into "
                "the parameter"
            )

    def add_grad(self, shard: Tensor, reduced: Sequence[int], unused: Set[int]) -> None:
        """Set each parameter's gradient to a DTensor of its part of the reduced shard."""
        params, shapes, strides, specs = self.params, self._local_shapes, self._local_strides, self._specs
        new, start = DTensor.__new__, shard.storage_offset()
        for i in reduced:
            param = params[i]
            if i not in unused and param.requires_grad:
                # One view, where a column, what of it is no padding, and that in its shape would be three.
                part = shard.as_strided(shapes[i], strides[i], start)
                grad = param.grad
                if grad is None:
                    param.grad = new(DTensor, part, specs[i], requires_grad=False)
                else:
                    grad._local_tensor.add_(part)  # type: ignore[attr-defined]
                call_grad_hooks(param)
            start += self._widths[i]

    def grads(self) -> list[Tensor | None]:
        """The local tensors of the DTensor gradients."""
        return [None if p.grad is None else p.grad._local_tensor.flatten() for p in self.params]  # type: ignore[attr-defined]

    def follow(self, leaves: list[nn.Parameter], fn: Callable[[Tensor], Tensor]) -> None:
        """Set each parameter's local tensor to its piece of the new buffer."""
        self.take_leaves(leaves)
        dtype = self._store.buffer.dtype
        for i, (param, local) in enumerate(zip(self.params, self._own_locals(), strict=True)):
            meta = self._specs[i].tensor_meta
            assert meta is not None
            self._specs[i] = replace(self._specs[i], tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))
            if param.is_meta != local.is_meta:  # one object cannot change between meta and real
                with torch.no_grad():
                    self.params[i] = _parameter(local, self._specs[i], param.requires_grad)
                continue
            grad, param.grad = param.grad, None
            param.data = _dtensor(local, self._specs[i])
            param._local_tensor, param._spec = local, self._specs[i]  # type: ignore[attr-defined]
            param.grad = None if grad is None else _dtensor(fn(grad._local_tensor), self._specs[i])  # type: ignore[attr-defined]
        register(self._places, self.params)

    def whole_grads(self) -> list[Tensor]:
        """The local tensors of the DTensor gradients."""
        return [param.grad._local_tensor for param in self.params if param.grad is not None]  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=64)
def _local_shapes(layout: PerParamLayout, rank: int) -> Sequence[torch.Size]:
    """The local shape of each parameter on a rank."""
    return [torch.Size(layout.shard_shape(i, rank)) for i in range(len(layout.params))]


def _dtensor(local: Tensor, spec: DTensorSpec, requires_grad: bool = False) -> DTensor:
    """A DTensor that aliases a local tensor."""
    # Skips __init__, which does nothing but has an expensive wrapper.
    return DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)


def _address(local: Tensor) -> int:
    """The data pointer of a tensor; None for a subclass that wraps several tensors."""
    return local.data_ptr() if type(local) is Tensor else -1


def _parameter(local: Tensor, spec: DTensorSpec, requires_grad: bool) -> nn.Parameter:
    """Convert to a parameter under no_grad; nn.Parameter of a DTensor returns the same object."""
    param = _dtensor(local.detach(), spec, requires_grad)
    param._is_param = True  # type: ignore[attr-defined]
    return param  # type: ignore[return-value]

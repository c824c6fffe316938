"""Parameters that are tensor subclasses with hooks around the all-gather."""

# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportPrivateImportUsage=false

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tests.on_torch.fsdp2.scripts import refusal, scenario
from tests.on_torch.helpers.device import DEVICE
from tests.on_torch.helpers.fsdp2_models import Both, asked, given, linears, look
from tests.on_torch.helpers.scripts import Side, grads, inputs


class Rounded(Tensor):
    """A tensor that is gathered as int8, with the largest absolute value of each shard as its scale."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts, meta, outer_size, outer_stride):
        return Rounded(parts["inner"])

    def __repr__(self):
        return f"Rounded({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        done = func(
            *tree_map_only(Rounded, lambda t: t.inner, args), **tree_map_only(Rounded, lambda t: t.inner, kwargs or {})
        )
        if func.__name__.split(".")[0].endswith("_") and isinstance(args[0], Rounded):
            return args[0]
        return tree_map_only(Tensor, Rounded, done)

    def fsdp_pre_all_gather(self, mesh):
        """The old signature, whose only argument is the mesh."""
        largest = self.inner.abs().max().view(1)
        return ((self.inner / largest * 127).round().to(torch.int8), largest), self.inner.shape[0]

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Scales the rows of each shard."""
        small, largest = all_gather_outputs
        full = small.to(param_dtype) * largest.to(param_dtype).repeat_interleave(metadata).view(-1, 1) / 127
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full)
            return None
        return full, (full,)


def _of_a_subclass(side: Side, wrap: Callable[[Tensor], Tensor], widths: tuple[int, ...], **options: Any) -> list[Any]:
    asked.clear(), given.clear()
    model = linears(*widths)
    for layer in model:
        layer.weight = nn.Parameter(wrap(layer.weight.detach()))
        side.fully_shard(layer, **options)
    side.fully_shard(model, **options)
    results = []
    for step in range(2):
        loss = model(inputs(side, step, widths[0])).float().square().mean()
        loss.backward()
        results += [loss.detach(), [g.to_local() for g in grads(model)], look(model)]
    return [results, asked, given]


@scenario()
def a_subclass_of_two_tensors(side):
    return _of_a_subclass(side, lambda w: Both(w, w / 2), (4, 6, 2))


@scenario()
def a_subclass_of_two_tensors_in_low_precision(side):
    policy = side.MixedPrecisionPolicy(param_dtype=torch.bfloat16)

    return _of_a_subclass(side, lambda w: Rounded(w), (4, 6, 2), mp_policy=policy)


@scenario()
def a_subclass_that_travels_as_int8(side):
    return _of_a_subclass(side, Rounded, (4, 6, 2))


class Eighths(Rounded):
    """A tensor that is gathered as float8, which gloo does not know."""

    @staticmethod
    def __tensor_unflatten__(parts, meta, outer_size, outer_stride):
        return Eighths(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        done = super().__torch_dispatch__(func, types, args, kwargs)
        return tree_map_only(Rounded, lambda t: t if isinstance(t, Eighths) else Eighths(t.inner), done)

    def fsdp_pre_all_gather(self, mesh):
        """One tensor of one byte an element."""
        return (self.inner.to(torch.float8_e4m3fn),), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Widens it."""
        full = all_gather_outputs[0].to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(full)
            return None
        return full, (full,)


@scenario()
def a_subclass_that_travels_as_float8(side):
    return _of_a_subclass(side, Eighths, (4, 6, 2))


class Padded(Rounded):
    """A tensor that pads its rows to the number of the first rank, since all ranks must send equal sizes."""

    @staticmethod
    def __tensor_unflatten__(parts, meta, outer_size, outer_stride):
        return Padded(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        done = super().__torch_dispatch__(func, types, args, kwargs)
        return tree_map_only(Rounded, lambda t: t if isinstance(t, Padded) else Padded(t.inner), done)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Pads with rows of NaN."""
        asked.append(tuple(outer_size))
        padded = self.inner.new_full((-(-outer_size[0] // mesh.size()), *outer_size[1:]), math.nan)
        padded[: self.inner.shape[0]] = self.inner
        return (padded,), None

    def fsdp_post_all_gather(self, all_gather_outputs, metadata, param_dtype, *, out=None):
        """Returns the gathered tensor with its padding."""
        (full,) = all_gather_outputs
        given.append([tuple(full.shape), None if out is None else tuple(out.shape)])
        return None if out is not None else (full, (full,))


@scenario()
def a_subclass_whose_rows_are_uneven(side):
    return _of_a_subclass(side, Padded, (4, 5, 3))


@scenario(num_ranks=4)
def a_subclass_of_fewer_rows_than_ranks(side):
    return _of_a_subclass(side, Padded, (4, 5, 2))


@scenario()
def a_subclass_from_meta(side):
    """The hooks are not called before the first all-gather."""
    asked.clear(), given.clear()
    with torch.device("meta"):
        model = nn.Linear(4, 6, bias=False)
        model.weight = nn.Parameter(Both(model.weight.detach(), model.weight.detach().clone()))
    side.fully_shard(model)
    before = len(asked)
    model.to_empty(device=DEVICE.type)
    with torch.no_grad():
        model.weight.fill_(0.5)
    results = []
    for step in range(2):
        loss = model(inputs(side, step)).square().sum()
        loss.backward()
        results += [loss.detach(), grads(model)[0].to_local()]
    return [before, results, asked, given]


@refusal()
def half_an_extension(side):
    class Half(Rounded):
        """Has only the hook before the all-gather."""

        fsdp_post_all_gather = property()

    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(Half(model.weight.detach()))
    side.fully_shard(model)(inputs(side))

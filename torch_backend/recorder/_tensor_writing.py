"""Passes a rank's tensors to the writer of a recording, as values or as sketches."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crossframe.recording import RecordingWriter, Sketch
from crossframe.recording.event_format import (
    CHANGED,
    COUNT,
    FORWARD,
    INITIAL,
    INPUT,
    PARAMETERS,
    REDUCE,
    STATE,
    TENSOR_USES,
    UPDATE,
)
from crossframe.recording.module_calls import called_module
from torch_backend.compat._dtypes import as_real, to_numpy, torch_dtype
from torch_backend.recorder._model_ranks import Others, full
from torch_backend.recorder._model_view import Held, ModelView
from torch_backend.recorder._module_hooks import Watch
from torch_backend.recorder._module_tree import LARGEST_IN_FULL, inner_modules, named_buffers
from torch_backend.recorder._partition import Pieces as PiecesOfRanks
from torch_backend.recorder._partition import in_forward
from torch_backend.recorder._sketch import sample_of, sketches_of

Pieces = dict[str, tuple[int, int, np.ndarray | Sketch]]


class Keeper:
    """Records one model's tensors.

    Attributes:
        writer: this rank's.
        params: the ids of the model's parameters.
    """

    def __init__(
        self, model: nn.Module, view: ModelView, writer: RecordingWriter, beside: Mapping[str, nn.Module]
    ) -> None:
        self._model, self._view, self.writer, self._beside = model, view, writer, beside
        self.params = {id(held.param) for held in view.held}
        self._grads: dict[str, Pieces] = {}
        self._specs = writer.manifest.params
        self._modules = {name: module for module, name in view.watched.items()}
        # Forward has whole parameters of which ranks have pieces.
        partitions = {held.name: held.partition for held in view.held if held.partition is not None}
        self._partitions = {name: each for name, part in partitions.items() if (each := in_forward(part))}

    def initial(self) -> None:
        """Record the parameters and buffers before the first step."""
        self.buffers(0, INITIAL)
        for unit, held in self._by_unit():
            self.writer.parameters(0, unit, self._pieces(0, PARAMETERS, ((each, each.param) for each in held)))

    def buffers(self, step: int, use: str = CHANGED) -> None:
        """Record buffers after a step, or before the first one. Integers are recorded as float64, and what is large as a
        sketch."""
        found = {}
        for name, buffer in self._buffers():
            value = as_real(full(buffer.detach()))
            value = value if value.is_floating_point() else value.to(torch.float64)
            is_large = value.numel() > LARGEST_IN_FULL
            kept = sketches_of([value])[0] if is_large else self._whole(value)
            found.setdefault(name, (kept, tuple(value.shape)))
        self.writer.buffers(step, found, use)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The buffers of the model, and all tensors of the modules beside it."""
        for name, buffer in named_buffers(self._model):
            yield self._view.own_name(name), buffer
        for name, module in self._beside.items():
            for inner, tensor in named_buffers(module, without=inner_modules(self._model), params=True):
                yield f"{name}.{inner}", tensor

    def keep_grads(self, step: int, scale: float, only: Set[int] | None) -> set[int]:
        """Keep the current gradients for `reduced_grads`. Returns the ids of the parameters that have any.

        Args:
            scale: the divisor of the gradients.
            only: the ids of the parameters; None: all.
        """
        found: set[int] = set()
        for unit, held in self._by_unit():
            held = held if only is None else [each for each in held if id(each.param) in only]
            grads = [
                (each, grad) for each in held if (grad := _complete(each, {"": each.param.grad}).get("")) is not None
            ]
            unscaled = ((each, grad if scale == 1.0 else grad / scale) for each, grad in grads)
            pieces = self._pieces(step, REDUCE, unscaled)
            if pieces:
                found.update(id(each.param) for each, _ in grads)
                self._grads.setdefault(unit, {}).update(pieces)
        return found

    def turns(self, forwards: Mapping[int, int]) -> None:
        """State how many forwards were before each parameter's optimizer stepped, by the id of the parameter."""
        held = (each for each in self._view.held if id(each.param) in forwards)
        self.writer.turns({each.name: forwards[id(each.param)] for each in held})

    def reduced_grads(self, step: int) -> None:
        """Record the gradients that were kept."""
        grads, self._grads = self._grads, {}
        for unit, pieces in grads.items():
            self.writer.reduced_grads(step, unit, pieces)

    def unsharded(self, step: int, unit: str, name: str, value: Tensor) -> None:
        """Record an unsharded parameter."""
        self.writer.unsharded(step, unit, {name: self._whole(full(value, self._partitions.get(name)))})

    def batch(self, step: int, tensors: Sequence[Tensor]) -> None:
        """Record a disagreement if the model ranks have different batches. The later stages of a pipeline have none."""
        view = self._view
        if (ranks := view.engine.tensor_ranks) is None:
            return
        others = ranks.fed(tensors)
        if others is not None and view.stage == 0:
            self._disagreement(step, FORWARD, "", "", INPUT, others)

    def activation(self, step: int, microbatch: int, module: str, use: str, value: Tensor, operator: str) -> None:
        """Record the input or output of a module, and the operator that computed it."""
        pipeline = self._view.pipeline
        if pipeline is not None and not module and not pipeline.is_of_model(self._view.stage, use):
            return
        gathered: Tensor | None = value
        if (ranks := self._view.engine.tensor_ranks) is not None:
            of = called_module(module)
            gathered, others = ranks.whole(value, self._modules.get(of), of, use)
            if others is not None:
                self._disagreement(step, FORWARD, "", module, use, others)
        if gathered is not None and self._view.context is not None:
            gathered = self._view.context.whole(gathered)
        if gathered is None:
            return
        value = full(gathered)  # DTensors on a mesh of one rank stay DTensors
        shape = tuple(value.shape)
        self.writer.activation(step, microbatch, module, use, self._whole(value), shape, operator=operator)

    def local_grads(self, step: int, watch: Watch, loss_scale: float, divisors: Mapping[int, float]) -> None:
        """Record the local gradients of a dense step.

        Args:
            loss_scale: the divisor of all of them.
            divisors: what those of some parameters are divided by besides, by the id of the parameter.
        """
        if not self.writer.is_dense(step) or self._view.pipeline is not None or self._view.context is not None:
            return
        scales = {each.name: loss_scale * divisors.get(id(each.param), 1.0) for each in self._view.held}
        for unit, grads in self._of_replica(watch.local_grads()).items():
            found = {}
            for name, grad in grads.items():
                scale = scales.get(name, loss_scale)
                found[name] = self._whole(grad if scale == 1.0 else grad / scale)
            self.writer.local_grads(step, unit, found)

    def after_step(self, step: int, optimizers: Sequence[torch.optim.Optimizer], norm: Tensor | float | None) -> None:
        """Record the gradient norm, parameters and optimizer state at the end of a step."""
        writer = self.writer
        if norm is not None:
            writer.grad_norm(step, float(full(norm) if isinstance(norm, Tensor) else norm))
        counts: dict[str, float] = {}
        for unit, held in self._by_unit():
            # All tensors of a parameter at once, because hashing element indices is the most expensive part.
            slots: dict[str, Pieces] = {}
            for each in held:
                state = next((o.state[each.param] for o in optimizers if each.param in o.state), {})
                state = _complete(each, {k: v for k, v in state.items() if k == COUNT or _is_like(each.param, v)})
                if COUNT in state:
                    counts[each.name] = float(state[COUNT])
                alike = {"": self._stored(each)} | {k: value for k, value in state.items() if k != COUNT}
                here = {slot: each.of(value) for slot, value in alike.items()}
                self._compare(step, each, here)
                values = self._kept(self._numel(each), list(here.values()), each.start)
                for slot, value in zip(alike, values, strict=True):
                    slots.setdefault(slot, {})[each.name] = (each.start, each.stop, value)
            for slot, pieces in slots.items():
                if slot:
                    writer.state(step, unit, slot, pieces)
                else:
                    writer.updated(step, unit, pieces)
        writer.counts(step, counts)

    def _stored(self, held: Held) -> Tensor:
        """A parameter in its dtype. A script may update a wider copy, which it rounds before the next forward."""
        dtype = torch_dtype(self._specs[held.name].dtype)
        is_copy = held.param.is_floating_point() and held.param.dtype != dtype
        return held.param.detach().to(dtype) if is_copy else held.param

    def _of_replica(self, grads: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Local gradients by unit; none if model ranks have other ones, which the loop may add up before the optimizer steps."""
        if (ranks := self._view.engine.model_ranks) is None:
            return grads
        whole = {unit: {name: self._full(name, grad) for name, grad in own.items()} for unit, own in grads.items()}
        return whole if ranks.same({name: grad for own in whole.values() for name, grad in own.items()}) else {}

    def _full(self, name: str, grad: Tensor) -> Tensor:
        """A local gradient. Zeros of a parameter that nothing reached have the full shape."""
        is_part = tuple(grad.shape) != tuple(self._specs[name].shape)
        return full(grad, self._partitions.get(name) if is_part else None)

    def _disagreement(self, step: int, phase: str, unit: str, name: str, use: str, others: Others) -> None:
        difference, ranks, axis = others
        self.writer.disagreement(step, phase, unit, name, use, difference, axis, ranks)

    def _by_unit(self) -> list[tuple[str, list[Held]]]:
        found: dict[str, list[Held]] = {}
        for held in self._view.held:
            if held.gathered or held.stop > held.start:
                found.setdefault(held.unit, []).append(held)
        return list(found.items())

    def _pieces(self, step: int, phase: str, values: Iterable[tuple[Held, Any]]) -> Pieces:
        pieces: Pieces = {}
        for held, value in values:
            here = held.of(value)
            self._compare(step, held, {phase: here})
            kept = self._kept(self._numel(held), [here], held.start)[0]
            if phase == PARAMETERS and isinstance(kept, Sketch):
                kept = replace(kept, sample=sample_of(here, held.start))
            pieces[held.name] = (held.start, held.stop, kept)
        return pieces

    def _compare(self, step: int, held: Held, tensors: Mapping[str, Tensor]) -> None:
        """Record a disagreement if a parameter is not the same on all model ranks.

        Args:
            tensors: by phase, or after a step by the entry of the optimizer state, "" the parameter.
        """
        if (ranks := self._view.engine.model_ranks) is None:
            return
        for key, others in ranks.disagreements(tensors).items():
            phase, use = (key, "") if key in TENSOR_USES else (STATE if key else UPDATE, key)
            self._disagreement(step, phase, held.unit, held.name, use, others)

    def _numel(self, held: Held) -> int:
        return self._specs[held.name].numel

    def _whole(self, value: Tensor) -> np.ndarray | Sketch:
        value = as_real(full(value))
        kept = self._kept(value.numel(), [value], 0)[0]
        return kept.reshape(tuple(value.shape)) if isinstance(kept, np.ndarray) else kept

    def _kept(self, numel: int, tensors: Sequence[Tensor], start: int) -> list[Any]:
        """Convert tensors with equal element ranges to sketches or arrays, by the number of elements of the parameter."""
        # Copies, because memory that a numpy array aliases cannot be freed by resizing, as for unsharded parameters.
        own = [tensor.clone() if tensor.is_cpu else tensor for tensor in tensors]
        if numel > self.writer.manifest.most_in_full:
            return list(sketches_of(own, start))
        return [to_numpy(tensor) for tensor in own]


def _complete(held: Held, own: Mapping[str, Any]) -> dict[str, Any]:
    """The gradient or state of a parameter, by name. Where ranks have pieces of it, also entries that only other ranks have."""
    own = {k: v for k, v in own.items() if v is not None}
    if not isinstance(held.partition, PiecesOfRanks):
        return own
    return held.partition.complete({k: float(v) if k == COUNT else v for k, v in own.items()}, held.param)


def _is_like(param: Tensor, value: Any) -> bool:
    """Whether an optimizer state entry has the parameter's shape."""
    is_tensor = isinstance(value, Tensor) and (value.is_floating_point() or value.dtype.is_complex)
    return is_tensor and value.shape == param.shape

"""Observes forward and backward: batches, activations, unsharded parameters, and a rank's own gradients.

[Note: recomputation] Activation checkpointing runs modules a second time, inside backward. The second run is not recorded.
Gradients are ([Note: gradients that count] in `_local_grads.py`).
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from crossframe.dtypes import FLOATING
from crossframe.recording.event_format import INPUT, OUTPUT
from crossframe.recording.module_calls import next_call
from crossframe.replacing import replacing
from crossframe.trace import Event
from torch_backend.compat._dtypes import as_real, dtype_name
from torch_backend.modules._nested_tensors import arrays_in, tensors_in
from torch_backend.recorder._contexts import in_backward, in_transform, is_differentiated, quietly
from torch_backend.recorder._forwards_in_doubt import Forwards
from torch_backend.recorder._local_grads import LocalGrads
from torch_backend.recorder._model_view import ModelView
from torch_backend.recorder._module_tree import children_of, is_compiled, lacks_forward, named_modules, param_of
from torch_backend.recorder._pipeline import infers_shapes
from torch_backend.recorder._sharding_libraries import DDP, ONE_DEVICE, REPLICAS


class Sink:
    """The callbacks of a `Watch` during a step."""

    def begins(self, inputs: list[Tensor]) -> None:
        """The first forward of a model is about to begin, with these inputs."""

    def forward_begins(self) -> None:
        """A forward begins. Since the last step, the model has run in evaluations alone."""

    def batch(self, tensors: list[Tensor], mask: int | None) -> None:
        """A microbatch begins, with these inputs of forward and the index of the mask among them."""

    def activation(self, microbatch: int, module: str, use: str, value: Tensor, operator: str) -> None:
        """The first floating tensor in the input or output of a module, and the operator that computed it ("": not known)."""

    def unsharded(self, unit: str, name: str, value: Tensor) -> None:
        """An unsharded parameter, as forward reads it."""

    def ends(self, output: Any) -> None:
        """A watched forward has ended."""


class Hook:
    """A module hook that does nothing in copies of the model and in files, and in transforms of torch.func."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    @_disable_dynamo
    def __call__(self, *args: Any) -> None:
        if self._function is not None and not in_transform():
            self._function(*args)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:  # of modules that have a __getstate__ of their own
        return Hook, ()


_IDS_OF_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
"""The dicts of a module whose keys are ids of hooks."""


@contextmanager
def hooks_left_out() -> Iterator[None]:
    """A context in which copies and files of modules have no `Hook`, so that checkpoints of a recorded script load elsewhere, and
    with `weights_only`."""
    own = nn.Module.__dict__.get("__getstate__")

    def state_of(self: nn.Module) -> dict[str, Any]:
        state = dict(self.__dict__) if own is None else own(self)
        held = [name for name in _IDS_OF_HOOKS if name in state]
        ours = {i for name in held for i, hook in state[name].items() if isinstance(hook, Hook)}
        for name in held if ours else ():
            state[name] = OrderedDict((i, each) for i, each in state[name].items() if i not in ours)
        return state

    with replacing(nn.Module, "__getstate__", state_of):
        yield


def mask_in(named: Any, tensors: Sequence[Tensor]) -> int | None:
    """The index among tensors of `attention_mask`, the name of the mask in keyword arguments and batches of language models."""
    mask = named.get("attention_mask") if isinstance(named, Mapping) else None
    return next((i for i, each in enumerate(tensors) if each is mask), None)


def _called(model: nn.Module, *, in_parts: bool) -> list[nn.Module]:
    """The modules that the script may call: the model, and if it lacks a forward or is called in parts, all modules in it that
    have one, except those inside compiled ones."""
    found: dict[nn.Module, None] = {} if lacks_forward(model) else {model: None}
    if found and not in_parts:
        return [model]
    for child in children_of(model).values():
        if child is None:
            continue
        if not lacks_forward(child):
            found[child] = None
        if not is_compiled(child):
            found |= dict.fromkeys(_called(child, in_parts=True))
    return list(found)


# The number of states of recurrent models that are remembered: two for each of the last microbatches.
_NUM_STATES = 32


class Watch:
    """The hooks on one model.

    Args:
        every_call: whether forwards without gradients are watched too, each as a step of its own.
        in_parts: whether parts of the model are called instead of the model.

    Attributes:
        expects_forward: whether modules of the model are called, as far as hooks tell.
        is_dense: whether the step is.
        doubts_inputs: whether forwards whose inputs require gradients are in doubt ([Note: forwards in doubt]).
    """

    def __init__(self, model: nn.Module, sink: Sink, *, every_call: bool, in_parts: bool) -> None:
        self._sink, self._every_call = sink, every_call
        self._view: ModelView | None = None
        self._inside, self._trains_in = False, True
        self._handles: list[Any] = []
        self._local_grads: LocalGrads | None = None
        # The parameters of the step that were reported.
        self._reported: set[str] = set()
        # The calls of modules in the last forward, and whether their input or output.
        self._seen: set[tuple[str, str]] = set()
        self._forwards = Forwards()
        # Outputs of the model whose memory the script still has, and copies of those that may be states of a recurrent model,
        # since they have the shape and dtype of an input. And the memory, shapes and dtypes of the last inputs.
        self._given: list[StorageWeakRef] = []
        self._states: deque[Tensor] = deque(maxlen=_NUM_STATES)
        self._came: list[StorageWeakRef] = []
        self._shapes: set[tuple[torch.Size, torch.dtype]] = set()
        # The part or wrapper that the script has called and that has not ended.
        self._outermost: nn.Module | None = None
        # The layers of wrappers that the script called in forwards since the last backward, and in those before it.
        self._layers: set[nn.Module] = set()
        self._trained_layers: set[nn.Module] = set()
        # Whether all inputs of a forward were computed from the model.
        self._has_no_batch = False
        self.is_dense, self.doubts_inputs = False, True
        # These hooks stay. The model's own run before those of whatever shards it, and those of the root after them.
        self._root = [place.module for place in named_modules(model) if not place.name and not place.compiled][-1]
        self._own = self._around(self._root, "")
        self._called = _called(model, in_parts=in_parts)
        # The model and what wrappers of it contain, if these have a forward.
        wholes = [place.module for place in named_modules(model) if not place.name and not place.compiled]
        self._wholes = {each for each in wholes if not lacks_forward(each)}
        begins = self._part_begins
        self._calls_layers = self._called == [model]
        if self._calls_layers:
            # The script may call what a wrapper contains, or wrap it again.
            self._called, begins = list(dict.fromkeys((model, *wholes))), self._layer_begins
        for part in self._called:
            # TorchScript modules refuse hooks by their own methods.
            self._own.append(nn.Module.register_forward_pre_hook(part, Hook(begins), prepend=True, with_kwargs=True))
        self.expects_forward = bool(self._called)

    @property
    def microbatches(self) -> int:
        """How many forwards the step has seen."""
        return self._forwards.number

    @property
    def has_no_batch(self) -> bool:
        """Whether the step is computed from parameters alone, as far as modules that are called tell."""
        return self._has_no_batch or not self.expects_forward

    def close(self) -> None:
        """Remove all hooks."""
        self._drop()
        for handle in self._own:
            handle.remove()
        self._own = []

    def begin_step(self, view: ModelView, *, collects: bool, is_dense: bool) -> None:
        """Forget the last step, and watch the next one.

        Args:
            collects: whether to collect our engine's collectives.
            is_dense: whether to report activations, unsharded parameters and local gradients too.
        """
        self._drop()
        self._view, self.is_dense, self._forwards = view, is_dense, Forwards()
        self._local_grads = LocalGrads(view, collects=collects or is_dense)
        self._reported, self._seen, self._layers, self._has_no_batch = set(), set(), set(), False
        if is_dense:
            for module, name in view.watched.items():
                if module is not self._root:
                    self._handles += self._around(module, name)
        for part in self._called:  # after the hooks that report their output
            self._handles.append(nn.Module.register_forward_hook(part, Hook(self._model_ends), always_call=True))

    def events(self) -> list[Event]:
        """The collectives of the step so far."""
        assert self._local_grads is not None
        return self._local_grads.events

    def updates(self, params: Sequence[Tensor]) -> None:
        """An optimizer is about to step. Later gradients of its parameters belong to the turn of another optimizer."""
        if self._local_grads is not None:
            self._local_grads.updates(params)

    def local_grads(self) -> dict[str, dict[str, Tensor]]:
        """See `LocalGrads.by_unit`."""
        assert self._local_grads is not None
        return self._local_grads.by_unit()

    def release(self) -> None:
        """A step ends, or an optimizer steps: the forwards so far are of training."""
        self._forwards.release()

    def _drop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._inside = False
        if self._local_grads is not None:
            self._local_grads.close()

    def _around(self, module: nn.Module, name: str) -> list[Any]:
        """Hooks that report a module's input and output at dense steps."""

        def before(_: nn.Module, args: Any, kwargs: Any = None) -> None:
            if kwargs is None:  # removed by a hook before it, which has ended a step
                return
            if self.is_dense and in_backward():
                self._listen(module)
            elif self.is_dense and self._inside:
                self._enter(module, name, (args, kwargs))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            if self.is_dense and self._inside and not in_backward():
                with quietly():
                    self._report_activation(name, OUTPUT, output)

        return [
            nn.Module.register_forward_pre_hook(module, Hook(before), with_kwargs=True),
            nn.Module.register_forward_hook(module, Hook(after)),
        ]

    def _enter(self, module: nn.Module, name: str | None = None, given: Any = ()) -> None:
        """A module is called: report its parameters, and its input if it has a name."""
        with quietly():
            self._read(module)
            if name is not None:
                self._report_activation(name, INPUT, given)
        self._listen(module)

    def _report_activation(self, name: str, use: str, value: Any) -> None:
        found = next((tensor for tensor in tensors_in(value) if dtype_name(tensor.dtype.to_real()) in FLOATING), None)
        if found is None or (found := self._recorded(found)) is None:
            return
        call = next_call(name, lambda call: (call, use) in self._seen)
        if call is not None:
            self._seen.add((call, use))
            self._forwards.report(self._sink.activation, call, use, as_real(found.detach()), operator_of(found))

    def _recorded(self, tensor: Tensor) -> Tensor | None:
        """What is recorded of an activation: a DTensor, of which model ranks gather their parts, or what this rank has of it."""
        own, engine = _own(tensor), None if self._view is None else self._view.engine
        if isinstance(tensor, DTensor) and engine is not None and engine.model_ranks is not None:
            return tensor if engine.tensor_ranks is not None else own if own is not None else tensor
        return own

    def _entered(self, module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
        """(unit, name, value) of every parameter that can be read in full when this module begins, for each registration."""
        view = self._view
        assert view is not None
        for unit in view.entries.get(module, ()):
            for name in view.names_of(unit):
                for owner, attribute in view.places[name]:
                    yield unit, name, param_of(owner, attribute)

    def _read(self, module: nn.Module) -> None:
        if self._forwards.has_earlier:
            return
        for unit, name, value in self._entered(module):
            if name in self._reported:
                continue
            if self._forwards.is_evaluation:  # perhaps with averaged parameters
                self._forwards.report(self._unsharded, unit, name, value.detach())
            else:
                self._unsharded(0, unit, name, value.detach())

    def _unsharded(self, _: int, unit: str, name: str, value: Tensor) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self._sink.unsharded(unit, name, value)

    def _listen(self, module: nn.Module) -> None:
        assert self._local_grads is not None
        self._local_grads.listen(self._entered(module))

    def _model_begins(self, model: nn.Module, args: Any, kwargs: Any, *, is_of_parts: bool = False) -> None:
        if in_backward() or not (self._every_call or is_differentiated()):
            return
        if self._view is not None and self._view.pipeline is not None and infers_shapes():
            return
        if self._view is None:
            with quietly():
                given = [tensor.detach() for tensor in _inputs_in((args, kwargs))]
            self._sink.begins(given)
            self._trains_in = model.training
        self._sink.forward_begins()
        if self._forwards.drop_evaluation():
            self._layers = set()
        # In the other mode, or past a wrapper: an evaluation, which forgot no_grad, unless backward follows.
        is_past = (
            bool(self._trained_layers) and model not in self._trained_layers and not self._forwards.awaits_backward
        )
        is_other = (model.training != self._trains_in or is_past) and not self._every_call
        if is_other and self._forwards.awaits_backward:
            return
        if self._calls_layers:
            self._layers = {*self._layers, model} if not is_other else {model}
        self._inside, self._seen = True, set()
        with quietly():
            inputs = _inputs_in((args, kwargs))
            self._came = [StorageWeakRef(each.untyped_storage()) for each in inputs]
            self._shapes = {(each.shape, each.dtype) for each in inputs if each.is_floating_point()}
            self._given = [storage for storage in self._given if not storage.expired()]
            batch = [each for each in inputs if not self._is_carried(each)]
            if not batch and model is self._root:  # a part may be given what another one computed alone
                batch = inputs
            self._has_no_batch = self._has_no_batch or bool(inputs and not batch)
            given = [each.detach() for each in batch]
            self._forwards.begin(
                is_other=is_other,
                is_of_parts=is_of_parts,
                wants_input_grads=not self._every_call and self._wants_input_grads(inputs),
                batch=given,
            )
            self._forwards.report(self._batch, given, mask_in(kwargs, batch))

    def _batch(self, _: int, tensors: list[Tensor], mask: int | None) -> None:
        self._sink.batch(tensors, mask)

    def _wants_input_grads(self, inputs: Sequence[Tensor]) -> bool:
        """Whether inputs of the model require gradients that are not computed from its parameters, before an optimizer steps."""
        if not self.doubts_inputs or self._view is None or self._view.pipeline is not None:
            return False
        if self._local_grads is not None and self._local_grads.has_updates:
            return False
        wanted = [each for each in inputs if each.requires_grad]
        own = {id(param) for param in self._root.parameters()} if wanted else set()
        return any(not _depends_on(each, own) for each in wanted)

    def _layer_begins(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """The script calls the model, or what a wrapper of it contains, or the wrapper does."""
        if self._outermost is None:
            self._outermost = None if in_backward() else layer
            self._model_begins(layer, args, kwargs)

    def _part_begins(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """The script calls a part of the model, or the model itself. All calls of parts until backward are one forward."""
        if self._outermost is not None:
            return
        self._outermost = None if in_backward() else part
        if in_backward() or not (self._every_call or is_differentiated()):
            return
        is_whole = part in self._wholes
        if is_whole:
            self._forwards.drop_parts()
        elif self._forwards.awaits_backward and not self._every_call:
            self._inside = True
            return
        before = self._handles
        self._model_begins(part, args, kwargs, is_of_parts=bool(self._wholes) and not is_whole and not self._every_call)
        if self.is_dense and self._inside and self._view is not None:
            self._enter(self._root)
            if self._handles is not before and part is not self._root:  # it had no hooks of its own when it was called
                self._enter(part, self._view.watched.get(part), (args, kwargs))

    def backward_begins(self, *, keeps_graph: bool) -> int:
        """See `Forwards.backward_begins`."""
        if not (self.expects_forward or self._forwards.awaits_backward):
            self._sink.begins([])
            self._forwards.begin()
            self._seen = set()
            if self.is_dense:
                self._enter(self._root)
        num_discarded = self._forwards.backward_begins(self._params(), keeps_graph=keeps_graph)
        if num_discarded and self._local_grads is not None:
            self._local_grads.discard()
        self._trained_layers |= self._layers
        self._layers = set()
        return num_discarded

    def backward_ended(self) -> int:
        """See `Forwards.backward_ended`."""
        are_whole = self._view is not None and self._view.engine.name in (DDP, ONE_DEVICE, REPLICAS)
        return self._forwards.backward_ended(self._params(), are_whole=are_whole)

    def input_grads_returned(self) -> None:
        """See `Forwards.input_grads_returned`."""
        self._forwards.input_grads_returned()
        self._layers = set()

    def _params(self) -> list[Tensor]:
        return [] if self._view is None else [held.param for held in self._view.held]

    def _model_ends(self, model: nn.Module, args: Any, output: Any) -> None:
        if model is not self._outermost:  # inside of another part or wrapper
            return
        self._outermost = None
        if not in_backward():
            was_inside, self._inside = self._inside, False
            outputs = [each for each in tensors_in(output) if _is_plain(each) and not _is_in(self._came, each)]
            self._given += [StorageWeakRef(each.untyped_storage()) for each in outputs]
            self._states.extend(each.detach().clone() for each in outputs if (each.shape, each.dtype) in self._shapes)
            if was_inside:
                self._sink.ends(output)

    def _is_carried(self, tensor: Tensor) -> bool:
        """Whether an input is not a sample: it was computed from the model's parameters, or the model returned it earlier, as a
        recurrent state. The script may have copied it, as by `torch.cat`, and set elements to zero where a sequence begins."""
        if tensor.requires_grad and _depends_on(tensor, {id(param) for param in self._root.parameters()}):
            return True
        return _is_in(self._given, tensor) or any(_is_state(tensor, state) for state in self._states)


# Nodes of autograd's graph that only move or cast values.
_MOVES = frozenset(
    (
        *(
            "View",
            "UnsafeView",
            "Reshape",
            "ReshapeAlias",
            "Transpose",
            "Permute",
            "T",
            "AsStrided",
            "Contiguous",
            "Flatten",
        ),
        *("Clone", "ToCopy", "Alias", "Expand", "Squeeze", "Unsqueeze", "Slice", "Select", "Split", "SplitWithSizes"),
    )
)
_MOST_MOVES = 16


def operator_of(value: Tensor) -> str:
    """The name in autograd's graph of the operator that computed a tensor; "" if the tensor has no history."""
    node: Any = value.grad_fn
    for _ in range(_MOST_MOVES):
        if node is None:
            return ""
        name = node.name().rpartition("::")[2].partition("Backward")[0]
        following = [each for each, _ in node.next_functions if each is not None]
        if name not in _MOVES or len(following) != 1:
            return "" if name.endswith("AccumulateGrad") else name[:100]
        node = following[0]
    return ""


_MOST_NODES = 1000


def _depends_on(value: Tensor, leaves: set[int]) -> bool:
    """Whether a value is one of the leaves with these ids or was computed from one, by the last operations in its history."""
    if id(value) in leaves:
        return True
    nodes, seen = [value.grad_fn], set[Any]()
    while nodes and len(seen) < _MOST_NODES:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in leaves:
            return True
        nodes += [each for each, _ in node.next_functions]
    return False


def _inputs_in(value: Any) -> list[Tensor]:
    """The tensors that a model is given, or else the arrays of numpy, which a model of Keras converts itself."""
    tensors = [own for tensor in tensors_in(value) if (own := _own(tensor)) is not None]
    return tensors or list(arrays_in(value))


def _own(tensor: Tensor) -> Tensor | None:
    """A tensor that is whole on this rank, or the samples of this rank in a DTensor; None: another kind."""
    if isinstance(tensor, DTensor):
        divided = (each for dim, each in enumerate(tensor.placements) if tensor.device_mesh.size(dim) > 1)
        return tensor._local_tensor if all(each.is_replicate() or each.is_shard(0) for each in divided) else None
    return tensor if _is_plain(tensor) else None


def _is_state(given: Tensor, state: Tensor) -> bool:
    """Whether all elements of a tensor are those of a state, or zero. If all are zero, it is the beginning of a state, which the
    script gives."""
    if (given.shape, given.dtype, given.device) != (state.shape, state.dtype, state.device):
        return False
    return bool(((given == state) | (given == 0)).all() and given.any())


def _is_in(storages: Sequence[StorageWeakRef], tensor: Tensor) -> bool:
    """Whether a tensor has one of these memories. A weak reference keeps its address from other memory."""
    own = tensor.untyped_storage()._cdata
    return any(each.cdata == own for each in storages)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense, and whole on this rank."""
    return tensor.layout == torch.strided and not isinstance(tensor, DTensor) and not tensor.is_meta


def _add(sums: dict[str, Tensor], name: str, grad: Tensor) -> None:
    """Add a gradient to the sum of earlier ones, in float32 or wider."""
    grad = as_real(grad.detach().to_dense() if grad.is_sparse else grad.detach())
    if name not in sums:
        sums[name] = grad.clone()
        return
    wide = torch.promote_types(sums[name].dtype, torch.float32)
    sums[name] = sums[name].to(wide) + grad.to(wide)

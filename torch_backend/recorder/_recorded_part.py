"""A module that is recorded, and what its hooks tell the `Recorder`."""

from typing import Any, Protocol

from torch import Tensor, nn

from torch_backend.recorder._model_view import ModelView
from torch_backend.recorder._module_hooks import Sink, Watch
from torch_backend.recorder._tensor_writing import Keeper


class Callbacks(Protocol):
    """What a part calls of its `Recorder`."""

    current_step: int

    def begins(self, inputs: list[Tensor]) -> None:
        """A forward begins, with these inputs if it is the first one."""

    def look_for_update(self) -> None:
        """End the step if the script has changed parameters by itself."""

    def write_late(self) -> None:
        """Write the step that has ended, if that was put off."""

    def forwards(self, part: "RecordedPart", tensors: list[Tensor], mask: int | None) -> None:
        """A part is given a microbatch, and the index of the mask in it."""

    def ends(self, output: Any) -> None:
        """A forward has ended."""


class RecordedPart(Sink):
    """A module that is recorded: the model, or one of the stages of a pipeline on this rank.

    Attributes:
        model, stage: the module, and its number among the stages.
        watch: its hooks.
        view, keeper: what is known of it, and what records it; None before the recording begins.
    """

    def __init__(self, recorder: Callbacks, model: nn.Module, stage: int, *, every_call: bool, in_parts: bool) -> None:
        self._recorder, self.model, self.stage = recorder, model, stage
        self.view: ModelView | None = None
        self.keeper: Keeper | None = None
        self.watch = Watch(model, self, every_call=every_call, in_parts=in_parts)

    def begins(self, inputs: list[Tensor]) -> None:
        self._recorder.begins(inputs)

    def forward_begins(self) -> None:
        self._recorder.look_for_update()
        self._recorder.write_late()

    def batch(self, tensors: list[Tensor], mask: int | None) -> None:
        if self.watch.is_dense:
            self._begun().batch(self._recorder.current_step, tensors)
        self._recorder.forwards(self, tensors, mask)

    def activation(self, microbatch: int, module: str, use: str, value: Tensor, operator: str) -> None:
        self._begun().activation(self._recorder.current_step, microbatch, module, use, value, operator)

    def unsharded(self, unit: str, name: str, value: Tensor) -> None:
        self._begun().unsharded(self._recorder.current_step, unit, name, value)

    def ends(self, output: Any) -> None:
        self._recorder.ends(output)

    def _begun(self) -> Keeper:
        self._recorder.begins([])
        assert self.keeper is not None
        return self.keeper

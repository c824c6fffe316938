"""Writes the numbers of steps to TensorBoard or W&B, through the writer that the user's script has."""

from collections.abc import Callable, Iterator
from typing import Any

from crossframe.errors import UsageError
from crossframe.monitoring.follow import StepScalars

PREFIX = "crossframe"
STEP = f"{PREFIX}/step"

Write = Callable[[StepScalars, int], None]
"""Writes the numbers of a step, and the number of alarms so far."""


def scalar_writer(writer: Any) -> Write:
    """A function that writes to a `SummaryWriter` of TensorBoard or tensorboardX, or to a run of W&B.

    W&B numbers its rows by itself, so each has the step as `crossframe/step`, which is made the axis of the others.

    Raises:
        UsageError: another object.
    """
    if callable(add_scalar := getattr(writer, "add_scalar", None)):

        def to_tensorboard(scalars: StepScalars, num_alarms: int) -> None:
            for name, value in _named(scalars, num_alarms):
                add_scalar(name, value, scalars.step)

        return to_tensorboard
    log, define_metric = getattr(writer, "log", None), getattr(writer, "define_metric", None)
    if callable(log) and callable(define_metric):
        define_metric(STEP)
        define_metric(f"{PREFIX}/*", step_metric=STEP)

        def to_wandb(scalars: StepScalars, num_alarms: int) -> None:
            log({STEP: scalars.step, **dict(_named(scalars, num_alarms))})

        return to_wandb
    raise UsageError(
        f"writer: expected an object with add_scalar, such as SummaryWriter, or a run of W&B, got {type(writer).__name__}"
    )


def _named(scalars: StepScalars, num_alarms: int) -> Iterator[tuple[str, float]]:
    yield f"{PREFIX}/loss", scalars.loss
    yield f"{PREFIX}/alarms", float(num_alarms)
    if scalars.grad_norm is not None:
        yield f"{PREFIX}/gradient_norm", scalars.grad_norm
    for what, norms in (("gradient_norm", scalars.gradients), ("parameter_norm", scalars.parameters)):
        for unit, norm in norms.items():
            yield f"{PREFIX}/{what}/{unit or 'root'}", norm

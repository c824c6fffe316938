"""Faults in optimizers: other formulas, other constants, steps that are lost."""

from collections.abc import Callable, Iterator
from typing import Any

from crossframe.replacing import replacing
from experiments.faults.catalogue.fault import JAX, TELLABLE, TORCH, Answer, Family

OPTIMIZERS = Family("optimizer", TORCH)
STATE, UPDATE = ("state", "state"), ("update", "optimizer")
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 1e-2}


def calls_of(module: str, name: str, change: Callable[[int, tuple, dict[str, Any]], bool]) -> Iterator[None]:
    """`change(step, arguments, keywords)` is done ahead of each call of torch's function behind an optimizer; False skips it."""
    from importlib import import_module

    owner = import_module(f"torch.optim.{module}")
    right, steps = getattr(owner, name), [0]

    def function(*args: Any, **kwargs: Any) -> None:
        goes_on = change(steps[0], args, kwargs)
        steps[0] += 1
        if goes_on:
            right(*args, **kwargs)

    with replacing(owner, name, function):
        yield


def adam(**changed: Any) -> Iterator[None]:
    yield from calls_of("adam", "adam", lambda step, args, kwargs: kwargs.update(changed) or True)


def sgd(**changed: Any) -> Iterator[None]:
    yield from calls_of("sgd", "sgd", lambda step, args, kwargs: kwargs.update(changed) or True)


@OPTIMIZERS.fault(
    "Adam with decay in its gradient, where AdamW was asked for",
    Answer(*STATE, signature="weight_decay"),
    source="pytorch/pytorch#48793",
)
def decay_in_the_gradient() -> Iterator[None]:
    yield from adam(decoupled_weight_decay=False)


@OPTIMIZERS.fault(
    "parameters of one dim are not decayed, and all shards of a flat layout have one dim",
    Answer(*UPDATE, signature="weight_decay"),
    source="mlfoundations/open_clip#358",
    # A step decays by 3e-6 of a parameter, less than what a gradient in bfloat16 rounds of the update.
    dtypes=TELLABLE,
)
def flat_shards_not_decayed() -> Iterator[None]:
    def change(step: int, args: tuple, kwargs: dict[str, Any]) -> bool:
        if all(param.ndim < 2 for param in args[0]):
            kwargs["weight_decay"] = 0.0
        return True

    yield from calls_of("adam", "adam", change)


@OPTIMIZERS.fault("the second moment keeps 0.99 of itself, not 0.999", Answer(*STATE, signature="constant_factor"))
def other_beta() -> Iterator[None]:
    yield from adam(beta2=0.99)


@OPTIMIZERS.fault("epsilon is 1e-6, not 1e-8", Answer(*UPDATE, signature="optimizer_epsilon"), dtypes=TELLABLE)
def other_epsilon() -> Iterator[None]:
    yield from adam(eps=1e-6)


@OPTIMIZERS.fault(
    "the optimizer's step 2 is skipped, as a loss scaler does on overflow, and no one is told",
    Answer(*STATE, step=2, signature="lost_step"),
    source="deepspeedai/DeepSpeed#5779",
)
def step_skipped() -> Iterator[None]:
    yield from calls_of("adam", "adam", lambda step, args, kwargs: step != 2)


@OPTIMIZERS.fault(
    "a schedule of the learning rate was left in: it falls by a hundredth each step",
    Answer(*UPDATE, step=1, signature="constant_factor"),
    source="huggingface/accelerate#2142",
)
def rate_falls() -> Iterator[None]:
    def change(step: int, args: tuple, kwargs: dict[str, Any]) -> bool:
        kwargs["lr"] = kwargs["lr"] * 0.99**step
        return True

    yield from calls_of("adam", "adam", change)


@OPTIMIZERS.fault(
    "the learning rate is 1e-4 of itself too large", Answer(*UPDATE, signature="constant_factor"), dtypes=TELLABLE
)
def rate_slightly_off() -> Iterator[None]:
    def change(step: int, args: tuple, kwargs: dict[str, Any]) -> bool:
        kwargs["lr"] = kwargs["lr"] * 1.0001
        return True

    yield from calls_of("adam", "adam", change)


@OPTIMIZERS.fault(
    "momentum is Nesterov's", Answer(*UPDATE, signature="constant_factor"), source="pytorch/pytorch#1099", **SGD
)
def nesterov() -> Iterator[None]:
    yield from sgd(nesterov=True)


@OPTIMIZERS.fault(
    "momentum is dampened by as much as it keeps, as Lua's torch did",
    Answer(*STATE, step=1, signature=None),
    source="torch/optim#163",
    **SGD,
)
def dampened() -> Iterator[None]:
    yield from sgd(dampening=0.9)


def adamw(make: Callable[..., Any]) -> Iterator[None]:
    """Replaces optax.adamw by `make(right, rate, decay)`."""
    import optax

    right = optax.adamw
    with replacing(optax, "adamw", lambda rate, weight_decay: make(right, rate, weight_decay)):
        yield


@OPTIMIZERS.fault(
    "epsilon stands under the root",
    Answer(*UPDATE, signature="optimizer_epsilon"),
    source="FluxML/Flux.jl#448",
    within=(JAX,),
)
def epsilon_under_the_root() -> Iterator[None]:
    yield from adamw(lambda right, rate, decay: right(rate, weight_decay=decay, eps=0.0, eps_root=1e-8))


def _bias_correction(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    import optax

    with replacing(optax.tree, "bias_correction", change(optax.tree.bias_correction)):
        yield


@OPTIMIZERS.fault(
    "moments are not corrected for their start at zero",
    Answer(*UPDATE, signature="bias_correction"),
    source="BVLC/caffe#4224",
    within=(JAX,),
)
def bias_not_corrected() -> Iterator[None]:
    yield from _bias_correction(lambda right: lambda moment, decay, count: moment)


@OPTIMIZERS.fault(
    "the correction of moments begins to count at 2",
    Answer(*UPDATE, signature="bias_correction"),
    source="tensorflow/tensorflow#35444",
    within=(JAX,),
)
def bias_correction_one_off() -> Iterator[None]:
    yield from _bias_correction(lambda right: lambda moment, decay, count: right(moment, decay, count + 1))


@OPTIMIZERS.fault(
    "the first moment is kept in bfloat16", Answer(*STATE, signature=None), within=(JAX,), dtypes=TELLABLE
)
def moment_in_bfloat16() -> Iterator[None]:
    yield from adamw(lambda right, rate, decay: right(rate, weight_decay=decay, mu_dtype="bfloat16"))


@OPTIMIZERS.fault(
    "decay is not multiplied by the learning rate",
    Answer(*UPDATE, signature="weight_decay"),
    source="NVIDIA/apex#1849",
    within=(JAX,),
)
def decay_without_the_rate() -> Iterator[None]:
    import optax

    yield from adamw(
        lambda right, rate, decay: optax.chain(
            optax.scale_by_adam(), optax.scale_by_learning_rate(rate), optax.add_decayed_weights(-decay)
        )
    )


@OPTIMIZERS.fault(
    "SGD decays behind its momentum, and not in the gradient",
    Answer(*STATE, signature="weight_decay"),
    within=(JAX,),
    **SGD,
)
def decay_behind_momentum() -> Iterator[None]:
    import optax

    decay, decayed = [0.0], optax.add_decayed_weights

    def later(rate: float) -> Any:
        decay[0] = rate
        return optax.identity()

    def sgd(rate: float, momentum: float) -> Any:
        return optax.chain(optax.trace(momentum), decayed(decay[0]), optax.scale_by_learning_rate(rate))

    with replacing(optax, "add_decayed_weights", later), replacing(optax, "sgd", sgd):
        yield


@OPTIMIZERS.fault(
    "at step 2 the optimizer leaves the last unit out",
    Answer(*STATE, step=2, unit="blocks.1", signature="lost_step"),
    within=(JAX,),
)
def unit_left_out() -> Iterator[None]:
    from dataclasses import replace

    import jax
    from jax import numpy as jnp
    from optax import GradientTransformation

    def make(right: Callable[..., Any], rate: float, decay: float) -> Any:
        given = right(rate, weight_decay=decay)

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            updates, new = given.update(updates, state, params)
            adam, before = new[0], state[0]
            late = before.count == 2

            def kept(after: Any, before: Any) -> Any:
                """`after`, but what was `before` in that unit and step. While it is tried out, a unit is a dict of parameters."""
                unit = jax.tree.map(lambda old, new: jnp.where(late, old, new), before, after.shards["blocks.1"])
                return replace(after, shards={**after.shards, "blocks.1": unit})

            moments = {
                name: kept(getattr(adam, name), getattr(before, name).shards["blocks.1"]) for name in ("mu", "nu")
            }
            zeros = jax.tree.map(jnp.zeros_like, updates.shards["blocks.1"])
            return kept(updates, zeros), (adam._replace(**moments), *new[1:])

        return GradientTransformation(given.init, update)

    yield from adamw(make)

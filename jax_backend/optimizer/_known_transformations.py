"""Which transformations of optax give shards of a flat or a ragged layout the results of parameters, by what optax defines.

Under these layouts a leaf is a bucket in one line. A transformation that treats each element by itself, or all elements of the
model alike, gives the same there. One that depends on leaves does not, and one that is not listed may not.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import optax

from crossframe.errors import UnsupportedError

LAYOUT_INDEPENDENT = frozenset(
    {
        "add_decayed_weights",
        "apply_every",
        "clip",
        "clip_by_global_norm",
        "dadapt_adamw",
        "ema",
        "identity",
        "keep_params_nonnegative",
        "normalize",
        "normalize_by_update_norm",
        "prodigy",
        "scale",
        "scale_by_acprop",
        "scale_by_adadelta",
        "scale_by_adam",
        "scale_by_adamax",
        "scale_by_adan",
        "scale_by_ademamix",
        "scale_by_adopt",
        "scale_by_amsgrad",
        "scale_by_belief",
        "scale_by_cocob",
        "scale_by_dog",
        "scale_by_dowg",
        "scale_by_lbfgs",
        "scale_by_lion",
        "scale_by_madgrad",
        "scale_by_optimistic_gradient",
        "scale_by_radam",
        "scale_by_rms",
        "scale_by_rprop",
        "scale_by_rss",
        "scale_by_schedule",
        "scale_by_sign",
        "scale_by_simplified_ademamix",
        "scale_by_stddev",
        "scale_by_yogi",
        "set_to_zero",
        "trace",
        "zero_nans",
    }
)
"""Functions of optax and optax.contrib whose transformations treat elements one by one, or by the norm of the whole model."""

BY_LEAF = {
    "adaptive_grad_clip": "it clips by the norms of each leaf's rows",
    "add_noise": "its noise depends on the leaves",
    "centralize": "it subtracts the mean of each leaf's rows",
    "clip_by_block_rms": "it clips by the norm of each leaf",
    "masked": "its mask chooses leaves",
    "partition": "its labels choose leaves, as Muon's do by ndim",
    "scale_by_distance_over_gradients": "it scales by the norm of each leaf",
    "scale_by_factored_rms": "it factors each leaf into rows and columns",
    "scale_by_galore": "it projects each leaf to a lower rank",
    "scale_by_muon": "it orthogonalizes each leaf",
    "scale_by_novograd": "it scales by the norm of each leaf",
    "scale_by_param_block_norm": "it scales by the norm of each leaf",
    "scale_by_param_block_rms": "it scales by the norm of each leaf",
    "scale_by_sm3": "it keeps moments of the rows and columns of each leaf",
    "scale_by_trust_ratio": "it scales by the norm of each leaf",
}
"""The same of transformations that depend on leaves, with what they do."""

WRAPPERS = frozenset({"apply_if_finite", "chain", "named_chain", "schedule_free", "with_extra_args_support"})
"""Functions of optax that apply other transformations."""

INJECTED = frozenset({"adabelief", "adagrad", "adam", "adamax", "adamw", "lion", "nadam", "nadamw", "rmsprop", "sgd"})
"""Optimizers that `optax.inject_hyperparams` may make, without a mask."""


def check_elementwise(tx: optax.GradientTransformation, kind: str) -> None:
    """Raise UnsupportedError unless every part of a transformation is known to be elementwise.

    Args:
        kind: the layout, for the message.
    """
    for name in parts_of(tx.update):
        if name not in LAYOUT_INDEPENDENT:
            does = BY_LEAF.get(name, "it is not known to treat elements one by one")
            raise UnsupportedError(
                f"sharded_optimizer: {name} cannot update shards of layout {kind!r}, where a leaf is a whole unit in one line: "
                f'{does}. Shard the parameters by layout="per_param", the default; or, if it does treat elements one by one, '
                "pass elementwise=True"
            )


def parts_of(update: Callable[..., Any]) -> Iterator[str]:
    """The names of the functions that made the parts of a transformation, from its update function."""
    update = inspect.unwrap(update)  # one that a recorder follows
    owner = getattr(update, "__self__", None)
    if isinstance(owner, optax.MultiSteps):
        yield from parts_of(owner._opt.update)
        return
    maker = getattr(update, "__qualname__", repr(update)).partition(".<locals>")[0]
    if not getattr(update, "__module__", "").startswith("optax."):
        yield maker
        return
    variables = inspect.getclosurevars(update).nonlocals
    if maker == "inject_hyperparams":
        # A mask that is a function is taken for a schedule.
        masked = "mask" in variables["sched_hps"] or variables["other_hps"].get("mask") is not None
        injected = variables["inner_factory"].__name__
        yield "masked" if masked else "identity" if injected in INJECTED else injected
    elif maker in WRAPPERS:
        inner = [*variables.get("update_fns", ()), *(v.update for v in variables.values() if hasattr(v, "update"))]
        inner += [tx.update for _, tx in variables.get("transforms", ()) if maker == "named_chain"]
        for each in inner:
            yield from parts_of(each)
    else:
        yield maker

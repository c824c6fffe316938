"""Correct pairs of runs, and faults with the answers that are expected. Frozen before anything was compared."""

from dataclasses import dataclass
from typing import Any

from experiments.parallelism.training import Run


@dataclass(frozen=True)
class Fault:
    """A mistake in a parallel program, and the expected answer to a comparison with one device.

    Attributes:
        what: what is wrong.
        run: the wrong run; its `fault` is `name`.
        step: the first step at which it shows.
        places: patterns of "phase/event name" (`fnmatch`), where name is a module or a parameter; any of them is right.
        axis: the mesh axis along which ranks differ that must agree; "" if those agree.
        ranks: the ranks that differ from the first of their group on that axis.
        verdicts: any of these is right.
    """

    name: str
    what: str
    run: Any
    places: tuple[str, ...]
    axis: str = ""
    ranks: tuple[int, ...] = ()
    step: int = 0
    verdicts: tuple[str, ...] = ("bug",)


CLEAN = (
    Run("tp"),
    Run("tp-plan"),
    Run("tp4"),
    Run("tp", experts=True),
    Run("tp", clip=True, dropout=True),
    Run("sp"),
    Run("sp-plan"),
    Run("tp-torch"),
    Run("tp-ours", experts=True),
    Run("sp-torch"),
    Run("sp-ours"),
    Run("sp-plan-torch"),
    Run("ep", experts=True),
    Run("ep-torch", experts=True),
    Run("ep-ours", experts=True),
    Run("pp", microbatches=2),
    Run("pp", microbatches=2, experts=True, clip=True),
    Run("pp-torch", microbatches=2),
    Run("pp-ours", microbatches=2),
    Run("pp-tp", microbatches=2),
    Run("tp-plan", "float32"),
    Run("sp-ours", "float32"),
    Run("ep-torch", "float32", experts=True),
    Run("pp-ours", "float32", microbatches=2),
)


def _fault(name: str, what: str, form: str, *places: str, dtype: str = "float64", **options: object) -> Fault:
    settings = {key: options.pop(key) for key in ("experts", "microbatches", "clip", "dropout") if key in options}
    return Fault(name, what, Run(form, dtype, fault=name, **settings), places, **options)  # type: ignore[arg-type]


GRADIENT = ("backward/* {}", "reduce/* {}")


def _gradient(*names: str) -> tuple[str, ...]:
    return tuple(pattern.format(name) for name in names for pattern in GRADIENT)


FAULTS = (
    _fault(
        "column_gradient",
        "The gradient of the input of the last block's first MLP layer is not summed over the axis.",
        "tp",
        *_gradient("layers.1.mlp_norm.weight", "layers.1.mlp_norm.bias"),
        axis="tp",
        ranks=(1,),
    ),
    _fault(
        "row_not_reduced",
        "The first block's second MLP layer is not summed over the axis in forward.",
        "tp-ours",
        "forward/output layers.0.mlp.down",
        "forward/output layers.0.mlp",
        axis="tp",
        ranks=(1, 3),
    ),
    _fault(
        "row_bias",
        "Each rank adds the bias of the first block's second MLP layer before the sum.",
        "tp-torch",
        "forward/output layers.0.mlp.down",
        "forward/output layers.0.mlp",
        dtype="float32",
    ),
    _fault(
        "row_average",
        "The last block's attention is averaged over the axis instead of summed.",
        "tp",
        "forward/output layers.1.attention.out",
        "forward/output layers.1.attention",
        dtype="float32",
    ),
    _fault(
        "head_width",
        "Scores are scaled by the width divided by this rank's heads instead of all heads.",
        "tp",
        "forward/input layers.0.attention.out",
    ),
    _fault(
        "clip_local",
        "The norm that clips gradients is that of this rank's parts.",
        "tp",
        "reduce/*",
        "norm/*",
        clip=True,
        axis="tp",
        ranks=(1,),
    ),
    _fault(
        "tp_batches",
        "The ranks that divide layers draw different batches.",
        "tp",
        "batch/*",
        axis="tp",
        ranks=(1,),
        verdicts=("bug", "incomparable"),
    ),
    _fault(
        "initial_values",
        "Each rank initialises replicated parameters with another seed.",
        "tp",
        "parameters/*",
        axis="tp",
        ranks=(1,),
        verdicts=("bug", "incomparable"),
    ),
    _fault(
        "dropout_seed",
        "The ranks that divide layers drop different values of replicated activations.",
        "tp",
        "forward/output layers.0.dropout",
        dropout=True,
        axis="tp",
        ranks=(1,),
    ),
    _fault(
        "norm_gradients",
        "Gradients of norms are not summed over the ranks that divide positions.",
        "sp",
        *_gradient("norm.weight", "norm.bias"),
        axis="tp",
        ranks=(1,),
    ),
    _fault(
        "embedding_gradient",
        "The gradient of the embedding is not summed over the ranks that divide positions.",
        "sp-ours",
        *_gradient("embed.weight"),
        axis="tp",
        ranks=(1, 3),
        dtype="float32",
    ),
    _fault(
        "sequence_chunk",
        "Before the head, each rank takes the gradient of the first rank's positions.",
        "sp-torch",
        *_gradient("norm.weight", "norm.bias"),
    ),
    _fault(
        "position_offset",
        "Each rank counts positions from its own first one.",
        "sp",
        "forward/output positions",
        "forward/input layers.0",
        "forward/input layers.0.attention_norm",
    ),
    _fault(
        "divide_world",
        "Gradients are divided by the number of all ranks instead of the data-parallel ones.",
        "tp-ours",
        "reduce/*",
    ),
    _fault(
        "expert_divisor",
        "Gradients of experts are divided by the size of their own group of data-parallel ranks.",
        "ep-torch",
        *(f"reduce/* layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("up", "down")),
        experts=True,
    ),
    _fault(
        "expert_group",
        "Gradients of different experts are averaged, over the group of the other parameters.",
        "ep",
        *_gradient(*(f"layers.{i}.mlp.experts.{name}" for i in (0, 1) for name in ("up", "down"))),
        experts=True,
    ),
    _fault(
        "expert_offset",
        "Each rank weights its experts by the gates of the first ones.",
        "ep-ours",
        "forward/output layers.0.mlp.experts",
        "forward/output layers.0.mlp",
        experts=True,
    ),
    _fault(
        "router_gradient",
        "The gradients of gates are not summed over the ranks that divide experts.",
        "tp",
        *_gradient("layers.1.mlp.router.weight"),
        experts=True,
        axis="tp",
        ranks=(1,),
    ),
    _fault(
        "gather_gradient",
        "Samples are gathered for the experts by a collective that has no gradient.",
        "ep-ours",
        "reduce/* layers.1.mlp_norm.weight",
        "reduce/* layers.1.mlp_norm.bias",
        experts=True,
        dtype="float32",
    ),
    _fault(
        "loss_divided",
        "The loss is divided by the number of microbatches, and the schedule divides gradients again.",
        "pp",
        "reduce/*",
        microbatches=2,
    ),
    _fault(
        "stage_scale",
        "The first stage does not divide gradients by the number of microbatches.",
        "pp-ours",
        *(f"reduce/* {name}" for name in ("layers.0.*", "embed.*", "positions.*")),
        microbatches=2,
    ),
    _fault(
        "stale_buffer",
        "The last stage computes the second microbatch on the buffer of the first one.",
        "pp",
        "forward/input layers.1",
        "forward/input layers.1.attention_norm",
        microbatches=2,
    ),
    _fault(
        "clip_stage",
        "Each stage clips by the norm of its own gradients.",
        "pp",
        "reduce/*",
        "norm/*",
        microbatches=2,
        clip=True,
    ),
    _fault(
        "stage_layers",
        "The last stage takes its initial values from the first layers.",
        "pp-ours",
        "parameters/* layers.1.*",
        microbatches=2,
        verdicts=("bug", "incomparable"),
    ),
    _fault(
        "stage_targets",
        "The data-parallel ranks of the last stage take the targets of each other's samples.",
        "pp-ours",
        "forward/loss*",
        microbatches=2,
        dtype="float32",
    ),
    _fault(
        "stage_rate",
        "The learning rate of the first stage is not lowered.",
        "pp",
        *(f"update/* {name}" for name in ("layers.0.*", "embed.*", "positions.*")),
        microbatches=2,
        step=1,
    ),
)

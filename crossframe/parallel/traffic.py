"""What the model axes of a mesh send in a step, next to data parallelism: bytes that follow from shapes alone."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crossframe.dtypes import itemsize
from crossframe.errors import PlanError
from crossframe.mesh import EXPERT, PIPELINE, TENSOR
from crossframe.parallel.model import ParallelModel
from crossframe.parallel.styles import Style
from crossframe.params import ParamSpec
from crossframe.quoting import quote
from crossframe.trace import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND


@dataclass(frozen=True)
class Traffic:
    """Equal collectives of one rank over a model axis in one step.

    Attributes:
        axis: the axis.
        kind: a kind of `crossframe.trace`: a collective, ALL_TO_ALL or SEND.
        phase: "forward" or "backward".
        module: the module that causes it; "" for a stage.
        count: how often.
        num_bytes: bytes of each: of the unsharded side for an all-gather, a reduce-scatter or an all-reduce, of the output for an
            all-to-all, of the tensor for a send.
        group: the ranks that take part.
    """

    axis: str
    kind: str
    phase: str
    module: str
    count: int
    num_bytes: int
    group: Sequence[int]


def model_traffic(
    model: ParallelModel,
    rank: int,
    *,
    tokens: int,
    microbatches: int = 1,
    dtype: str | None = None,
    experts_per_token: int | None = None,
) -> tuple[Traffic, ...]:
    """What a rank sends over the axes "tp", "ep" and "pp" in a step of training.

    Sources:

    - "tp": Shoeybi et al., Megatron-LM, 2019, section 3. A rowwise module and a vocabulary all-reduce their output in forward;
      colwise modules with one parent, which have one input, all-reduce its gradient in backward. The output of a colwise module
      stays divided, that of the head too (a loss on divided logits).
    - With modules of style "sequence": Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
      section 4.2.2. An all-gather before a colwise module and a reduce-scatter after a rowwise one, and the reverse in backward,
      take the place of all-reduces. Gathered inputs are kept for backward, as torch keeps them. The gradients of modules of this
      style are all-reduced, since each rank has those of its positions.
    - "ep": Lepikhin et al., GShard, 2020, section 2.2. Each token goes to its experts and back, in an all-to-all each, and so do
      the gradients. Experts have equally many tokens.
    - "pp": Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, 2021, section 2.2.
      A stage sends its output to the next one in forward, and the gradient of its input to the previous one in backward.

    Args:
        tokens: number of tokens of a data-parallel rank in one microbatch. All ranks of "tp" and "pp" work on the same tokens.
        dtype: dtype of activations; None: that of the parameters of a module.
        experts_per_token: the number of experts that process a token; needed for "ep".

    Raises:
        PlanError: numbers that are too small, an unknown width of activations, or no `experts_per_token` with "ep".
    """
    for name, value in (("tokens", tokens), ("microbatches", microbatches)):
        if type(value) is not int or value < 1:
            raise PlanError(f"{name}: expected a number of at least 1, got {quote(value)}")
    found = [*_tensor(model, rank, tokens, dtype)]
    if model.mesh.size(EXPERT) > 1:
        found += _experts(model, rank, tokens, dtype, checked_experts_per_token(model, experts_per_token))
    if model.mesh.size(PIPELINE) > 1:
        found += _sends(model, rank, tokens, dtype)
    return tuple(
        Traffic(each.axis, each.kind, each.phase, each.module, each.count * microbatches, each.num_bytes, each.group)
        for each in found
    )


def token_shares(model: ParallelModel, experts_per_token: int | None) -> dict[str, float]:
    """By unit of experts that "ep" divides: the share of a rank's parameters that an average token of the rank computes with.

    A rank has E / ep of E experts, and computes with the tokens of ep ranks, each of which goes to k experts: in relation to its
    own tokens, a share of k * ep / E. It is above 1 if there are fewer than k * ep experts.
    """
    if model.mesh.size(EXPERT) == 1:
        return {}
    count = checked_experts_per_token(model, experts_per_token)
    return {
        model.unit_of(name): count * model.mesh.size(EXPERT) / model.total_experts(name)
        for name in model.styles()
        if model.is_expert(name)
    }


def checked_experts_per_token(model: ParallelModel, experts_per_token: int | None) -> int:
    """The number of experts that process a token.

    Raises:
        PlanError: it is missing, below 1, or above the number of experts.
    """
    most = min(model.total_experts(name) for name in model.styles() if model.is_expert(name))
    if type(experts_per_token) is not int or not 1 <= experts_per_token <= most:
        raise PlanError(
            f"experts_per_token: with axis 'ep', expected the number of experts that process a token, from 1 to {most}, got "
            f"{quote(experts_per_token)}"
        )
    return experts_per_token


def idle_share(num_stages: int, microbatches: int) -> float:
    """The share of a step for which a stage of a pipeline waits for others, if all stages take equally long.

    It is (p - 1) / (m + p - 1) for p stages and m microbatches in both schedules. Source: Huang et al., GPipe, 2019, section 2.3.

    >>> idle_share(1, 8), idle_share(4, 9)
    (0.0, 0.25)
    """
    return (num_stages - 1) / (microbatches + num_stages - 1)


def _tensor(model: ParallelModel, rank: int, tokens: int, dtype: str | None) -> Iterator[Traffic]:
    """The traffic of "tp" for one microbatch."""
    stage = model.mesh.coordinate(rank).get(PIPELINE, 0)
    group = model.mesh.group(rank, TENSOR)
    styles, sequence = model.styles(), model.has_sequence
    inputs: dict[tuple[str, int, str], None] = {}  # (parent, width, dtype) of colwise modules
    seen: set[str] = set()

    def one(kind: str, phase: str, module: str, numel: int, param: ParamSpec) -> Traffic:
        return Traffic(TENSOR, kind, phase, module, 1, numel * itemsize(dtype or param.dtype), group)

    for param in model.shapes.params:
        each = styles.get(param.name)
        if each is None or model.stages[param.name] != stage:
            continue
        if each.style is Style.SEQUENCE and param.requires_grad:
            yield one(ALL_REDUCE, "backward", each.module, param.numel, param)
        if len(param.shape) < 2 or each.module in seen:
            continue
        if each.style is Style.COLWISE:
            key = (each.module.rpartition(".")[0], param.shape[1], param.dtype)
            if key not in inputs:
                inputs[key] = None
                numel = tokens * param.shape[1]
                if sequence:
                    yield one(ALL_GATHER, "forward", each.module, numel, param)
                yield one(REDUCE_SCATTER if sequence else ALL_REDUCE, "backward", each.module, numel, param)
        elif each.style in (Style.ROWWISE, Style.VOCAB):
            seen.add(each.module)
            numel = tokens * param.shape[0 if each.style is Style.ROWWISE else 1]
            yield one(REDUCE_SCATTER if sequence else ALL_REDUCE, "forward", each.module, numel, param)
            if sequence:
                yield one(ALL_GATHER, "backward", each.module, numel, param)


def _experts(model: ParallelModel, rank: int, tokens: int, dtype: str | None, count: int) -> Iterator[Traffic]:
    """The traffic of "ep" for one microbatch: to the experts and back, in forward and in backward."""
    part = model.part(rank)
    num_bytes = _activation_bytes(model, tokens * count, dtype)
    for unit in part.units:
        if unit in model.expert_units:
            for phase in ("forward", "backward"):
                yield Traffic(EXPERT, ALL_TO_ALL, phase, unit, 2, num_bytes, model.mesh.group(rank, EXPERT))


def _sends(model: ParallelModel, rank: int, tokens: int, dtype: str | None) -> Iterator[Traffic]:
    """The traffic of "pp" for one microbatch."""
    coordinate = model.mesh.coordinate(rank)
    num_bytes = _activation_bytes(model, tokens, dtype)
    for phase, to in (("forward", 1), ("backward", -1)):
        stage = coordinate[PIPELINE] + to
        if 0 <= stage < model.mesh.size(PIPELINE):
            peer = model.mesh.rank(coordinate | {PIPELINE: stage})
            yield Traffic(PIPELINE, SEND, phase, "", 1, num_bytes, (rank, peer))


def _activation_bytes(model: ParallelModel, tokens: int, dtype: str | None) -> int:
    """Bytes of the residual stream of so many tokens on one rank, which has its positions alone under sequence parallelism."""
    if model.width is None:
        raise PlanError(
            f"model {model.shapes.name!r}: the width of activations follows from a module of style 'vocab' or 'rowwise', and "
            "there is none; state the style of one"
        )
    held = -(-tokens // model.mesh.size(TENSOR)) if model.has_sequence else tokens
    return held * model.width * itemsize(dtype or model.shapes.params[0].dtype)


def by_kind(traffic: Sequence[Traffic]) -> dict[tuple[str, str], list[Traffic]]:
    """Traffic by axis and kind."""
    found: dict[tuple[str, str], list[Traffic]] = defaultdict(list)
    for each in traffic:
        found[each.axis, each.kind].append(each)
    return dict(found)

"""Correct pairs of runs, and faults with the answers that are expected. Frozen before anything was compared."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crossframe.cli import entry
from experiments.parallelism.cases import Fault
from experiments.parallelism.second.training import STEPS, Run
from experiments.untouched import forked

_SCRIPT = Path(__file__).with_name("scripts") / "train.py"
TIMEOUT = 120


@dataclass(frozen=True)
class ScriptRun:
    """A run of `scripts/train.py`, which `crossframe record` records unchanged.

    Attributes:
        form: the first argument of the script. fault: the second.
        dtype: that of the script. options: what the run has beside its form and dtype, in words.
    """

    form: str
    fault: str = ""
    dtype: str = "float64"
    options: str = "dense"

    @property
    def on_one_device(self) -> "ScriptRun":
        return replace(self, form="one-microbatches" if self.form == "interleaved" else "one", fault="")

    @property
    def num_ranks(self) -> int:
        return 1 if self.form.startswith("one") else 2

    def targets(self, path: Path, log: Path) -> list[tuple[Any, ...]]:
        """The command that records the ranks in a folder."""
        options = ["--output", str(path), "--every", "1", "--dense", str(STEPS)]
        options += ["--nproc-per-node", str(self.num_ranks)] if self.num_ranks > 1 else []
        given = ["record", str(_SCRIPT), *options, "--", self.form, self.fault]
        return [(forked.command, entry.run, given, log, TIMEOUT)]


CLEAN: tuple[Any, ...] = (
    Run("pp-interleaved"),
    Run("pp-interleaved", experts=True, clip=True),
    Run("pp-interleaved-torch"),
    Run("pp-interleaved-ours", "float32"),
    Run("pp-interleaved-tp"),
    Run("pp-tied"),
    Run("cp"),
    Run("cp-head-tail", "float32"),
    Run("cp-tp"),
    Run("cp-torch"),
    Run("cp-ours"),
    Run("ep-hand", experts=True),
    Run("ep-dispatch-torch", experts=True),
    Run("ep-dispatch-ours", "float32", experts=True),
    Run("hsdp"),
    Run("sp-loss"),
    Run("sp-loss-torch", "float32"),
    Run("megatron", dropout=True),
    Run("megatron-sp"),
    Run("megatron-ddp"),
    ScriptRun("interleaved"),
    ScriptRun("context"),
)


def _fault(name: str, what: str, form: str, *places: str, dtype: str = "float64", **options: Any) -> Fault:
    settings = {key: options.pop(key) for key in ("experts", "clip", "dropout") if key in options}
    return Fault(name, what, Run(form, dtype, fault=name, **settings), places, **options)


def _gradient(*names: str) -> tuple[str, ...]:
    return tuple(f"{phase}/* {name}" for name in names for phase in ("backward", "reduce"))


FAULTS = (
    _fault(
        "stale_chunk",
        "The third stage, the second one of its rank, computes each microbatch on the values of the one before.",
        "pp-interleaved",
        "forward/input layers.2*",
    ),
    _fault(
        "stage_divisor",
        "The loss is divided by the number of stages of a rank.",
        "pp-interleaved",
        "backward/*",
        "reduce/*",
    ),
    _fault(
        "microbatch_order",
        "The last stage takes the targets of the microbatches in another order.",
        "pp-interleaved-torch",
        "forward/loss*",
    ),
    _fault(
        "microbatch_rank",
        "The first stage takes the samples of the other data-parallel rank.",
        "pp-interleaved-ours",
        "batch/*",
        "forward/loss*",
        "forward/input embed_tokens",
        dtype="float32",
        verdicts=("bug", "incomparable"),
    ),
    _fault(
        "tied_gradient",
        "The gradients of the embedding on the first stage and of the head on the last one, which are tied, are not summed.",
        "pp-tied",
        *_gradient("embed_tokens.weight", "lm_head.weight"),
        axis="pp",
        ranks=(1,),
    ),
    _fault(
        "axis_divisor",
        "Gradients are divided by the number of data-parallel ranks, although context-parallel ranks are averaged too.",
        "cp-ours",
        "reduce/*",
    ),
    _fault(
        "context_chunk",
        "Each rank computes another rank's part of the sequence, with its own targets.",
        "cp-tp",
        "batch/*",
        "forward/input embed_tokens",
        verdicts=("bug", "incomparable"),
    ),
    _fault(
        "context_mask",
        "The mask takes a rank's queries for those of the first positions.",
        "cp",
        "forward/input layers.0.self_attn.o_proj",
        "forward/output layers.0.self_attn",
    ),
    _fault(
        "context_positions",
        "Rotary embeddings are of the positions in the order of ranks, although parts are taken from both ends.",
        "cp-head-tail",
        "forward/input rotary",
        "forward/output rotary",
        "forward/input layers.0.self_attn.o_proj",
        "forward/output layers.0.self_attn",
    ),
    _fault(
        "context_gradient",
        "The gradient of the last norm is not averaged over the ranks that divide positions.",
        "cp-tp",
        *_gradient("norm.weight"),
        axis="cp",
        ranks=(2, 3),
    ),
    _fault(
        "expert_group",
        "Gradients of experts are summed over the ranks that have different experts.",
        "ep-hand",
        *_gradient(*(f"layers.{i}.mlp.experts.{name}" for i in range(4) for name in ("up", "down"))),
        experts=True,
        axis="dp",
        ranks=(2, 3),
    ),
    _fault(
        "router_sum",
        "The gradients of routers are not averaged over data-parallel ranks.",
        "ep-dispatch-ours",
        *_gradient("layers.*.mlp.router.weight"),
        experts=True,
        axis="dp",
        ranks=(1, 2, 3),
    ),
    _fault(
        "dispatch_order",
        "Rows are sent back in the order of experts instead of the order in which they came.",
        "ep-dispatch-torch",
        "forward/output layers.0.mlp",
        "forward/output layers.0.mlp.experts",
        experts=True,
    ),
    _fault(
        "replica_gradient",
        "Gradients are not summed over the replicas of hybrid sharding.",
        "hsdp",
        "reduce/*",
        axis="replicate",
        ranks=(2, 3),
    ),
    _fault(
        "norm_weight",
        "One norm's gradients are not summed over the ranks that divide positions.",
        "sp-loss",
        *_gradient("layers.1.post_attention_layernorm.weight"),
        axis="tp",
        ranks=(1,),
    ),
    _fault(
        "row_backward",
        "Backward of the last row-parallel layer does not gather the gradient of the other ranks' positions.",
        "sp-loss-torch",
        *_gradient("layers.3.mlp.*"),
    ),
    _fault(
        "final_norm",
        "The last norm is not marked as one whose gradients are summed over the ranks that divide positions.",
        "megatron-sp",
        *_gradient("final_layernorm.weight", "final_layernorm.bias"),
        axis="tp",
        ranks=(1,),
    ),
    _fault(
        "dropout_group",
        "The ranks that divide layers have different seeds where dropout must agree.",
        "megatron",
        "forward/output layers.0.dropout",
        dropout=True,
        axis="tp",
        ranks=(1,),
    ),
    _fault(
        "own_max",
        "The cross-entropy over a divided vocabulary subtracts each rank's own maximum.",
        "megatron",
        "forward/loss*",
    ),
    _fault(
        "vocabulary_mask",
        "Tokens of another rank's vocabulary add this rank's rows.",
        "megatron",
        "forward/output embedding",
        dtype="float32",
    ),
    _fault(
        "stride",
        "Gate and input of the first MLP are divided as one weight instead of one after the other.",
        "megatron",
        "parameters/* layers.0.mlp.linear_fc1.*",
        verdicts=("bug", "incomparable"),
    ),
    _fault(
        "data_group",
        "DDP does not average the gradient of one bias.",
        "megatron-ddp",
        *_gradient("output_layer.bias"),
        axis="dp",
        ranks=(2, 3),
    ),
    Fault(
        "script_scale",
        "The schedule does not divide gradients by the number of microbatches.",
        ScriptRun("interleaved", "script_scale"),
        ("backward/*", "reduce/*"),
    ),
    Fault(
        "script_average",
        "The gradient of the head is summed instead of averaged over the ranks that divide positions.",
        ScriptRun("context", "script_average"),
        ("reduce/* lm_head.weight",),
    ),
)

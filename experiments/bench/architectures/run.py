"""`python -m experiments bench architectures`: train every architecture of transformers under torch's FSDP and under ours.

Each model is trained three steps on two ranks by both sides from the same values: AdamW, clipping, dropout as the model has it.
Losses, the clipped norm, this rank's gradients and parameters must be equal in every bit at each step. Where a tensor enters
several units, such as the encoder's output the blocks of a decoder, torch adds its gradients in another order than the
unsharded model, and ours in the model's order: such a case is trained again with equal batches on both ranks, where ours must
equal the unsharded model in every bit of its gradients.
"""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
from rich.console import Console
from torch import Tensor, nn

from crossframe.errors import UsageError
from experiments.bench.architectures.small_models import NotBuilt, architectures, batch_of, build, units_of
from experiments.bench.command import command_line, torch_machine, torch_machine_line
from experiments.bench.ranks import GLOO, on_ranks

STEPS, SECONDS = 3, 90
SIDES = ("torch.distributed.fsdp", "torch_backend")
FSDP2, BFLOAT16, FSDP1 = VARIANTS = ("FSDP2", "FSDP2, bfloat16", "FSDP1")
EQUAL, AS_UNSHARDED, NOT_BUILT = "equal", "equal to the unsharded model, where torch is not", "not built"
TORCH_RAISES, DIFFERS = "torch raises", "differs"


@dataclass(frozen=True)
class Answer:
    """What one architecture gives in one variant.

    Attributes:
        outcome: EQUAL, AS_UNSHARDED, NOT_BUILT, TORCH_RAISES, DIFFERS or "failed".
    """

    kind: str
    model: str
    variant: str
    outcome: str
    why: str = ""

    @property
    def is_fine(self) -> bool:
        """Whether ours is as it should be, as far as torch lets one say."""
        return self.outcome in (EQUAL, AS_UNSHARDED, NOT_BUILT, TORCH_RAISES)


def run_architectures(console: Console, names: Sequence[str] = (), *, output: Path | None = None) -> int:
    """Train and compare; 0 if ours is as it should be in all of them.

    Args:
        names: types of models; none is all.
        output: a Markdown file for the table, and beside it JSON.

    Raises:
        UsageError: names that transformers does not have.
    """
    every, began = list(architectures()), time.monotonic()
    if unknown := set(names) - {name for _, name in every}:
        raise UsageError(
            f"expected types of models that transformers {version('transformers')} has, got {sorted(unknown)}"
        )
    answers: list[Answer] = []
    built: set[str] = set()
    for kind, name in every:
        if name in built or (names and name not in names):
            continue
        found = _answers(kind, name)
        if found[0].outcome != NOT_BUILT:
            built.add(name)
        answers += found
        for each in found:
            if not each.is_fine:
                line = f"{each.kind} {each.model}, {each.variant}: {each.outcome}. {each.why}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        if output is not None:
            _write(output, answers)
    console.print(f"{_counts(answers)}; {time.monotonic() - began:.0f} s", highlight=False)
    return int(not all(each.is_fine for each in answers))


def _answers(kind: str, name: str) -> list[Answer]:
    """One answer for each variant; a single one if the model is not built."""
    found = []
    for variant, (outcome, why) in zip(VARIANTS, _outcomes(kind, name, VARIANTS), strict=False):
        if outcome == DIFFERS and variant != FSDP1 and _is_as_unsharded(kind, name, variant):
            outcome = AS_UNSHARDED
        found.append(Answer(kind, name, variant, outcome, why))
    return found


def _outcomes(kind: str, name: str, variants: Sequence[str]) -> list[tuple[str, str]]:
    try:
        of_ranks = on_ranks(2, GLOO, _train_both, kind, name, variants)
    except UsageError as error:
        if len(variants) > 1:  # which of them?
            return [_outcomes(kind, name, [variant])[0] for variant in variants]
        return [("failed", " ".join(str(error).split())[-600:])]
    return [next((each for each in both if each[0] != EQUAL), both[0]) for both in zip(*of_ranks, strict=True)]


def _is_as_unsharded(kind: str, name: str, variant: str) -> bool:
    """Whether ours has the gradients of the unsharded model and torch has not, with equal batches on both ranks."""
    try:
        of_ranks = on_ranks(2, GLOO, _beside_unsharded, kind, name, variant)
    except UsageError:
        return False
    return all(ours for _, ours in of_ranks) and not all(theirs for theirs, _ in of_ranks)


def _train_both(rank: int, kind: str, name: str, variants: Sequence[str]) -> list[tuple[str, str]]:
    """Train both sides on one rank; returns the outcome of each variant and its reason."""
    signal.alarm(SECONDS)
    try:
        model = build(kind, name)
    except NotBuilt as error:
        return [(NOT_BUILT, str(error))]
    batches = [batch_of(kind, model, step, rank) for step in range(STEPS)]
    outcomes = []
    for variant in variants:
        try:
            theirs = _train(_sharded(import_module(SIDES[0]), build(kind, name), variant), batches, rank)
        except Exception as error:
            outcomes.append((TORCH_RAISES, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
            continue
        ours = _train(_sharded(import_module(SIDES[1]), build(kind, name), variant), batches, rank)
        different = _different(theirs, ours)
        outcomes.append((EQUAL, "") if different is None else (DIFFERS, different))
    return outcomes


def _beside_unsharded(rank: int, kind: str, name: str, variant: str) -> tuple[bool, bool]:
    """Whether the gradients of (torch, ours) are those of the unsharded model, with equal batches on both ranks."""
    signal.alarm(SECONDS)
    plain = build(kind, name)
    batch = batch_of(kind, plain, 0, 0)
    if variant == BFLOAT16:
        for param in plain.parameters():
            param.data = param.data.bfloat16()
        lower = {what: values.bfloat16() if values.is_floating_point() else values for what, values in batch.items()}
    _seed(7)
    plain(**(lower if variant == BFLOAT16 else batch)).loss.backward()
    expected = {path: param.grad for path, param in plain.named_parameters()}
    equal = []
    for api in SIDES:
        model = _sharded(import_module(api), build(kind, name), variant)
        _seed(7)
        model(**batch).loss.backward()
        grads = {path: None if param.grad is None else _full(param.grad) for path, param in model.named_parameters()}
        equal.append(
            all(_same(grad, None if (e := expected[path]) is None else e.float()) for path, grad in grads.items())
        )
    return equal[0], equal[1]


def _sharded(api: Any, model: nn.Module, variant: str) -> Any:
    options: dict[str, Any] = {}
    if variant == FSDP1:
        wrap = import_module(f"{api.__name__}.wrap")
        kinds = {type(unit) for unit in units_of(model)}
        if kinds:
            options["auto_wrap_policy"] = wrap.ModuleWrapPolicy(kinds)
        return api.FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"), **options)
    if variant == BFLOAT16:
        options["mp_policy"] = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for unit in units_of(model):
        api.fully_shard(unit, **options)
    return api.fully_shard(model, **options)


def _train(model: Any, batches: Sequence[dict[str, Tensor]], rank: int) -> list[dict[str, Tensor | None]]:
    """By step: the loss, the norm before clipping, and this rank's part of each gradient and parameter, by name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _seed(7 + rank)
    steps = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        clip = getattr(model, "clip_grad_norm_", None)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) if clip is None else clip(1.0)
        found: dict[str, Tensor | None] = {"the loss": loss.detach().clone(), "the norm": _full(norm)}
        for path, param in model.named_parameters():
            found[f"the gradient of {path}"] = None if param.grad is None else _local(param.grad)
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"parameter {path}": _local(param) for path, param in model.named_parameters()}
        steps.append(found)
    return steps


def _seed(number: int) -> None:
    """Dropout draws from torch's generator, masks of speech models from numpy's."""
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


def _different(theirs: Sequence[dict[str, Tensor | None]], ours: Sequence[dict[str, Tensor | None]]) -> str | None:
    """The first quantity that differs in any bit, with its size; None if there is none."""
    for step, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        if a.keys() != b.keys():
            return f"step {step}: only on one side: {sorted(a.keys() ^ b.keys())[:3]}"
        for what, x in a.items():
            y = b[what]
            if not _same(x, y):
                if x is None or y is None or x.shape != y.shape:
                    shapes = [None if each is None else tuple(each.shape) for each in (x, y)]
                    return f"step {step}: {what}: {shapes[0]} in torch, {shapes[1]} in ours"
                distance, size = (x.double() - y.double()).norm(), x.double().norm()
                return f"step {step}: {what} differs by {float(distance / size):.1e} of its norm"
    return None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Equal in dtype, shape and every bit; NaN equals NaN."""
    if a is None or b is None:
        return a is b
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num())
    )


def _local(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).clone()


def _full(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def _counts(answers: Sequence[Answer]) -> str:
    parts = []
    for variant in VARIANTS:
        counts = Counter(each.outcome for each in answers if each.variant == variant and each.outcome != NOT_BUILT)
        trained = sum(counts.values()) - counts[TORCH_RAISES]
        parts.append(f"{variant}: {counts[EQUAL]} of {trained} equal in every bit")
        if counts[AS_UNSHARDED]:
            parts[-1] += f" and {counts[AS_UNSHARDED]} {AS_UNSHARDED}"
    return "; ".join(parts)


def _write(output: Path, answers: Sequence[Answer]) -> None:
    lines = ["# Architectures of transformers under torch's FSDP and under ours", ""]
    lines += [f"`{command_line()}`: transformers {version('transformers')}; {torch_machine_line(torch_machine())}.", ""]
    lines += [f"{_counts(answers)}. Trained on two ranks, {STEPS} steps each.", ""]
    lines += ["| kind | model | variant | outcome | first difference, or the reason |", "|---|---|---|---|---|"]
    for each in answers:
        if each.outcome != EQUAL:
            lines.append(
                f"| {each.kind} | {each.model} | {each.variant} | {each.outcome} | {each.why.replace('|', ' ')} |"
            )
    for kind in dict.fromkeys(each.kind for each in answers):
        equal = Counter(each.model for each in answers if each.kind == kind and each.outcome == EQUAL)
        whole = sorted(name for name, count in equal.items() if count == len(VARIANTS))
        lines += ["", f"Equal in every bit in all variants, {kind}: {', '.join(whole) or 'none'}."]
    output.write_text("\n".join(lines) + "\n")
    output.with_suffix(".json").write_text(json.dumps([asdict(each) for each in answers], indent=0) + "\n")

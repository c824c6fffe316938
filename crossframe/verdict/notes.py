"""Sentences on differences between recordings that the comparison leaves out."""

from collections.abc import Iterator

from crossframe.recording.known_settings import GRADIENT_NORM, GROUPS, LOSSES
from crossframe.verdict.diagnosis.stated_optimizer import rule_of
from crossframe.verdict.measure.aligned_samples import in_place
from crossframe.verdict.measure.buffers import differing_at_first
from crossframe.verdict.measure.clipping import clipped_on_one_side
from crossframe.verdict.measure.comparable import differing_batches, exempt_on_one_side
from crossframe.verdict.measure.loss_scale import describe_repeats, scaled_on_one_side
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.need_not_agree import has_loss_alone
from crossframe.verdict.one_sided_tensors import recorded_on_one_side


def notes_of(pair: Pair, names: tuple[str, str], *, own: bool) -> Iterator[str]:
    """Differences between the recordings that do not affect the comparison.

    Args:
        own: whether both have names of their own that are the same.
    """
    optimizers = [recording.manifest.settings.get("optimizer") for recording in (pair.a, pair.b)]
    if (
        None not in optimizers
        and optimizers[0] != optimizers[1]
        and (rule := rule_of(pair.a)) == rule_of(pair.b)
        and rule
    ):
        text = " and ".join(f"{optimizer} in {name}" for optimizer, name in zip(optimizers, names, strict=True))
        yield f"the optimizer is {text}; both follow the rule of {rule}"
    if exempt := exempt_on_one_side(pair.a, pair.b):
        with_groups = names[0] if pair.a.manifest.settings.get(GROUPS) else names[1]
        yield (
            f"the weight decay of {len(exempt)} parameter{'s' * (len(exempt) > 1)} (first {exempt[0]!r}) is not compared: only "
            f"{with_groups} states an exemption from it, and the other recorder may not see one; updates are compared"
        )
    if has_loss_alone(pair.a, pair.b):
        name = names[pair.b.manifest.settings.get(LOSSES) == GRADIENT_NORM]
        yield f"losses and batches are not compared: {name} has the norm of the gradients that the optimizer gets instead"
    others, num_steps = differing_batches(pair.a, pair.b), 0 if has_loss_alone(pair.a, pair.b) else pair.num_steps
    known = range(num_steps if others is None else others.since)
    if (step := next((step for step in known if pair.reordered(step)), None)) is not None:
        if in_place(pair.a, pair.b, step):
            yield f"from step {step} on, one model is called with further arrays next to the same samples"
        else:
            yield (
                f"from step {step} on, ranks received the same samples in a different order, in other microbatches, or with "
                "other arrays; activations are matched by sample"
            )
    yield from recorded_on_one_side(pair, names, own=own and pair.a.manifest.framework == pair.b.manifest.framework)
    if texts := list(pair.of_other_shapes.values()):
        others = len(texts) - 1
        more = (
            f", and so {'do' if others > 1 else 'does'} {others} more activation{'s' * (others > 1)}" if others else ""
        )
        yield f"{texts[0]}{more}; these are not compared"
    if pair.routed:
        others = len(pair.routed) - 1
        more = f" and of {others} more module{'s' * (others > 1)}" if others else ""
        yield f"the rows of {next(iter(pair.routed))!r}{more} come in different orders; they are compared in one order"
    if pair.unmatched:
        (module, use), why = next(iter(pair.unmatched.items()))
        others = len(pair.unmatched) - 1
        more = f" and of {others} more activation{'s' * (others > 1)}" if others else ""
        yield f"the values of the {use} of {f'{module!r}' if module else 'the model'}{more} are not compared: {why}"
    if pair.unlike_buffers:
        name, why = next(iter(pair.unlike_buffers.items()))
        others = len(pair.unlike_buffers) - 1
        more = f" and {others} more buffer{'s' * (others > 1)}" if others else ""
        yield f"{name!r}{more}, which {'are' if others else 'is'} no parameter, {'are' if others else 'is'} not compared: {why}"
    if apart := differing_at_first(pair):
        more = f" and {len(apart) - 1} more buffers have" if len(apart) > 1 else " has"
        yield f"the buffer {apart[0]!r}{more} different values before the first step"
    if repeats := describe_repeats(pair, names):
        yield repeats
    for step in pair.steps:
        if (clipped := clipped_on_one_side(pair, step)) is not None:
            yield clipped.describe(names, step)
            break
    for step in pair.steps:
        if (scaled := scaled_on_one_side(pair, step)) is not None:
            yield scaled.describe(names, step)
            return

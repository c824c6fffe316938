"""The rules of alarms: what each finds, and healthy series on which it is quiet."""

import math

import numpy as np
import pytest

from crossframe.monitoring.alarm import QUIET_STEPS, Alarm, AlarmFilter, Kind
from crossframe.monitoring.gradients import EXPLOSION, MIN_PAST_STEPS, GradientRule
from crossframe.monitoring.losses import LossRule, num_recent
from crossframe.monitoring.parameters import ParameterRule

CURVE = 1 + 4 * np.exp(-np.arange(400) / 60)
NOISE = np.random.default_rng(0).normal(0, 0.05, 400)


def alarms_of(losses):
    """The step of the first alarm of each text, by its first words."""
    rule, found = LossRule(), {}
    for step, loss in enumerate(losses):
        if text := rule.add(float(loss)):
            found.setdefault(" ".join(text.split()[:4]), step)
    return found


def healthy(kind):
    losses = CURVE + NOISE
    match kind:
        case "spikes":
            losses[[50, 120, 121, 122, 123, 124, 300]] *= 20
        case "heavy tails":
            losses = CURVE + 0.02 * np.random.default_rng(1).standard_cauchy(400)
        case "no progress":
            losses = 2.3 + NOISE
        case "drift":
            losses[200:] += np.linspace(0, 0.3, 200)
        case "small step":
            losses = 2 + 0.05 * (np.arange(400) % 3 - 1)
            losses[200:] += 0.13
        case "negative":
            losses = losses - 10
    return losses


@pytest.mark.parametrize("kind", ["falling", "spikes", "heavy tails", "no progress", "drift", "small step", "negative"])
def test_healthy_losses_raise_no_alarm(kind):
    assert alarms_of(healthy(kind)) == {}


def test_a_jump_is_found_when_enough_losses_show_it():
    losses = CURVE + NOISE
    losses[250:] += 1.0
    assert alarms_of(losses) == {"the loss jumped: the": 250 + num_recent(64) - 1}


def test_a_slow_divergence_is_found_above_the_level_of_the_start():
    losses = CURVE + NOISE
    losses[100:] += 0.06 * np.arange(300)
    found = alarms_of(losses)
    assert 150 < found["the loss has diverged:"] < 300


def test_a_jump_that_undoes_little_of_the_training_is_left_to_the_reader():
    losses = CURVE + 0.001 * NOISE
    losses[380:] += 0.1
    assert alarms_of(losses) == {}
    losses[380:] += 0.2
    assert list(alarms_of(losses)) == ["the loss jumped: the"]


def test_losses_that_are_not_finite_end_the_comparison():
    losses = CURVE + NOISE
    losses[250], losses[251:] = math.nan, losses[251:] + 1.0
    assert alarms_of(losses) == {}
    before = [1.0] * 15 + [3.0] * 10 + [math.inf]
    assert last_text([*before, *[3.0] * 14]) == ""
    assert last_text([*before, *[3.0] * 15]).startswith("the loss has diverged: the last 15 values")


def last_text(losses):
    """What the rule says of the last loss, after none before it was wrong."""
    rule = LossRule()
    *before, text = [rule.add(loss) for loss in losses]
    assert not any(before)
    return text


def test_six_losses_above_sixty_four_are_a_jump():
    """C(64 + 6, 6) = 131,115,985 orders, of which one is this one; C(64 + 5, 5) = 11,238,513."""
    text = "the loss jumped: the last 6 values, 2 or more, all exceed the 64 before them, which are at most 1.5"
    losses = [1.0, 0.5, 1.5] * 24
    assert last_text([*losses, *[2.0] * 5]) == ""
    assert last_text([*losses, *[2.0] * 6]) == text
    assert last_text([9.0, *losses[-64:], *[2.0] * 6]) == text  # what is earlier does not count
    assert last_text([*losses[-63:], *[2.0] * 6]) == text.replace("64", "63")
    # Twice as far above the median of 1 as the largest of 1.5.
    assert last_text([*losses, *[1.999] * 6]) == ""


def test_a_jump_is_found_among_thirty_losses():
    """C(17 + 13, 13) = 119,759,850; C(18 + 12, 12) = 86,493,225, and C(29, m) is at most 77,558,760."""
    assert last_text([1.0] * 17 + [3.0] * 12) == ""
    text = "the loss jumped: the last 13 values, 3 or more, all exceed the 17 before them, which are at most 1"
    assert last_text([1.0] * 17 + [3.0] * 13) == text


def test_a_jump_loses_a_twentieth_of_the_gain():
    losses = [11.0] * 20 + [1.0] * 80  # a gain of 10, of which a twentieth is 0.5
    assert last_text([*losses, *[1.499] * 6]) == ""
    assert "the last 6 values, 1.5 or more" in last_text([*losses, *[1.5] * 6])
    assert "the last 6 values, 1.01 or more" in last_text([*[1.0] * 70, *[1.01] * 6])  # nothing was gained


def test_a_divergence_states_the_level_of_the_start():
    assert last_text([1.0] * 15 + [3.0] * 14) == ""
    assert last_text([1.0] * 15 + [3.0] * 15).startswith("the loss has diverged: the last 15 values, 3 or more")
    losses = [1.0, 0.5, 1.5] * 5 + [1.2 + 0.1 * i for i in range(23)]  # 2 is twice as far above 1 as 1.5
    text = "the loss has diverged: the last 15 values, 2 or more, all exceed the first 15 of the run, which are at most 1.5"
    assert last_text(losses) == text


def gradients(change, *, epsilon=None, steps=MIN_PAST_STEPS + 4):
    """What the rule says of unit "b" at each step; `change` is the norm of its gradient, or None where it has none."""
    rule, said = GradientRule(epsilon), []
    for step in range(steps):
        norm = change(step)
        found = rule.add({"a": (1.0 + 0.1 * (step % 3), 100)} | ({} if norm is None else {"b": (norm, 100)}))
        assert set(found) <= {"b"} and all(found.values())
        said.append(found.get("b", ""))
    return said


def test_gradients_with_spikes_and_a_common_decrease_raise_no_alarm():
    assert not any(gradients(lambda step: 1.0 if step != 6 else EXPLOSION / 2))
    assert not any(gradients(lambda step: 0.0 if step in (0, 6) else 1.0))  # begins with zeros, and is unused once
    assert not any(gradients(lambda step: None if step in (0, 1, 2, 6) else 1.0))  # frozen at first, and unused once
    assert not any(gradients(lambda step: 1e-6 * 200.0 ** min(step, 3)))  # grows from nearly zero at the start
    rule = GradientRule(None)
    for step in range(MIN_PAST_STEPS + 4):  # another unit explodes, and this one does not vanish
        found = rule.add({"a": (1.0 if step < 6 else 1e6, 100), "b": (1.0, 100)})
        assert "b" not in found
    rule = GradientRule(1e-8)
    assert not any(rule.add({"a": (10.0**-step, 9), "b": (10.0**-step, 9)}) for step in range(12))


def test_what_is_usual_is_that_of_the_last_steps():
    said = gradients(lambda step: 1.0 if step < 80 else 0.01 if step < 150 else 1e-6, steps=154)
    assert not any(said[:150]) and said[-1].endswith("usually 0.0091")  # next to a gradient of 1.1


@pytest.mark.parametrize(
    ("change", "epsilon", "text", "step"),
    [
        pytest.param(lambda s: 1.0 if s < 6 else 200.0, None, "explodes: its norm is 200", 6, id="explodes"),
        pytest.param(lambda s: 1.0 if s < 6 else 0.0, None, "exactly zero", 7, id="zero"),
        pytest.param(lambda s: 1.0 if s < 6 else None, None, "the unit no longer has one", 7, id="lost"),
        pytest.param(lambda s: 1.0 if s < 6 else 1e-5, None, "of the norm of all gradients", 7, id="share"),
        pytest.param(lambda s: 1e-8, 1e-8, "the optimizer's epsilon of 1e-08", 1, id="epsilon"),
    ],
)
def test_a_gradient_that_explodes_or_vanishes_is_found(change, epsilon, text, step):
    said = gradients(change, epsilon=epsilon)
    assert next(i for i, each in enumerate(said) if each) == step and text in said[step]


def test_parameters_that_jump_are_found_and_those_that_grow_are_not():
    def said(norm_of, steps=12):
        rule = ParameterRule()
        return [rule.add({"a": 1.0, "b": norm_of(step)}).get("b", "") for step in range(steps)]

    found = said(lambda step: 2.0 if step < 8 else 1e9)
    assert [bool(each) for each in found] == [step == 8 for step in range(12)]
    assert "1e+09, 5e+08 times the largest of 8 earlier steps" in found[8]
    assert not any(
        said(lambda step: 0.0 if step < 7 else 10.0 ** (step - 7))
    )  # zeros at first, then many steps of growth
    assert not any(said(lambda step: 2.0 if step < 8 else math.nan))


def test_gradients_explode_at_a_hundred_times_the_largest():
    def last(norms):
        rule = GradientRule(None)
        return [rule.add({"a": (norm, 1)}) for norm in norms][-1]

    text = "explodes: its norm is 200, 100 times the largest of 5 earlier steps"
    assert last([1.0, 2.0, 1.0, 0.0, 1.0, 1.0, 200.0]) == {"a": text}
    assert last([1.0, 2.0, 1.0, 0.0, 1.0, 1.0, 199.9]) == {}
    assert last([1.0, 2.0, 1.0, 0.0, 1.0, 200.0]) == {}  # too few that are not zero


@pytest.mark.parametrize(
    ("other", "norm", "text"),
    [
        # A thousandth of the usual share of 0.6 is 6e-4.
        pytest.param(1.0, 5.9e-4, "vanishes: it is 0.00059 of the norm of all gradients, and usually 0.6", id="share"),
        pytest.param(1.0, 6.1e-4, "", id="larger share"),
        # A tenth of the usual norm of 0.6, next to a unit that explodes.
        pytest.param(1e3, 0.0599, "vanishes: it is 6e-05 of the norm of all gradients, and usually 0.6", id="norm"),
        pytest.param(1e3, 0.06, "", id="a tenth of the norm"),
    ],
)
def test_a_gradient_vanishes_by_its_share_and_norm(other, norm, text):
    for earlier in (4, 5):
        rule = GradientRule(None)
        for _ in range(earlier):
            assert rule.add({"a": (0.8, 1), "b": (0.6, 1)}) == {}
        rule.add({"a": (other, 1), "b": (norm, 1)})
        assert rule.add({"a": (other, 1), "b": (norm, 1)}).get("b", "") == (text if earlier == 5 else "")


@pytest.mark.parametrize(
    ("large", "small", "found"),
    [
        pytest.param(1.01e-5, 0.99e-8, True, id="vanishes"),
        pytest.param(0.99e-5, 0.99e-8, False, id="not a thousand epsilon elsewhere"),
        pytest.param(1.01e-5, 1.01e-8, False, id="not less than epsilon"),
    ],
)
def test_root_mean_squares_are_compared_with_epsilon(large, small, found):
    rule = GradientRule(1e-8)
    units = {"a": (2 * large, 4), "b": (3 * small, 9)}  # the norm of n elements is sqrt(n) times as large
    assert rule.add(units) == {}
    text = (
        "vanishes: the root mean square of its elements is 9.9e-09, less than the optimizer's epsilon of 1e-08, and 1e-05 in "
        "another unit"
    )
    assert rule.add(units) == ({"b": text} if found else {})


def test_what_is_usual_is_of_sixty_four_steps():
    def said(small):
        rule = GradientRule(None)
        for share in [1.0] * 33 + [0.01] * small:
            rule.add({"a": (1.0, 1), "b": (share, 1)})
        rule.add({"a": (1.0, 1), "b": (1e-6, 1)})
        return rule.add({"a": (1.0, 1), "b": (1e-6, 1)})["b"]

    assert said(31).endswith("usually 0.71")  # 33 of 64: 1 / sqrt(2)
    assert said(32).endswith("usually 0.36")  # 32 of 64: the mean with 0.01
    assert said(33).endswith("usually 0.01")


def test_steps_without_finite_gradients_are_not_remembered():
    rule = GradientRule(None)
    for norm in (1.0, 0.0, math.inf, 1.0, 0.0, 1.0, 0.0, 1.0):
        assert rule.add({"a": (norm, 1), "b": (norm, 0)}) == {}
    assert rule.add({"a": (100.0, 1)}) == {}
    rule.add({"a": (1.0, 1)})
    assert set(rule.add({"a": (1e4, 1)})) == {"a", "b"}


def test_parameters_jump_at_a_hundred_times_the_largest():
    def last(norms):
        rule = ParameterRule()
        return [rule.add({"a": norm}) for norm in norms][-1]

    text = (
        "jump: their norm is 200, 100 times the largest of 5 earlier steps: something else than the optimizer wrote to them, or "
        "training diverges"
    )
    assert last([1.0, 2.0, 1.0, 0.0, 1.0, 1.0, 200.0]) == {"a": text}
    assert last([1.0, 2.0, 1.0, 0.0, 1.0, 1.0, 199.9]) == {}
    assert last([1.0, 2.0, 1.0, 0.0, 1.0, 200.0]) == {}


def test_kinds_of_alarms_are_words_in_json():
    kinds = ["not finite", "ranks disagree", "baseline", "loss", "gradient", "optimizer"]
    assert [Alarm(kind, 7, "block", "a text").to_json() for kind in Kind] == [
        {"kind": kind, "step": 7, "subject": "block", "text": "a text"} for kind in kinds
    ]


def test_alarms_are_raised_again_after_sixty_four_steps():
    for pause, raised in ((63, []), (64, [72])):
        ongoing = AlarmFilter()
        alarms = {step: [Alarm(Kind.LOSS, step, "", "")] * 2 for step in (7, 8, 8 + pause)}
        found = [ongoing.new(step, [Kind.LOSS], alarms.get(step, [])) for step in range(100)]
        assert [alarm.step for each in found for alarm in each] == [7, *raised]


def test_an_alarm_that_goes_on_is_raised_once_and_again_after_a_pause():
    ongoing, raised = AlarmFilter(), []
    for step in range(300):
        holds = step in range(10, 40) or step in range(60, 70) or step >= 200
        alarms = [Alarm(Kind.LOSS, step, "", "")] if holds else []
        raised += [alarm.step for alarm in ongoing.new(step, [Kind.LOSS], alarms)]
    assert raised == [10, 200] and QUIET_STEPS > 60 - 40


def test_an_alarm_goes_on_between_recorded_steps():
    ongoing, raised = AlarmFilter(), []
    for step in range(0, 500, 10):
        recorded = step % 100 == 0
        alarms = [Alarm(Kind.GRADIENT, step, "block", "")] if recorded and step in (100, 200, 400) else []
        raised += [alarm.step for alarm in ongoing.new(step, [Kind.GRADIENT] * recorded, alarms)]
    assert raised == [100, 400]

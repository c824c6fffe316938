"""The catalogue of faults: well formed, each a change that is undone, and some of each family found from end to end."""

# pyright: reportArgumentType=false
import os
import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from crossframe.errors import UsageError
from crossframe.recording import Recording
from crossframe.recording.event_format import TENSOR_USES
from crossframe.replacing import replacing
from crossframe.verdict import Divergence, PairVerdict, Verdict, compare
from crossframe.verdict.result import Judged
from experiments.faults.catalogue import FAMILIES, FAULTS, check_fault, fault_in_effect
from experiments.faults.catalogue.fault import ALL_DTYPES, JAX, TORCH, Answer, other_batches
from experiments.faults.clean import MODELS, SEEDS, kind_of, pairs_of, runs_of
from experiments.faults.judging import Found, is_localised, loss_differs, parameters_close
from experiments.faults.run import References, in_order, judge_fault, settings_of
from experiments.faults.table import table
from experiments.parity.settings import RunSettings
from tests.across.helpers.recorded import record_with_jax, record_with_torch
from tests.conftest import EXHAUSTIVE

PHASES = {*TENSOR_USES, "forward", "norm", ""}
EVENTS = {"all_gather", "input", "output", "loss", "backward", "reduce_scatter", "grad_norm", "state", "optimizer", ""}
SIGNATURES = {
    *("constant_factor", "transposed", "padding_shift", "stale_copy", "missing_rank", "low_precision_reduction"),
    *("tied_weight", "mixed_parameters", "weight_decay", "optimizer_epsilon", "bias_correction", "lost_step"),
    *("norm_epsilon", "tanh_gelu", "dropout", "other_batches"),
}
ALL = sorted(FAULTS)
# `python -m experiments faults` runs all.
SHORT = ("moments_lost",)
if os.environ.get(EXHAUSTIVE):
    SHORT += (
        "sum_gradients",
        "dropout_left_on",
        "step_skipped",
        "stale_gradient",
        "gradient_transposed",
        "a_step_ahead",
    )


def test_there_are_enough_and_of_every_family():
    assert len(FAULTS) >= 45 and len(FAULTS) == sum(len(family.faults) for family in FAMILIES)
    assert all(len(family.faults) >= 5 for family in FAMILIES)
    assert len({fault.description for fault in FAULTS.values()}) == len(FAULTS)
    assert sum(bool(fault.source) for fault in FAULTS.values()) >= 40
    # Some act on one rank, some begin late, some on one unit alone.
    answers = [fault.answer for fault in FAULTS.values()]
    assert sum(answer.rank is not None for answer in answers) >= 4
    assert sum(answer.step >= 2 for answer in answers) >= 4
    assert sum(bool(answer.unit) for answer in answers) >= 10


@pytest.mark.parametrize("name", ALL)
def test_a_fault_says_what_must_be_said_of_it(name):
    fault, answer = FAULTS[name], FAULTS[name].answer
    assert fault.name == name and fault.frameworks and set(fault.frameworks) <= {TORCH, JAX}
    assert not fault.source or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", fault.source)
    assert answer.phase in PHASES and answer.event in EVENTS and answer.signature in SIGNATURES | {None}
    assert "float64" in fault.dtypes and set(fault.dtypes) <= set(ALL_DTYPES)
    settings = settings_of(fault, "float64")
    assert answer.step < settings.steps <= settings.dense, "a step that is not recorded in full shows nothing"
    settings.manifest(fault.frameworks[0], ())
    units = {"", *settings.definition.units}
    assert answer.unit is None or answer.unit in units
    # The reference is the same training without it.
    assert settings.definition.numel < 20_000


@pytest.mark.parametrize("name", ALL)
def test_a_fault_is_put_in_and_taken_out_again(name, monkeypatch):
    open_ones = []

    def watching(owner, attribute, new):
        def told():
            before = getattr(owner, attribute, None)
            open_ones.append((owner, attribute))
            with right(owner, attribute, new):
                assert vars(owner)[attribute] is new
                yield
            after = getattr(owner, attribute, None)
            assert after is before or after == before, (owner, attribute)

        return contextmanager(told)()

    right = replacing
    for family in (
        "core",
        "torch_engine",
        "jax_engine",
        "models_torch",
        "models_jax",
        "optimizers",
        "data",
        "checkpoints",
        "held_out",
        "held_out_models",
        "fault",
    ):
        monkeypatch.setattr(f"experiments.faults.catalogue.{family}.replacing", watching)
    with fault_in_effect(name):
        assert open_ones, "it changes nothing"


def test_unknown_faults_and_those_of_the_other_framework_are_refused():
    with pytest.raises(UsageError, match=r"unknown fault 'gelu_by_er': expected one of \d+, for instance gelu_by_erf"):
        check_fault("gelu_by_er")
    with pytest.raises(UsageError, match="gelu_by_erf is a fault in torch, not in jax; pass --fault-in torch"):
        RunSettings("gpt-tiny", fault="gelu_by_erf").manifest("jax", ())
    check_fault("sum_gradients", "torch")
    check_fault("sum_gradients", "jax")
    check_fault("", "jax")


# Models: each fault changes what a step computes, bit by bit


def _torch_step(model):
    import torch
    from torch.nn import functional

    definition = RunSettings(model).definition
    module = definition.make_torch()[0].double()
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(torch.from_numpy(definition.initial_params(0, "float64")[name]))
    batch = definition.batch(0, 0, 0, 1, 4, "float64")
    inputs = torch.from_numpy(batch.inputs)
    logits = module(inputs if inputs.is_floating_point() else inputs.long())
    functional.cross_entropy(logits.flatten(0, -2), torch.from_numpy(batch.targets).long().flatten()).backward()
    grads = [param.grad for param in module.parameters()]
    return [logits.detach().numpy(), *(np.zeros(0) if grad is None else grad.numpy() for grad in grads)]


@pytest.mark.parametrize("name", [f.name for f in FAMILIES[4].faults if "torch" in f.frameworks] + ["scaled_by_255"])
def test_a_fault_of_a_model_changes_its_step(name):
    model = settings_of(FAULTS[name], "float64").model
    right = _torch_step(model)
    with fault_in_effect(name):
        wrong = _torch_step(model)
    again = _torch_step(model)
    assert any(a.tobytes() != b.tobytes() for a, b in zip(right, wrong, strict=True))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(right, again, strict=True))


# From end to end


class Here:
    """Records with ranks that run already, and with the JAX of this process."""

    def __init__(self, ranks):
        self._ranks = ranks

    def record(self, framework, settings, path, perturbed_runs=0):
        for run, where in settings.runs(path, perturbed_runs):
            record_with_torch(self._ranks, run, where) if framework == TORCH else record_with_jax(run, where)


@pytest.fixture(scope="module")
def references(ranks, tmp_path_factory):
    return References(Here(ranks), tmp_path_factory.mktemp("clean"), "float64")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHORT)
def test_faults_are_found_and_named(ranks, references, tmp_path, name):
    said = judge_fault(FAULTS[name], "float64", Here(ranks), references, tmp_path / "faulty")
    assert said.detected and said.localised, said
    assert said.diagnosed in (None, True), said
    assert said.sketched == said.verdict, said


@pytest.mark.exhaustive
def test_right_runs_agree_also_with_sums_in_another_order(ranks, tmp_path):
    chosen = [run for run in runs_of("mlp", "float32", 0) if run.framework == TORCH and run.settings.world_size <= 2]
    assert [run.settings.rounding for run in chosen] == [0, 0, 0, 1001, 1002]
    opened = []
    for i, run in enumerate(chosen):
        Here(ranks).record(TORCH, run.settings, tmp_path / str(i), 4 if run.perturbed_runs else 0)
        opened.append(Recording.open(tmp_path / str(i)))
    said = [compare(opened[0], other).verdict.value for other in opened[1:]]
    assert set(said) <= {"rounding", "equal"}, said
    # Another order of sums is another run, though of the same values at its start.
    assert said[2] == "rounding"
    assert parameters_close(opened[0], opened[3]) and not loss_differs(opened[0], opened[3])


# Which runs, and how they are shown


def test_clean_pairs_are_more_than_two_hundred_and_share_their_samples():
    pairs = []
    for dtype in ("float32", "bfloat16"):
        for model in MODELS:
            for seed in SEEDS.get(model, (0,)):
                sets = runs_of(model, dtype, seed)
                pairs += pairs_of(sets)
                for run in sets:
                    samples = [run.settings.batch(1, rank).sample_ids for rank in range(run.settings.world_size)]
                    whole = sets[0].settings
                    expected = [whole.batch(1, rank).sample_ids for rank in range(whole.world_size)]
                    assert sorted(sum(samples, ())) == sorted(sum(expected, ()))
    assert len(pairs) >= 200
    assert all(a.perturbed_runs or b.perturbed_runs for a, b in pairs) and all(a != b for a, b in pairs)
    assert all(kind_of(a, b) for a, b in pairs)
    assert {(run.framework, run.settings.mesh or run.settings.world_size) for pair in pairs for run in pair} >= {
        (TORCH, 1), (TORCH, 3), (TORCH, 4), (TORCH, "2x2"), (JAX, 1), (JAX, 2), (JAX, 4), (JAX, "2x2"),
    }  # fmt: skip


def _found(
    fault="gelu_by_erf", verdict="bug", detected=True, localised=True, diagnosed=True, said="tanh_gelu", sketched="bug"
):
    rest = (True, False, 1.0)
    return Found(
        fault, "model", "torch", "float32", verdict, detected, localised, diagnosed, said, "step 0", sketched, *rest
    )


def test_the_table_counts_what_was_and_was_not_found():
    found = [
        _found(),
        _found("mask_one_off", localised=False, diagnosed=None, said="dropout", sketched="rounding"),
        _found("dropout_left_on", "rounding", False, False, False),
    ]
    text = table(found, 60)
    assert "2 of 3 (67 %) detected, 1 of 3 (33 %) localised exactly, 1 of 2 (50 %) of those with a sig" in text.totals
    assert "(1 others were given one all the same); sketches said the same of 1 of 3 (33 %)" in text.totals
    assert "3 of 3 (100 %) would have been seen, by losses 0 of 3 (0 %)" in text.totals
    line = "| `mask_one_off` | model, torch | float32 | bug | yes | **no** | - | step 0: dropout | **rounding** |"
    assert line in text.markdown
    assert "- `gelu_by_erf`: GELU by erf" in text.markdown and "(goodfire-ai/spd#624)" in text.markdown


def test_faults_are_judged_so_that_processes_are_started_seldom(tmp_path, monkeypatch):
    order = in_order(list(FAULTS.values()))
    changes = sum(
        settings_of(a, "float64").world_size != settings_of(b, "float64").world_size for a, b in pairwise(order)
    )
    assert changes == len({settings_of(fault, "float64").world_size for fault in order}) - 1

    class Broken:
        def record(self, framework, settings, path, perturbed_runs=0):
            raise UsageError("it ended")

    said = judge_fault(order[0], "float64", Broken(), References(Broken(), tmp_path, "float64"), tmp_path / "faulty")
    assert (said.verdict, said.detected) == ("failed", False) and "it ended" in said.why


# What counts as localised


def _said(
    parameter=None, unit="blocks.0", rank=1, step=0, phase="forward", event="input", name="input of blocks.0.mlp.down"
):
    where = Divergence(step, phase, rank, unit, parameter, 0, 4, event)
    judged = (
        Judged(0, "forward", "input", "", "input of the model", 0.0, 0.0, False, True),
        Judged(step, phase, event, unit, name, 1.0, 9.0, True, False),
    )
    return PairVerdict(
        "torch", "jax", "float64", 2, 5, Verdict.BUG, "", first_divergence=where, judged=judged, parted=judged[1]
    )


def test_only_the_place_itself_counts_as_localised():
    answer = FAULTS["dropout_left_on"].answer
    assert is_localised(_said(), answer)
    other = (
        {"unit": "blocks.1"},
        {"step": 1},
        {"event": "output", "name": "output of blocks.0.mlp.down"},
        {"phase": "backward"},
        {"name": "input of blocks.0.mlp"},
        {"name": "input of the model"},
    )
    for fields in other:
        assert not is_localised(_said(**fields), answer), fields
    assert not is_localised(replace(_said(), first_divergence=None), answer)
    # A parameter by its name, one rank by its number.
    answer = Answer("backward", "backward", unit="blocks.1", parameter="blocks.1.w", rank=1)
    of_w = {
        "phase": "backward",
        "event": "backward",
        "unit": "blocks.1",
        "parameter": "blocks.1.w",
        "name": "blocks.1.w",
    }
    assert is_localised(_said(**of_w), answer)
    assert not is_localised(_said(**of_w | {"rank": 0}), answer)
    assert not is_localised(_said(**of_w | {"parameter": "blocks.1.v"}), answer)
    # Where no single place is named, any will do.
    assert is_localised(_said(**of_w | {"unit": ""}), Answer("backward", "backward"))
    # Runs that were not fed the same have no place at which they part.
    assert is_localised(replace(_said(), first_divergence=None), other_batches())
    assert not is_localised(_said(), other_batches())


def test_a_right_run_shows_no_trace_of_a_checkpoint_that_it_went_on_from(ranks, tmp_path):
    settings = replace(settings_of(FAULTS["moments_lost"], "float64"), fault="")
    through = record_with_torch(ranks, replace(settings, resume_at=None), tmp_path / "through")
    resumed = record_with_torch(ranks, settings, tmp_path / "resumed")
    said = compare(through, resumed)
    assert said.verdict is Verdict.EQUAL, said.reason
    assert not (tmp_path / "resumed-checkpoints").exists()

"""`python -m experiments parallelism`: its cases and its command line, and layers that are divided by hand."""

from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossframe.recording import Recording
from crossframe.verdict import Verdict, compare
from experiments.cli.commands import app
from experiments.parallelism import model, training
from experiments.parallelism.cases import CLEAN, FAULTS

PROGRAM = Path(model.__file__).read_text() + Path(training.__file__).read_text()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_in_the_program(fault):
    assert f'"{fault.name}"' in PROGRAM and fault.run.form in training.FORMS


def test_each_form_of_a_fault_has_a_clean_pair():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.run.form for fault in FAULTS} <= {run.form for run in CLEAN}


def train(rank: int, world_size: int, run: training.Run, directory: Path) -> None:
    training.train(run, directory, perturbed_run=0)


@pytest.fixture(scope="module")
def recorded(ranks, tmp_path_factory):
    """Records a run, each once."""
    folder = tmp_path_factory.mktemp("recorded")

    @cache
    def record(run: training.Run) -> Recording:
        directory = folder / f"{run.form} {run.fault}".strip()
        ranks.run(training.FORMS[run.form].num_ranks, train, run, directory)
        return Recording.open(directory)

    return record


@pytest.mark.parametrize("form", [pytest.param("tp", marks=pytest.mark.exhaustive), "sp"])
def test_activations_of_layers_that_are_divided_by_hand_are_whole(recorded, form):
    one, divided = recorded(training.Run()), recorded(training.Run(form))
    found = compare(one, divided)
    # Under sequence parallelism each rank looks up its own positions, without a dim of samples.
    alone = ("the output of 'positions', which one alone recorded, is not compared",) if form == "sp" else ()
    assert found.verdict is Verdict.ROUNDING and found.notes == alone, found
    linear = ("layers.1.attention.query", "layers.1.attention.out")
    assert {(0, name, use) for name in linear for use in ("input", "output")} <= {*divided.activations(0)}


@pytest.mark.parametrize(
    ("form", "fault", "phase", "module", "text"),
    [
        pytest.param(
            *("tp", "row_not_reduced", "forward", "layers.1.attention_norm", "the input of module"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("tp", "tp_batches", "forward", None, "the batch in", marks=pytest.mark.exhaustive),
        ("sp", "norm_gradients", "reduce", None, "the reduced gradient of"),
    ],
)
def test_the_place_where_model_ranks_part_is_named(recorded, form, fault, phase, module, text):
    found = compare(recorded(training.Run()), recorded(training.Run(form, fault=fault)))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None, found
    assert (where.step, where.phase, where.module) == (0, phase, module), found
    assert f"at step 0 {text}" in found.reason and "mesh axis 'tp', rank 1 differs" in found.reason


def test_gradients_of_modules_after_the_last_unit_come_first(recorded):
    one = recorded(training.Run())
    assert one.backward_order[:4] == ["head.weight", "norm.bias", "norm.weight", "layers.1.mlp.down.bias"]
    assert one.backward_order[-2:] == ["positions.weight", "embed.weight"]
    found = compare(one, recorded(training.Run("sp", fault="sequence_chunk"))).first_divergence
    assert found is not None and (found.phase, found.parameter) == ("backward", "norm.bias")


def test_an_unknown_case_exits_with_2():
    result = CliRunner().invoke(app, ["parallelism", "none"])
    assert result.exit_code == 2 and "row_bias" in " ".join(result.output.split())

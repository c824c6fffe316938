"""`python -m experiments parallelism`: its cases and its command line. Programs of these kinds are recorded in tests/on_torch."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

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


def test_an_unknown_case_exits_with_2():
    result = CliRunner().invoke(app, ["parallelism", "none"])
    assert result.exit_code == 2 and "row_bias" in " ".join(result.output.split())

"""`python -m experiments kernels`: its faults change one line each, of a program that is there."""

import pytest
from typer.testing import CliRunner

from experiments.cli.commands import app
from experiments.kernels.faults import FAULTS, JAX, TORCH, text_of


@pytest.mark.parametrize("program", [TORCH, JAX])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_changes_one_line(fault, program):
    text, number = fault.applied(program)
    before, after = text_of(program).splitlines(), text.splitlines()
    assert [i for i, (x, y) in enumerate(zip(before, after, strict=True), 1) if x != y] == [number]


def test_an_unknown_fault_exits_with_2():
    result = CliRunner().invoke(app, ["kernels", "--fault", "none"])
    assert result.exit_code == 2 and "rms_epsilon" in " ".join(result.output.split())

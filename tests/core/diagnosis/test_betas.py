"""Another beta is called one, and not clipping; where both recordings state it, it is the setting that differs."""

import pytest

from crossframe.verdict import Verdict, compare
from tests.core.helpers.faulty import Faults, record


@pytest.mark.parametrize(("name", "value"), [("beta1", 0.5), ("beta2", 0.95)])
def test_another_beta_is_called_by_its_name(tmp_path, name, value):
    a = record(tmp_path / "a", clip=None)
    b = record(tmp_path / "b", Faults(**{name: value}), noise=1, clip=None)
    for pair in ((a, b), (b, a)):
        found = compare(*pair).diagnosis
        assert found and found.signature == "constant_factor"
        assert f"as with {name} = {value:g} instead of" in found.evidence and "clipped" not in found.evidence


def test_betas_that_both_state_are_the_difference(tmp_path):
    a = record(tmp_path / "a", other={"betas": [0.9, 0.999]})
    b = record(tmp_path / "b", Faults(beta2=0.95), noise=1, other={"betas": [0.9, 0.95]})
    found = compare(a, b)
    assert found.verdict is Verdict.INCOMPARABLE and found.diagnosis is None
    assert found.reason.startswith("betas differs: [0.9, 0.999] in a, [0.9, 0.95] in b")

"""What alignments of tests in this folder find is kept in found/, next to what each test asserts."""

from pathlib import Path
from typing import Any

import pytest

from crossframe.alignment import Alignment
from crossframe.param_map import ParamMap
from tests.core.helpers.kept_texts import keep_calls

FOLDER = Path(__file__).with_name("found")
OTHER_LAYERS = ("h.0.", "h.2.", "layers.0.", "layers.2.")


@pytest.fixture(autouse=True)
def kept_alignments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the results of the functions of alignment with those that are kept."""
    for name in ("align", "completed", "match_activations"):
        if request.path.stem != "test_portions":  # which keeps maps of its own
            keep_calls(request, monkeypatch, name, FOLDER, told)


def told(found: Any) -> str:
    """The entries of a map, or matches, one after the other, without those of the first and the last layer."""
    if isinstance(found, Alignment):
        lines = [f"{told(found.param_map)}", *(f"{name} by {why}" for name, why in found.evidence.items())]
        lines += [f"{each.names} and {each.paths} are undecided: {each.why}" for each in found.undecided]
    elif isinstance(found, ParamMap):
        lines = [f"{each.name}: {' + '.join(each.paths)} by {each.pattern}, {each.rows}" for each in found.entries]
    elif isinstance(found, dict):
        lines = [f"{ours}: {theirs} by {form and form.text}" for ours, (theirs, form) in found.items()]
    else:
        lines = [told(each) if isinstance(each, ParamMap) else str(each) for each in found]
    return " | ".join(line for line in lines if not line.startswith(OTHER_LAYERS))

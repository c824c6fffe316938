"""Drawings that were looked at and found good, kept as they were: whoever changes one, means it.

    python -m tests.core.draw.test_golden_files

draws them anew. Large ones are kept as a digest alone.
"""

# pyright: reportArgumentType=false

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from crossframe.draw import events_text, layout_svg, layout_text, plan_svg, plan_text
from crossframe.draw.amounts import (
    bytes_text,
    bytes_ticks,
    count_ticks,
    percent_text,
    ranks_text,
    seconds_text,
    short_count,
)
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from tests.core.helpers.costs import CASES, cost_of

FOLDER = Path(__file__).with_name("drawings")
LARGEST = 12_000
PARAMS = (ParamSpec("weight", (5, 3)), ParamSpec("bias", (5,)), ParamSpec("scale", (2,)), ParamSpec("empty", (0, 4)))
MANY = tuple(ParamSpec(f"a_rather_long_name_of_parameter.{i}", (3 + i, 4)) for i in range(14))
MIXED = (
    ("", FlatLayout(PARAMS, 2, True)),
    *((f"blocks.{i}", FlatLayout((ParamSpec(f"blocks.{i}.w", (7,)),), 2, True)) for i in range(5)),
)
LAYOUTS = {
    "flat": FlatLayout(PARAMS, 4, True),
    "one_flat_parameter": FlatLayout(PARAMS, 4, False),
    "per_param": PerParamLayout(PARAMS, 3),
    "other_dim": PerParamLayout((ParamSpec("w", (4, 6, 3)), ParamSpec("v", (5,))), 3, (1, 0)),
    "ragged": RaggedLayout(PARAMS, 4, (3, 5, 2, 4)),
    "many_parameters": FlatLayout(MANY, 3, True),
    "many_ranks": PerParamLayout(PARAMS[:2], 1000),
    "hybrid": Sharding((("", FlatLayout(PARAMS, 2, True)),), MeshSpec(2, 3)),
    "units": Sharding(MIXED, MeshSpec(2)),
    "no_elements": FlatLayout((ParamSpec("w", (0,)),), 2, True),
}
AMOUNTS = [
    0,
    1,
    7,
    999,
    1000,
    1001,
    1023,
    1024,
    1025,
    9999,
    1_023_400,
    1_023_700,
    999_499,
    999_500,
    1_048_575,
    123_456_789,
    10**12,
    10**15,
]


def _amounts() -> str:
    lines = [f"{n}: {bytes_text(n)}, {short_count(n)}, {percent_text(n, 10**6)}" for n in AMOUNTS]
    lines += [f"{s!r}: {seconds_text(s)}" for s in (0.0, 1e-13, 9.996e-7, 1.5e-6, 0.02, 0.9996, 1.0, 59.9, 61.0, 1e5)]
    lines += [f"ticks of {n}: {count_ticks(n)} {bytes_ticks(float(n))}" for n in (1, 5, 12, 1000, 54_321, 10**9)]
    lines += [ranks_text(ranks) for ranks in ((3,), (0, 1), range(9), range(0, 40, 5), (1, 4, 5))]
    return "\n".join(lines) + "\n"


def _drawings() -> dict[str, Callable[[], str]]:
    found: dict[str, Callable[[], str]] = {"amounts.txt": _amounts}
    for name, drawn in LAYOUTS.items():
        found[f"layout_{name}.txt"] = lambda drawn=drawn: layout_text(drawn)
        found[f"layout_{name}.narrow.txt"] = lambda drawn=drawn: layout_text(drawn, width=60)
        found[f"layout_{name}.svg"] = lambda drawn=drawn: layout_svg(drawn)
    found["layout_one_rank.txt"] = lambda: layout_text(LAYOUTS["flat"], rank=2)
    found["layout_one_rank.svg"] = lambda: layout_svg(LAYOUTS["flat"], rank=2, width=400)
    found["layout_one_unit.txt"] = lambda: layout_text(LAYOUTS["units"], unit="blocks.3")
    for name, case in (CASES | {"many_bars": {"num_units": 40, "microbatches": 12}}).items():
        file = f"plan_{name.replace(' ', '_')}"
        found[f"{file}.txt"] = lambda case=case: plan_text(cost_of(**case)) + events_text(cost_of(**case))
        found[f"{file}.narrow.txt"] = lambda case=case: plan_text(cost_of(**case), width=50)
        found[f"{file}.svg"] = lambda case=case: plan_svg(cost_of(**case), title="a title")
    return found


DRAWINGS = _drawings()


def kept(drawing: str) -> str:
    """A drawing as it is kept."""
    return drawing if len(drawing) <= LARGEST else hashlib.sha256(drawing.encode()).hexdigest() + "\n"


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_as_it_was_found_good(name):
    assert kept(DRAWINGS[name]()) == (FOLDER / name).read_text(encoding="utf-8"), (
        "python -m tests.core.draw.test_golden_files"
    )


def test_nothing_else_is_kept():
    assert {path.name for path in FOLDER.iterdir()} == set(DRAWINGS)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for file, draw in DRAWINGS.items():
        (FOLDER / file).write_text(kept(draw()), encoding="utf-8")
    sys.exit()

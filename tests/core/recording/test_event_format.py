"""Lines of events: what is written comes back, and whatever is damaged in one is refused with its place."""

import json
import math

import pytest

from crossframe.errors import RecordingError
from crossframe.params import OVERFLOW
from crossframe.recording.event_format import decode, encode, place

SHA256 = "0123456789abcdef" * 4
SKETCH = {"fingerprint": "0123456789abcdef", "squares": 2.5, "num_not_finite": 0}
AT = place(2, 1, "forward", "output", unit="block", name="block.norm", microbatch=3)
LINES = {
    "begin": {"manifest": SHA256},
    "batch": AT | {"digest": SHA256, "sample_ids": [4, 2]},
    "loss": AT | {"value": 1.5},
    "activation": AT | {"shape": [2, 3], "dtype": "float32", "order": "torch", "sketch": 0, "channels_first": 7, "operator": "o"},
    "tensor": AT | {"start": 0, "stop": 4, "dtype": "float32", "sample": [0, 1], "at": "update/w", "before": True},
    "norm": AT | {"value": 0.5},
    "count": AT,
    "collective": AT | {"collective": {"kind": "all_gather"}},
    "disagreement": AT | {"difference": 1e-3, "axis": "tensor", "ranks": [1]},
    "step": {"step": 2, "sha256": "", "rates": [0.1, 0.2], "counts": [3.0, 4.0], "as": 1},
    "end": {"steps": 3, "sha256": SHA256},
}  # fmt: skip
WRONG_TYPES = {
    int: (None, "1", 1.5, True, [1], {}),
    float: (None, True, [1.5], {}),
    str: (None, 1, True, ["a"], {}),
    list: (None, "a", 1, {}),
    dict: (None, "a", 1, []),
    bool: (None, 1, "true"),
}
OPTIONAL = {"sketch", "channels_first", "sample", "operator", "at", "before", "rates", "counts", "as"}
WRONG_VALUES = [
    ("batch", {"digest": SHA256[1:]}, "a sha256"),
    ("batch", {"digest": SHA256.upper()}, "a sha256"),
    ("batch", {"rank": 0}, "a line of rank 0 in the folder of rank 1"),
    ("activation", {"sketch": -1}, "the row of a sketch"),
    ("activation", {"channels_first": -1}, "the row of a sketch"),
    *(("tensor", {"sketch": SKETCH | {name: None}}, f"field '{name}' of a 'sketch' line") for name in SKETCH),
    ("tensor", {"sketch": SKETCH | {"fingerprint": "0" * 15}}, "a sketch"),
    ("tensor", {"sketch": SKETCH | {"fingerprint": "0" * 17}}, "a sketch"),
    ("tensor", {"sketch": SKETCH | {"num_not_finite": -1}}, "a sketch"),
    ("tensor", {"sketch": SKETCH | {"squares": "many"}}, "a number"),
    ("activation", {"operator": "o" * 201}, "the name of an operator"),
    *(("tensor", {"sample": each}, "the range of a sample") for each in (
        [1, 1], [2, 1], [-1, 1], [0], [0, 1, 2], [0.0, 1], [0, True], [0, OVERFLOW])),
    ("disagreement", {"ranks": []}, "ranks"),
    ("disagreement", {"ranks": [1, "2"]}, "ranks"),
    ("disagreement", {"ranks": [True]}, "ranks"),
    ("loss", {"value": "much"}, "a number"),
    *(("loss", {"backwards": each}, "a number of forwards and a loss") for each in (
        {}, [1, 0.5], [[1]], [[1, 0.5, 2]], [[1.0, 0.5]], [[True, 0.5]], [[-1, 0.5]], [[1, None]])),
    ("loss", {"backwards": [[1, "much"]]}, "a number"),
    ("disagreement", {"difference": "much"}, "a number"),
    ("step", {"rates": ["high"]}, "a number"),
    ("step", {"rates": [0.1, None]}, "learning rates"),
    ("step", {"rates": 0.1}, "learning rates"),
    ("step", {"counts": [None]}, "counts of optimizer steps"),
    ("step", {"counts": "many"}, "a number"),
]  # fmt: skip
RIGHT_VALUES = [
    ("activation", {"sketch": SKETCH, "channels_first": SKETCH}),
    ("activation", {"sketch": None, "channels_first": None, "operator": "o" * 200}),
    ("tensor", {"sample": [0, OVERFLOW - 1], "before": False}),
    ("disagreement", {"ranks": [0, 5], "difference": math.inf}),
    ("loss", {"value": -math.inf, "backwards": [[0, 0.5], [3, math.inf]]}),
    ("step", {"counts": 5.0, "rates": [0.1, math.inf]}),
]


@pytest.mark.parametrize(("event", "fields"), [*((event, {}) for event in LINES), *RIGHT_VALUES])
def test_a_line_comes_back(event, fields):
    line = encode(event, LINES[event] | fields)
    assert line.endswith("\n") and "Infinity" not in line
    assert decode(line.encode(), 1, "here") == {"event": event} | LINES[event] | fields


def refused(event, fields, expected=""):
    line = json.dumps({"event": event} | fields).encode()
    with pytest.raises(RecordingError) as caught:
        decode(line, 1, "here, line 7")
    text = str(caught.value)
    assert text.startswith("here, line 7: ") and expected in text and "record" in text


@pytest.mark.parametrize("event", LINES)
def test_missing_fields_and_other_types_are_refused(event):
    for name, value in LINES[event].items():
        others = {other: each for other, each in LINES[event].items() if other != name}
        if name in OPTIONAL:
            decode(json.dumps({"event": event} | others).encode(), 1, "")
        else:
            refused(event, others, f"field {name!r} of a {event!r} line: expected ")
        for wrong in WRONG_TYPES[type(value)]:
            if name not in OPTIONAL:
                refused(event, others | {name: wrong}, f"field {name!r} of a {event!r} line: expected ")
            elif wrong is not None:
                refused(event, others | {name: wrong})


@pytest.mark.parametrize(("event", "fields", "expected"), WRONG_VALUES)
def test_values_out_of_range_are_refused(event, fields, expected):
    refused(event, LINES[event] | fields, expected)


@pytest.mark.parametrize("event", [None, "", "tensors", 1, ["step"]])
def test_unknown_events_are_refused(event):
    refused(event, LINES["step"], "an event among")


@pytest.mark.parametrize(
    ("framework", "shape", "order"),
    [("torch", [2, 3, 4, 5], "torch"), ("jax", [2, 3], "torch"), ("jax", [2, 3, 4, 5], "unstated")],
)
def test_an_order_that_is_not_stated_is_that_of_the_framework(framework, shape, order):
    line = encode(
        "activation",
        {name: value for name, value in (LINES["activation"] | {"shape": shape}).items() if name != "order"},
    )
    assert decode(line.encode(), 1, "", framework)["order"] == order

"""Texts that tests compare with kept ones: words exactly, numbers up to their last printed digit.

CROSSFRAME_KEEP_TEXTS=1 keeps the texts of the tests that run as they are now: whoever changes one, means it.
"""

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

KEEP = "CROSSFRAME_KEEP_TEXTS"
NOISE = 1e-11
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![\w.]*\w)")


def check_text(file: Path, text: str, part: str = "", *, must_be_kept: bool = True) -> None:
    """Assert that a text, or a part of one, is the one that a JSON file keeps under the name of the test that runs."""
    test = os.environ["PYTEST_CURRENT_TEST"].partition("::")[2].rpartition(" (")[0]
    name = f"{test}, {part}" if part else test
    kept = json.loads(file.read_text()) if file.exists() else {}
    if os.environ.get(KEEP):
        if name not in kept or not is_same_text(kept[name], text):
            file.write_text(json.dumps(dict(sorted((kept | {name: text}).items())), indent=1) + "\n")
    elif name in kept:
        assert is_same_text(kept[name], text), f"{kept[name]!r}, now {text!r}; if this is meant: {KEEP}=1"
    else:
        assert not must_be_kept, f"{name} is not in {file}; if this is meant: {KEEP}=1"


def keep_calls(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, folder: Path, told: Callable[[Any], str]
) -> None:
    """Compare each result of a function that a test module calls by this name with the one that a folder keeps.

    Results of a new test are kept when someone runs it with CROSSFRAME_KEEP_TEXTS=1. Tests of random values are left out.
    """
    made = getattr(request.module, name, None)
    if made is None or hasattr(request.function, "hypothesis"):
        return
    numbers, file = itertools.count(1), folder / f"{request.path.stem}.json"

    def call(*args: Any, **options: Any) -> Any:
        found = made(*args, **options)
        check_text(file, told(found), f"{name} {next(numbers)}", must_be_kept=False)
        return found

    monkeypatch.setattr(request.module, name, call)


def is_same_text(kept: str, text: str) -> bool:
    """Whether two texts have the same words, and numbers that differ by at most one unit in their last printed digit.

    Numbers below `NOISE` are rounding in float64, which depends on the machine, and count as 0.

    >>> is_same_text("0.12 of 3", "0.13 of 3"), is_same_text("0.12 of 3", "0.12 of 4"), is_same_text("1.0e-05", "2.0e-05")
    (True, False, False)
    """
    if NUMBER.split(kept) != NUMBER.split(text):
        return False
    return all(map(_is_same_number, NUMBER.findall(kept), NUMBER.findall(text)))


def _is_same_number(kept: str, text: str) -> bool:
    if kept == text or max(abs(float(kept)), abs(float(text))) < NOISE:
        return True
    digit = max(_digit(kept), _digit(text))
    return digit < 1 and abs(float(kept) - float(text)) <= 1.01 * digit


def _digit(number: str) -> float:
    """The value of one unit in the last printed digit; 1 for integers, which must be equal."""
    mantissa, _, exponent = number.partition("e")
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))

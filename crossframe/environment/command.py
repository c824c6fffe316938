"""The arguments of a command line, option by option."""

from collections.abc import Sequence
from pathlib import Path

from crossframe.environment.configuration import hidden
from crossframe.environment.facts import Fact

SCRIPT = "script"


def arguments_of(argv: Sequence[str]) -> dict[str, Fact]:
    """The options of a command line by name; other arguments by their number; "script" is its first word.

    A word after an option that has no value of its own is its value. Options that are given several times have their values in
    one text.

    >>> arguments_of(["x/train.py", "--lr", "1e-3", "--fused", "--seed=1", "data", "model.width=64"])
    {'script': 'train.py', '--lr': '1e-3', '--fused': True, '--seed': '1', 'argument 1': 'data', 'model.width': '64'}
    """
    found: dict[str, Fact] = {}
    words, number = list(argv[1:]), 0
    if argv:
        found[SCRIPT] = Path(argv[0]).name
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        is_option = word.startswith("-") and not _is_number(word)
        if not is_option and not (equals and name.replace(".", "").replace("_", "").replace("+", "").isalnum()):
            number += 1
            found[f"argument {number}"] = word
            continue
        given: Fact = value if equals else True
        if is_option and not equals and words and (not words[0].startswith("-") or _is_number(words[0])):
            given = words.pop(0)
        given = hidden(name, given)
        found[name] = given if name not in found else f"{found[name]} {given}"
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

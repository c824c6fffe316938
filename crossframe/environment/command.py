"""The arguments of a command line, option by option."""

from collections.abc import Sequence
from pathlib import Path

from crossframe.environment.configuration import hidden
from crossframe.environment.facts import Fact

SCRIPT = "script"
ARGUMENT = "argument "


def arguments_of(argv: Sequence[str]) -> dict[str, Fact]:
    """The options of a command line by name; other arguments by their number; "script" is its first word.

    A word after an option that has no value of its own is its value. Options that are given several times have their values in
    one text.

    >>> arguments_of(["x/train.py", "--lr", "1e-3", "--fused", "--seed=1", "data", "model.width=64"])
    {'script': 'train.py', '--lr': '1e-3', '--fused': True, '--seed': '1', 'argument 1': 'data', 'model.width': '64'}
    """
    found: dict[str, Fact] = {SCRIPT: Path(argv[0]).name} if argv else {}
    for name, groups in words_by_option(argv[1:]).items():
        for first, *more in groups:
            _, equals, value = first.partition("=")
            given: Fact = more[0] if more else value if equals else True
            if name.startswith(ARGUMENT):
                given = first
            given = hidden(name, given)
            found[name] = given if name not in found else f"{found[name]} {given}"
    return found


def words_by_option(arguments: Sequence[str]) -> dict[str, list[tuple[str, ...]]]:
    """The words of each option, once for each time that it is given; other arguments by their number.

    >>> words_by_option(["--lr", "1e-3", "--fused", "--seed=1", "data", "--lr", "2"])
    {'--lr': [('--lr', '1e-3'), ('--lr', '2')], '--fused': [('--fused',)], '--seed': [('--seed=1',)], 'argument 1': [('data',)]}
    """
    found: dict[str, list[tuple[str, ...]]] = {}
    words, number = list(arguments), 0
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-") and not _is_number(word)
        if not is_option and not (equals and name.replace(".", "").replace("_", "").replace("+", "").isalnum()):
            number += 1
            found[f"{ARGUMENT}{number}"] = [(word,)]
            continue
        own: tuple[str, ...] = (word,)
        if is_option and not equals and words and (not words[0].startswith("-") or _is_number(words[0])):
            own = (word, words.pop(0))
        found.setdefault(name, []).append(own)
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

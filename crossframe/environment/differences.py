"""Lists and ranks the differences of two environments."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossframe.environment.effects import ACCELERATOR, CPU, Effect, row_of
from crossframe.environment.facts import (
    COMMAND,
    CONFIGURATION,
    FRAMEWORK,
    MODULES,
    PACKAGES,
    PARAMETERS,
    SECTIONS,
    SOURCE,
    VARIABLES,
    Environment,
    Fact,
)
from crossframe.quoting import quote

# Sections in which a missing name states something: a package that is not installed, a variable that is not set.
_ABSENT = {
    PACKAGES: "not installed",
    VARIABLES: "not set",
    COMMAND: "not given",
    CONFIGURATION: "not there",
    PARAMETERS: "not there",
    SOURCE: "not there",
}
_NOUNS = {
    PACKAGES: "the version of {}",
    VARIABLES: "the variable {}",
    FRAMEWORK: "{}",
    COMMAND: "the argument {} of the command",
    CONFIGURATION: "the configuration {}",
    MODULES: "module {!r}",
    PARAMETERS: "parameter {!r}",
    "random": "the state of the random generator of {}",
    "optimizer": "the optimizer's {}",
    "run": "the run's {}",
    "machine": "the machine's {}",
    "values": "{}",
}
_DIGESTS = ("random", SOURCE)
_UNCHANGED_FILES = "the files of the code that ran are equal"


class Absent:
    """The value of a fact that one environment does not have."""


@dataclass(frozen=True)
class Difference:
    """A fact that two environments state differently.

    Attributes:
        section, name: of the fact.
        a, b: its values; Absent if one of them does not have it.
        effect: how likely it changes the numbers of a run.
        reason: why, as a clause.
        rank: the place of its kind in the ranking.
        text: the difference in words, if its values do not state it.
    """

    section: str
    name: str
    a: Fact | type[Absent]
    b: Fact | type[Absent]
    effect: Effect
    reason: str
    rank: int
    text: str = ""

    def describe(self, labels: tuple[str, str] = ("a", "b")) -> str:
        """The fact with both values, as a clause.

        >>> one, other = (Environment({"packages": {"torch": version}}) for version in ("2.11.0", "2.13.0"))
        >>> differences(one, other)[0].describe()
        'the version of torch differs: 2.11.0 in a, 2.13.0 in b'
        """
        if self.text:
            return self.text
        noun = self.noun
        if self.section in _DIGESTS:
            own = [label for label, value in zip(labels, (self.a, self.b), strict=True) if value is not Absent]
            return f"{noun} differs" if len(own) == 2 else f"{noun} is in {own[0]} alone"
        values: tuple[Any, Any] = (self.a, self.b)
        if self.section == MODULES and Absent not in values:
            values = _other_options(*values)
        x, y = (value_text(self.section, value) for value in values)
        return f"{noun} differs: {x} in {labels[0]}, {y} in {labels[1]}"

    def to_json(self) -> dict:
        """The difference as a JSON object. An absent value is null, and "absent" names the side."""
        sides = [side for side, value in (("a", self.a), ("b", self.b)) if value is Absent]
        return {
            "section": self.section,
            "name": self.name,
            "a": None if self.a is Absent else self.a,
            "b": None if self.b is Absent else self.b,
            "absent": sides,
            "effect": self.effect.value,
            "reason": self.reason,
            "description": self.describe(),
        }

    @property
    def noun(self) -> str:
        """The fact as a noun."""
        if self.section == SOURCE:
            kind, _, path = self.name.partition(" ")
            return {"commit": "the commit", "file": f"the source {path}", "changed": f"the uncommitted file {path}"}[
                kind
            ]
        if self.section == COMMAND and self.name.startswith("argument "):
            return f"{self.name} of the command"
        return _NOUNS[self.section].format(self.name)


def value_text(section: str, value: Fact | type[Absent]) -> str:
    """The value of a fact in words."""
    if value is Absent:
        return _ABSENT[section]
    return value if isinstance(value, str) and 0 < len(value) <= 100 else quote(value)


def differences(a: Environment, b: Environment, sections: Sequence[str] = SECTIONS) -> tuple[Difference, ...]:
    """The facts that differ, those first that most likely change the numbers of a run (`crossframe.environment.effects`).

    In sections that describe what was observed, such as settings of the framework, names that only one of them states do not
    count: another version or framework states other names.
    """
    device = device_of(a, b)
    found = [made(section, name, x, y, device) for section in sections for name, x, y in _apart(section, a, b)]
    found = [_of_another_class(each) if each.section == MODULES else each for each in found]
    files = [name for name in {*a[SOURCE], *b[SOURCE]} if name.startswith("file ")]
    if files and all(a[SOURCE].get(name) == b[SOURCE].get(name) for name in files):
        found = [_harmless(each) if each.name == "commit" and each.section == SOURCE else each for each in found]
    return ranked(found)


def ranked(found: Sequence[Difference]) -> tuple[Difference, ...]:
    """Differences in the order of their effects."""
    return tuple(sorted(found, key=lambda each: (each.effect.order, each.rank, each.name)))


def made(
    section: str, name: str, x: Fact | type[Absent], y: Fact | type[Absent], device: str, text: str = ""
) -> Difference:
    """A difference with its effect."""
    rank, row = row_of(section, name, device)
    return Difference(section, name, x, y, row.effect, row.reason, rank, text)


def device_of(*environments: Environment) -> str:
    """CPU if all of them state to run on one, else ACCELERATOR."""
    stated = {environment[FRAMEWORK].get("device") for environment in environments}
    return CPU if stated == {"cpu"} else ACCELERATOR


def _apart(
    section: str, a: Environment, b: Environment
) -> Iterator[tuple[str, Fact | type[Absent], Fact | type[Absent]]]:
    first, second = a[section], b[section]
    by_absence = section in _ABSENT and a.is_complete and b.is_complete
    for name in dict.fromkeys((*first, *second)):
        x, y = first.get(name, Absent), second.get(name, Absent)
        if x != y and (by_absence or Absent not in (x, y)):
            yield name, x, y


def _other_options(x: str, y: str) -> tuple[str, str]:
    """Two modules by the options that differ alone, if their classes are equal.

    >>> _other_options("LayerNorm((8,), eps=1e-05, bias=True)", "LayerNorm((8,), eps=1e-06, bias=True)")
    ('LayerNorm(eps=1e-05)', 'LayerNorm(eps=1e-06)')
    """
    (name, _, first), (other, _, second) = (text.partition("(") for text in (x, y))
    # An option is a text up to a comma outside of brackets.
    options = [re.findall(r"(?:[^,()]|\([^()]*\))+", text.rpartition(")")[0]) for text in (first, second)]
    same_end = first.rpartition(")")[2] == second.rpartition(")")[2]
    if name != other or not same_end or len(options[0]) != len(options[1]):
        return x, y
    apart = [(p.strip(), q.strip()) for p, q in zip(*options, strict=True) if p != q]
    return tuple(f"{name}({', '.join(side)})" for side in zip(*apart, strict=True))  # type: ignore[return-value]


def _of_another_class(module: Difference) -> Difference:
    """A difference of two modules: another class may compute the same function."""
    names = [str(value).partition("(")[0] for value in (module.a, module.b)]
    if names[0] == names[1]:
        return module
    return replace(module, effect=Effect.POSSIBLY, reason="the module is of another class")


def _harmless(commit: Difference) -> Difference:
    return replace(commit, effect=Effect.HARDLY, reason=_UNCHANGED_FILES)

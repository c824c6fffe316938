"""Finds the ranks of one job whose environment differs from that of the others."""

from collections.abc import Mapping
from dataclasses import dataclass

from crossframe.environment.differences import Absent, Difference, device_of, differences, made, value_text
from crossframe.environment.effects import Effect
from crossframe.environment.facts import (
    COMMAND,
    CONFIGURATION,
    FRAMEWORK,
    HOST,
    MACHINE,
    PACKAGES,
    SOURCE,
    VARIABLES,
    Environment,
    Fact,
)

# States of generators differ between ranks as they should, and modules are stated by the first rank alone.
_SHARED = (FRAMEWORK, COMMAND, CONFIGURATION, SOURCE, PACKAGES, VARIABLES, MACHINE)
_OF_RANK = frozenset({(MACHINE, HOST), (VARIABLES, "CUDA_VISIBLE_DEVICES"), (VARIABLES, "HIP_VISIBLE_DEVICES")})
_MOST = 8


@dataclass(frozen=True)
class OddRanks:
    """Ranks that state another value of a fact than the others.

    Attributes:
        difference: `a` is the value of the majority, and `b` that of these ranks.
        ranks: the ranks.
        hosts: the names of their machines.
        by_majority: whether more than half of all ranks have the value `a`.
    """

    difference: Difference
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    by_majority: bool

    @property
    def effect(self) -> Effect:
        """How likely the difference changes the numbers."""
        return self.difference.effect

    def describe(self) -> str:
        """The finding as a clause.

        >>> versions = {0: "2.13.0", 1: "2.13.0", 2: "2.11.0"}
        >>> stated = {rank: Environment({"packages": {"torch": version}}) for rank, version in versions.items()}
        >>> odd_ranks(stated)[0].describe()
        'the version of torch on rank 2 is 2.11.0, on the other ranks 2.13.0'
        """
        usual, own = (value_text(self.difference.section, x) for x in (self.difference.a, self.difference.b))
        where = f"rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks[:_MOST]))}"
        where += f" and {len(self.ranks) - _MOST} more" if len(self.ranks) > _MOST else ""
        if self.hosts:
            where += f" ({', '.join(self.hosts[:3])}{', ...' if len(self.hosts) > 3 else ''})"
        noun = self.difference.noun
        others = "the other ranks" if self.by_majority else "rank 0"
        return f"{noun} on {where} is {own}, on {others} {usual}"

    def to_json(self) -> dict:
        """The finding as a JSON object."""
        return {
            **self.difference.to_json(),
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
            "by_majority": self.by_majority,
            "description": self.describe(),
        }


def odd_ranks(environments: Mapping[int, Environment]) -> tuple[OddRanks, ...]:
    """The facts on which ranks differ, those first that most likely change the numbers.

    The value of the majority counts as usual; without a majority, that of the first rank.

    Args:
        environments: by rank.
    """
    if len(environments) < 2:
        return ()
    first, device = min(environments), device_of(*environments.values())
    names: dict[tuple[str, str], None] = {}
    for environment in environments.values():
        for each in differences(environments[first], environment, _SHARED):
            names.setdefault((each.section, each.name))
    found = []
    for section, name in names:
        if (section, name) in _OF_RANK:
            continue
        by_value: dict[Fact | type[Absent], list[int]] = {}
        for rank, environment in sorted(environments.items()):
            by_value.setdefault(environment[section].get(name, Absent), []).append(rank)
        most = max(by_value, key=lambda value: len(by_value[value]))
        by_majority = 2 * len(by_value[most]) > len(environments)
        usual = most if by_majority else environments[first][section].get(name, Absent)
        for value, ranks in by_value.items():
            if value != usual:
                hosts = tuple(dict.fromkeys(host for rank in ranks if (host := environments[rank].host)))
                found.append(OddRanks(made(section, name, usual, value, device), tuple(ranks), hosts, by_majority))
    return tuple(sorted(found, key=lambda x: (x.effect.order, x.difference.rank, x.difference.name, x.ranks)))

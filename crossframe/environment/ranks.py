"""Finds the ranks of one job whose environment differs from that of the others."""

from collections.abc import Mapping, Sequence
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
        are_whole_hosts: whether the ranks are all ranks of these machines.
    """

    difference: Difference
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    by_majority: bool
    are_whole_hosts: bool = False

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
        noun = self.difference.noun
        others = "the other ranks" if self.by_majority else "rank 0"
        return f"{noun} on {self._where()} is {own}, on {others} {usual}"

    def _where(self) -> str:
        if self.are_whole_hosts and len(self.ranks) > 1:
            return f"all ranks of {_listed(self.hosts)}"
        where = f"rank{'s' * (len(self.ranks) > 1)} {_listed(self.ranks)}"
        return f"{where} ({', '.join(self.hosts[:3])}{', ...' if len(self.hosts) > 3 else ''})" if self.hosts else where

    def to_json(self) -> dict:
        """The finding as a JSON object."""
        return {
            **self.difference.to_json(),
            "ranks": list(self.ranks),
            "hosts": list(self.hosts),
            "by_majority": self.by_majority,
            "description": self.describe(),
        }


def _listed(values: Sequence[object]) -> str:
    more = f" and {len(values) - _MOST} more" if len(values) > _MOST else ""
    return f"{', '.join(map(str, values[:_MOST]))}{more}"


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
    host_of = {rank: environment.host for rank, environment in environments.items()}
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
                hosts = tuple(dict.fromkeys(host_of[rank] for rank in ranks if host_of[rank]))
                there = [rank for rank, host in sorted(host_of.items()) if host in hosts]
                are_whole_hosts = all(host_of.values()) and there == ranks
                difference = made(section, name, usual, value, device)
                found.append(OddRanks(difference, tuple(ranks), hosts, by_majority, are_whole_hosts))
    return tuple(sorted(found, key=lambda x: (x.effect.order, x.difference.rank, x.difference.name, x.ranks)))

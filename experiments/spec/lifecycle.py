"""R12, R17-R24: every history of small worlds, the reference beside the simplest model of it."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from crossframe.api import Api
from crossframe.layout import Layout
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import plan_units
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Strategy
from experiments.spec.cases import KINDS, layout_of
from experiments.spec.checks import LIFECYCLE, Scope
from experiments.spec.histories import Disagreement, Explored, Pair
from experiments.spec.histories import explore as explore_pair
from experiments.spec.tally import Tallies

# Rows that are uneven over 2, 3 and 4 ranks; some rank holds nothing of the second parameter.
PARAMS = (ParamSpec("w", (5, 2)), ParamSpec("v", (3, 1)))
MESHES = (MeshSpec(2), MeshSpec(3), MeshSpec(4), MeshSpec(2, 2), MeshSpec(1, 2), MeshSpec(1, 3))
LENGTH, QUICK_LENGTH = 3, 2
# The operations, as patterns, that exercise a rule where they are granted. R12 is about all of them, and R23 and a part of
# R18 are about what is refused.
EXERCISES = {
    "R17": "fail in (forward|backward)|reset",
    "R18": "meddle in (forward|backward)",
    "R19": "summon.*",
    "R20": "edit (full|piece)|exit",
    "R21": "exit",
    "R22": "summon .*g|edit grad|zero one grad",
    "R24": "exit|fail in summon",
}


@dataclass(frozen=True)
class SmallWorld:
    """One unit of a kind of layout on a mesh, and its options."""

    kind: str
    mesh: MeshSpec
    api: Api
    reshard_after_forward: bool | int
    mixed: bool

    def layout(self) -> Layout:
        """The unit's layout."""
        return layout_of(self.kind, PARAMS, self.mesh.shard)

    def pair(self) -> Pair:
        """The world with NaN in all of its padding, beside its model."""
        units = plan_units(
            [("unit", self.layout())],
            Strategy.FULL_SHARD if self.reshard_after_forward else Strategy.SHARD_GRAD_OP,
            api=self.api,
            reshard_after_forward=self.reshard_after_forward,
            policy=PrecisionPolicy("bfloat16", "float32") if self.mixed else None,
        )
        return Pair(units, self.mesh, poison=float("nan"))


def worlds() -> list[SmallWorld]:
    """Every kind on every mesh, both APIs, every choice after forward, with and without mixed precision."""
    return [
        SmallWorld(kind, mesh, api, reshards, mixed)
        for kind, mesh, api, mixed in product(KINDS, MESHES, Api, (False, True))
        for reshards in (True, False, *([2] if mesh.shard == 4 else []))
    ]


def explore(num_ranks: int, length: int, small_worlds: Sequence[SmallWorld] | None = None) -> Explored:
    """Follow every history of `length` operations in the worlds of `num_ranks` ranks, and count.

    Raises:
        Disagreement: the history that goes wrong, and what.
    """
    total = Explored()
    for world in worlds() if small_worlds is None else small_worlds:
        if world.mesh.world_size == num_ranks:
            total.add(explore_pair(world.pair(), length))
    return total


def histories(tallies: Tallies, scope: Scope) -> None:
    """Every history of three operations in each of the worlds; in the quick form, of two in some of them.

    An operation in a world is a case of the rules that it exercises. A disagreement fails all of them: the worlds are then
    different ones, whichever rule made them so.
    """
    for world in scope.take(worlds(), num_quick=12):
        try:
            found = explore_pair(world.pair(), QUICK_LENGTH if scope.quick else LENGTH)
        except Disagreement as error:
            for rule in LIFECYCLE:
                tallies[rule].fail(f"{world}: {error}")
        else:
            for rule, num_cases in cases_of(found).items():
                tallies[rule].agreed += num_cases


def cases_of(found: Explored) -> Counter[str]:
    """How many of the operations done in one small world exercise each rule.

    >>> cases = cases_of(Explored(tried=Counter({"exit": 5, "summon": 4, "summon wr": 4}),
    ...                           refused=Counter({"exit": 3, "summon": 1, "summon wr": 4})))
    >>> print(", ".join(f"{rule} {num_cases}" for rule, num_cases in cases.items() if num_cases))
    R12 13, R18 1, R19 3, R20 2, R21 2, R23 4, R24 2
    """
    cases = Counter(dict.fromkeys(LIFECYCLE, 0) | {"R12": found.num_tried})
    for operation, num_tried in found.tried.items():
        num_refused = found.refused[operation]
        for rule, exercise in EXERCISES.items():
            cases[rule] += (num_tried - num_refused) * bool(re.fullmatch(exercise, operation))
        if operation.startswith("summon"):
            # Where a world starts, all is granted but what the flags forbid. Later also what comes while summoned is refused.
            cases["R23" if num_refused == num_tried else "R18"] += num_refused
    return cases

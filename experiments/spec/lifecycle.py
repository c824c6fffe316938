"""R12, R17-R24: every history of small worlds, the reference beside the simplest model of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from crossframe.faces import Face
from crossframe.histories import Disagreement, Explored, Pair
from crossframe.histories import explore as explore_pair
from crossframe.layout import FlatLayout, Layout, PerParamLayout, RaggedLayout
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import Strategy, plan_units
from crossframe.precision import PrecisionPolicy
from experiments.spec.checks import LIFECYCLE, Scope
from experiments.spec.tally import Tallies

# Rows that are uneven over 2, 3 and 4 ranks; some rank holds nothing of the second parameter.
PARAMS = (ParamSpec("w", (5, 2)), ParamSpec("v", (3, 1)))
KINDS = ("flat", "one flat parameter", "per parameter", "ragged")
MESHES = (MeshSpec(2), MeshSpec(3), MeshSpec(4), MeshSpec(2, 2), MeshSpec(1, 2), MeshSpec(1, 3))
LENGTH, QUICK_LENGTH = 3, 2


@dataclass(frozen=True)
class SmallWorld:
    """One unit of a kind of layout on a mesh, and its options."""

    kind: str
    mesh: MeshSpec
    face: Face
    reshard_after_forward: bool | int
    mixed: bool

    def layout(self) -> Layout:
        """The unit's layout."""
        match self.kind:
            case "per parameter":
                return PerParamLayout(PARAMS, self.mesh.shard)
            case "ragged":
                return RaggedLayout(PARAMS, self.mesh.shard)
        return FlatLayout(PARAMS, self.mesh.shard, keep_original=self.kind == "flat")

    def pair(self) -> Pair:
        """The world with NaN in all of its padding, beside its model."""
        units = plan_units(
            [("unit", self.layout())],
            Strategy.FULL_SHARD if self.reshard_after_forward else Strategy.SHARD_GRAD_OP,
            face=self.face,
            reshard_after_forward=self.reshard_after_forward,
            policy=PrecisionPolicy("bfloat16", "float32") if self.mixed else None,
        )
        return Pair(units, self.mesh, face=self.face, poison=float("nan"))


def worlds() -> list[SmallWorld]:
    """Every kind on every mesh, both faces, every choice behind forward, with and without mixed precision."""
    return [
        SmallWorld(kind, mesh, face, reshards, mixed)
        for kind, mesh, face, mixed in product(KINDS, MESHES, Face, (False, True))
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

    The model holds all of these rules at once: one operation in one world is one case of each.
    """
    for world in scope.take(worlds(), num_quick=12):
        try:
            found = explore_pair(world.pair(), QUICK_LENGTH if scope.quick else LENGTH)
        except Disagreement as error:
            for rule in LIFECYCLE:
                tallies[rule].fail(f"{world}: {error}")
        else:
            for rule in LIFECYCLE:
                tallies[rule].agreed += found.num_tried

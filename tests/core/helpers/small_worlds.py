"""Small worlds for the tests of the lifecycle: one or several units beside their simple models."""

from collections.abc import Callable
from dataclasses import dataclass

from crossframe.api import Api
from crossframe.layout import FlatLayout, Layout, PerParamLayout, RaggedLayout
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.plan import Strategy, plan_units
from crossframe.precision import PrecisionPolicy
from experiments.spec.histories import Pair

MAKE: dict[str, Callable[[tuple[ParamSpec, ...], int], Layout]] = {
    "flat": lambda params, size: FlatLayout(params, size, True),
    "one flat parameter": lambda params, size: FlatLayout(params, size, False),
    "per parameter": PerParamLayout,
    "ragged": RaggedLayout,
}
NAN, SEVEN = float("nan"), 7.0


@dataclass(frozen=True)
class Setup:
    """A small world in words."""

    kind: str
    shard: int
    replicate: int = 1
    api: Api = Api.FSDP1
    strategy: Strategy = Strategy.FULL_SHARD
    reshard_after_forward: bool | int | None = True
    mixed: bool = False
    poison: float | None = None

    def pair(self, names: tuple[str, ...] = ("u",)) -> Pair:
        """The world, and the models of its units. Rows are uneven over 2, 3 and 4 ranks, and some rank holds none."""
        layouts = []
        for i, name in enumerate(names):
            prefix = f"{name}." if len(names) > 1 else ""
            params = (ParamSpec(f"{prefix}w", (5 + i, 2)), ParamSpec(f"{prefix}v", (3, 1)))
            layouts.append((name, MAKE[self.kind](params, self.shard)))
        units = plan_units(
            layouts,
            self.strategy,
            api=self.api,
            reshard_after_forward=self.reshard_after_forward,
            policy=PrecisionPolicy("bfloat16", "float32") if self.mixed else None,
        )
        return Pair(units, MeshSpec(self.shard, self.replicate), poison=self.poison)

"""Every history of a small world: what proves that the reference does what the rules say.

`simple` is a model of a unit without any shards: full arrays and a few words. `pair` does every operation to a reference world
and to its model, `agree` compares them, and `explore` follows every order of operations up to a length.
"""

from experiments.spec.histories.agree import Disagreement
from experiments.spec.histories.explore import Explored, explore, replay
from experiments.spec.histories.pair import OPERATIONS, REQUESTS, Pair

__all__ = ["OPERATIONS", "REQUESTS", "Disagreement", "Explored", "Pair", "explore", "replay"]

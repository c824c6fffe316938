"""The environment of a run: what is stated of it, and how the differences of two environments affect the numbers.

`collect` states the environment of a process. `differences` lists and ranks those of two environments, and `odd_ranks` those of
the ranks of one job, by the table in `effects.py`. `recorded_environment` reads what a recording states.
"""

from crossframe.environment.collect import collect, digest
from crossframe.environment.differences import Difference, differences
from crossframe.environment.effects import Effect
from crossframe.environment.facts import Environment, Fact, environment_path, read_environment
from crossframe.environment.ranks import OddRanks, odd_ranks
from crossframe.environment.recorded import recorded_environment, recorded_environments

__all__ = [
    "Difference",
    "Effect",
    "Environment",
    "Fact",
    "OddRanks",
    "collect",
    "differences",
    "digest",
    "environment_path",
    "odd_ranks",
    "read_environment",
    "recorded_environment",
    "recorded_environments",
]

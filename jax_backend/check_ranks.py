"""Compares the environments of all processes of a job while it runs: versions, devices, settings, variables, sources."""

from crossframe.environment import Environment, OddRanks, odd_ranks
from crossframe.environment.facts import MODULES, RANDOM
from jax_backend.ranks._processes import gather_values
from jax_backend.recorder._environment import environment_of


def check_ranks() -> tuple[OddRanks, ...]:
    """The facts on which the environments of processes differ, the most likely to change numbers first.

    All processes call it, after `jax.distributed.initialize`, and get the same result. Ranks are processes here.

    >>> check_ranks()
    ()
    """
    own = {name: facts for name, facts in environment_of().sections.items() if name not in (RANDOM, MODULES)}
    return odd_ranks({rank: Environment(each) for rank, each in enumerate(gather_values(own))})

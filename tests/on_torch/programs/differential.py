"""Random training runs by `torch.distributed.fsdp` and by `torch_backend`, side by side in the same ranks.

Both train a case for a few steps, and their histories must be equal bit for bit at 2 ranks, and at 3 and 4 where the tree is
exact (R32). `python -m tests.on_torch.programs.differential --api fsdp2 --cases 500 --seed 1` runs many cases of one interface;
a case that fails is made smaller and printed as an expression.
"""

import argparse
import io
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

from tests.on_torch.helpers.paired_runs import Case, History, difference, shown
from tests.on_torch.helpers.random_trees import smaller_trees
from tests.on_torch.programs import (
    departures_fsdp1,
    departures_fsdp2,
    departures_state,
    differential_fsdp1,
    differential_fsdp2,
    differential_state,
)
from tests.on_torch.programs.departures_fsdp1 import Departure
from tests.on_torch.programs.differential_fsdp1 import WrappedRun
from tests.on_torch.programs.differential_fsdp2 import ShardedRun
from tests.on_torch.programs.differential_state import StateRun
from tests.ranks import Ranks, started_ranks

SECONDS = 30
SECONDS_SMALL = 12  # for a smaller case of one that fails; that may hang
RUNS: dict[str, Any] = {"fsdp1": WrappedRun, "fsdp2": ShardedRun, "state": StateRun}
DRAWS = {
    "fsdp1": differential_fsdp1.draw_case,
    "fsdp2": differential_fsdp2.draw_case,
    "state": differential_state.draw_case,
}
EXCEPTED: dict[str, tuple[Departure, ...]] = {
    "fsdp1": (*departures_fsdp1.BUGS, *departures_fsdp1.DEPARTURES),
    "fsdp2": (*departures_fsdp2.BUGS, *departures_fsdp2.DEPARTURES),
    "state": (
        *departures_fsdp1.BUGS,
        *departures_fsdp1.DEPARTURES,
        *departures_state.BUGS,
        *departures_state.DEPARTURES,
    ),
}


def around_departures(case: Case) -> Case:
    """The case without any operation whose results are known to differ; leading it around one may lead it to another."""
    found = [departure for departure in EXCEPTED[case.options.api] if departure.when(case)]
    for departure in found:
        case = departure.avoid(case)
    return around_departures(case) if found else case


def run(case: Case, api: ModuleType, rank: int, *saver: ModuleType) -> History:
    """The history of a case by one of the two, without what torch prints before it raises. A case of state dicts may be saved by
    one and loaded by the other."""
    nowhere = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        return RUNS[case.options.api](case, api, rank, *saver).go()


def compare(rank: int, world_size: int, case: Case) -> tuple[str, str]:
    """On a rank: the first difference, and what torch raised, if it did."""
    import torch_backend

    fsdp = import_module("torch.distributed.fsdp")
    theirs = run(case, fsdp, rank)
    raised = theirs[-1][1] if theirs and isinstance(theirs[-1][1], Exception) else None
    text = difference(theirs, run(case, torch_backend, rank), case)
    if case.options.api == "state":
        for loader, saver, what in (
            (torch_backend, fsdp, "ours loads torch's"),
            (fsdp, torch_backend, "torch loads ours"),
        ):
            crossed = difference(theirs, run(case, loader, rank, saver), case)
            text = text or (crossed and f"{what}: {crossed}")
    return text, shown(raised) if raised is not None else ""


def failure_of(ranks: Ranks, case: Case, seconds: float = SECONDS) -> tuple[str, str]:
    """What is different in a case, and what torch raised; both empty for a case that passes."""
    try:
        results = ranks.run(case.world_size, compare, case, seconds=seconds)
    except (TimeoutError, EOFError, AssertionError, ConnectionError) as error:
        return f"{type(error).__name__}: {error}", ""
    found = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(results) if text]
    return "\n".join(found[:1]), next((raised for _, raised in results if raised), "")


# Making a failing case smaller


def smaller_cases(case: Case) -> Iterator[Case]:
    """Cases that are simpler by one thing each."""
    for options in case.options.simpler():
        yield replace(case, options=options)
    for tree in smaller_trees(case.tree):
        yield replace(case, tree=tree)


def shrink(case: Case, fails: Callable[[Case], bool], limit: int) -> Case:
    """The smallest case that `fails`, as far as `limit` attempts get."""
    while True:
        for smaller in smaller_cases(case):
            limit -= 1
            if limit < 0:
                return case
            if fails(smaller):
                case = smaller
                break
        else:
            return case


def check(ranks: Ranks, case: Case, *, named: str, limit: int = 100) -> str:
    """Run a case. Returns what torch raised, if both did; fails with the smallest case that `limit` attempts find."""

    def fails(other: Case) -> bool:
        return around_departures(other) == other and bool(failure_of(ranks, other, SECONDS_SMALL)[0])

    text, raised = failure_of(ranks, case)
    if text:
        small = shrink(case, fails, limit)
        raise AssertionError(f"{named}: {text}\n{case!r}\nsmallest:\n{small!r}\n{failure_of(ranks, small)[0]}")
    return raised


def main() -> int:
    """Run cases of many seeds; print and count those that differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.on_torch.programs.differential", description=__doc__)
    parser.add_argument(
        "--api", choices=list(DRAWS), default="fsdp1", help="FullyShardedDataParallel, fully_shard, or state dicts"
    )
    parser.add_argument("--cases", type=int, default=100, help="how many cases")
    parser.add_argument("--seed", type=int, default=1, help="the first seed is 1000 times this")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="world sizes, taken in turn")
    parser.add_argument("--shrinks", type=int, default=100, help="attempts to make a failing case smaller")
    given = parser.parse_args()
    failed: list[str] = []
    raised: Counter[str] = Counter()
    start = time.monotonic()
    with started_ranks() as ranks:
        for number in range(given.cases):
            world_size = given.ranks[number % len(given.ranks)]
            named = f"seed {1000 * given.seed + number}, {world_size} ranks"
            case = around_departures(DRAWS[given.api](1000 * given.seed + number, world_size))
            try:
                text = check(ranks, case, named=named, limit=given.shrinks)
                raised[text[:100]] += 1
            except AssertionError as error:
                failed.append(named)
                print(f"{error}\n", flush=True)
    seconds = time.monotonic() - start
    print(f"{given.cases} cases in {seconds:.0f} s: {len(failed)} differ {failed}")
    for text, count in raised.most_common():
        print(f"{count:6} {'ran through' if not text else 'raised on both sides: ' + text}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares the environments of all ranks of a job while it runs: versions, devices, flags, variables, sources."""

import json
import weakref
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from crossframe.environment import Environment, OddRanks, digest, odd_ranks
from crossframe.environment.facts import MACHINE, MODULES, RANDOM
from crossframe.errors import AgreementError, UsageError
from torch_backend.ranks._consensus import listed, timeout_seconds

# Calls of this process, by store.
_calls: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def check_ranks() -> tuple[OddRanks, ...]:
    """The facts on which the environment of some ranks differs from that of the others, the most likely to change numbers first.

    All ranks call it after `init_process_group`, and get the same result. The environments are exchanged through the store,
    without collectives: of equal ones a single one is read.

    Raises:
        UsageError: no process group.
        AgreementError: ranks that do not call it within the timeout of the process group.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> [odd.describe() for odd in check_ranks()]
        []
        >>> dist.destroy_process_group()
    """
    from torch_backend.recorder._environment import (
        environment_of,  # here, so that sharding alone does not load the recorder
    )

    if not dist.is_initialized():
        raise UsageError("check_ranks: expected a process group; call torch.distributed.init_process_group first")
    store: Any = dist.distributed_c10d._get_default_store()
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    number = _calls[store] = _calls.get(store, 0) + 1
    prefix = f"crossframe/environment/{number}"
    sections = environment_of().sections
    host = sections[MACHINE]["host"]
    shared = {name: facts for name, facts in sections.items() if name not in (RANDOM, MODULES)}
    shared[MACHINE] = {name: fact for name, fact in shared[MACHINE].items() if name != "host"}
    content = json.dumps(shared, sort_keys=True).encode()
    key = digest(content)
    store.set(f"{prefix}/content/{key}", content)
    store.set(f"{prefix}/{rank}", json.dumps([key, host]))
    keys = [f"{prefix}/{each}" for each in range(world_size)]
    seconds = timeout_seconds(group)
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except dist.DistError:
        absent = [each for each in range(world_size) if not store.check([keys[each]])]
        raise AgreementError(
            f"rank {rank}: check_ranks: expected all {world_size} ranks to call it, but ranks {listed(absent)} did not within "
            f"{seconds:g} s; call it on every rank"
        ) from None
    stated = [json.loads(each) for each in store.multi_get(keys)]
    contents = {each: json.loads(store.get(f"{prefix}/content/{each}")) for each in dict.fromkeys(k for k, _ in stated)}
    environments = {}
    for each, (own, where) in enumerate(stated):
        machine = {MACHINE: contents[own][MACHINE] | {"host": where}}
        environments[each] = Environment(contents[own] | machine)
    return odd_ranks(environments)

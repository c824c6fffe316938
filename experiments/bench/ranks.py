"""Fresh processes for a measurement: real ranks, or one process that takes itself for a rank of any world."""

import json
import logging
import os
import socket
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException
from torch.testing._internal.distributed.fake_pg import FakeStore

from crossframe.errors import UsageError
from experiments.train.rank_processes import rank_processes

FAKE, GLOO, NCCL = "fake", "gloo", "nccl"


def on_ranks(world_size: int, backend: str, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(rank, *args)` returns on each rank, in rank order. Every rank is a new process of one thread.

    Args:
        backend: GLOO, NCCL (rank i has GPU i), or FAKE: rank 0 alone is run, with torch's process group that talks to nobody.
        work: a function of a module, whose result JSON can hold.

    Raises:
        UsageError: a rank that failed; its traceback stands in the message.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with tempfile.TemporaryDirectory() as folder:
        num_processes = 1 if backend == FAKE else world_size
        arguments = (world_size, backend, folder, work, args)
        with rank_processes(_rank, arguments, num_processes, (__name__, work.__module__)) as ranks:
            try:
                while not ranks.join():
                    pass
            except ProcessException as error:
                raise UsageError(
                    f"rank {error.error_index} of {world_size} failed while it was measured: {error}"
                ) from None
        return [json.loads(_result(folder, rank).read_text()) for rank in range(num_processes)]


def _rank(
    rank: int, world_size: int, backend: str, folder: str, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    # What torch has to say of its own interfaces is known, and no matter here.
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    store = f"file://{folder}/store"
    if backend == FAKE:
        dist.init_process_group(FAKE, store=FakeStore(), rank=rank, world_size=world_size)
    elif backend == NCCL:
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
        dist.init_process_group(NCCL, init_method=store, rank=rank, world_size=world_size, device_id=device)
    else:
        if "lo" in (name for _, name in socket.if_nameindex()):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(GLOO, init_method=store, rank=rank, world_size=world_size)
    try:
        _result(folder, rank).write_text(json.dumps(work(rank, *args)))
    finally:
        dist.destroy_process_group()


def _result(folder: str, rank: int) -> Path:
    return Path(folder, f"{rank}.json")

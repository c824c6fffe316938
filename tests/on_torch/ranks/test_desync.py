"""Ranks that go different ways without an exception: every rank ends with an error long before the group's timeout, and a rank
that is merely slow is waited for."""

# pyright: reportArgumentType=false, reportPrivateImportUsage=false

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_backend
from tests.on_torch.helpers.models import Net, batch, build_net, loss_of
from tests.ranks import start_process
from torch_backend.ranks import _consensus as rounds
from torch_backend.ranks import _desync as position
from torch_backend.ranks import _failure as failure

# The group's timeout, and how long a test waits for ranks at most: nothing here depends on how fast they are.
TIMEOUT_SECONDS, PATIENCE_SECONDS = 600, 60
# The ranks of these tests look at each other more often than once a second, the default.
LOOK_EVERY_SECONDS = 0.2


@dataclass
class Rank:
    """What a rank of a program knows."""

    rank: int
    world_size: int
    model: Any
    # Another connection to the store: the process group's own cannot be used while one waits in it.
    store: Any

    def evaluate(self) -> None:
        """A forward without gradients."""
        with torch.no_grad():
            self.model(batch(0, self.rank)[0])

    def train(self) -> None:
        """A step without optimizer."""
        loss_of(self.model, 0, self.rank).backward()


def _shard(net: Net, interface: str) -> Any:
    if interface in ("flat", "orig"):
        policy = torch_backend.ModuleWrapPolicy({type(net.blocks[0])})
        use_orig_params = interface == "orig"
        return torch_backend.FullyShardedDataParallel(net, auto_wrap_policy=policy, use_orig_params=use_orig_params)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if interface == "hybrid" else None
    for module in (*net.blocks, net):
        torch_backend.fully_shard(module, mesh=mesh)
    return net


def _run_rank(
    program: Callable[[Rank], Any], interface: str, rank: int, world_size: int, port: int, answer: Any
) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    position._PATIENCE_SECONDS = rounds._PATIENCE_SECONDS = LOOK_EVERY_SECONDS
    failure._LOOK_EVERY = timedelta(seconds=LOOK_EVERY_SECONDS)
    stores = [dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False) for _ in range(2)]
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("gloo", store=stores[0], rank=rank, world_size=world_size, timeout=timeout)
    model = _shard(build_net(), interface)
    try:
        this = Rank(rank, world_size, model, stores[1])
        this.train()
        answer.send(("ended", program(this)))
    except Exception as error:
        answer.send((type(error).__name__, str(error)))


def run_apart(program: Callable[[Rank], Any], world_size: int, interface: str = "fsdp2") -> list[tuple[str, Any]]:
    """How each rank of a program ended: "ended" and what it returned, or its error. All processes are gone then."""
    keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, answers = [], []
    for rank in range(world_size):
        ours, theirs = Pipe(duplex=False)
        processes.append(start_process(_run_rank, program, interface, rank, world_size, keeper.port, theirs))
        theirs.close()
        answers.append(ours)
    try:
        found = []
        for rank, answer in enumerate(answers):
            assert wait([answer], PATIENCE_SECONDS), f"rank {rank} is still waiting; before it: {found}"
            with contextlib.suppress(EOFError):
                found.append(answer.recv())
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


# Rank 0 evaluates alone


def _barrier(this: Rank) -> None:
    dist.barrier()


def _mean_loss(this: Rank) -> None:
    dist.all_reduce(torch.ones(()))


def _next_step(this: Rank) -> None:
    this.train()


def _nothing(this: Rank) -> None:
    pass


def _another_root(this: Rank) -> None:
    this.model = _shard(build_net(), "fsdp2")
    this.train()


@dataclass
class Alone:
    """A program in which one rank evaluates alone, while the others do something else."""

    others: Callable[[Rank], None]
    alone: int = 0

    def __call__(self, this: Rank) -> None:
        if this.rank != self.alone:
            self.others(this)
        else:
            for _ in range(2):
                this.evaluate()


LONG = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("world_size", "interface", "others", "told"),
    [
        pytest.param(2, "fsdp2", _next_step, "issued different collectives: as number", id="next step"),
        pytest.param(4, "flat", _next_step, "issued different collectives: as number", id="next step of 4", marks=LONG),
        pytest.param(
            3,
            "orig",
            _barrier,
            "is in torch.distributed.barrier between ranks 0, 1, 2, to which rank 0 did not come",
            id="barrier",
            marks=LONG,
        ),
        pytest.param(
            4,
            "hybrid",
            _barrier,
            "rank 1 is in torch.distributed.barrier between ranks 0, 1, 2, 3, to which",
            id="hybrid",
            marks=LONG,
        ),
        pytest.param(
            2,
            "fsdp2",
            _mean_loss,
            "rank 1 is in torch.distributed.all_reduce between ranks 0, 1, to which",
            id="mean loss",
        ),
        pytest.param(
            2, "fsdp2", _another_root, "is in an agreement (first use of the root) between", id="another root"
        ),
        pytest.param(3, "fsdp2", _nothing, "a rank has probably ended", id="end of the program", marks=LONG),
    ],
)
def test_a_rank_that_evaluates_alone_is_found(world_size, interface, others, told):
    (kind, message), *rest = run_apart(Alone(others), world_size, interface)
    assert kind == "CollectiveError" and told in message, message
    if others is not _next_step:
        assert "all_gather of unit '' (forward) between ranks 0, 1" in message
    if others is not _nothing:
        assert "also to evaluate it" in message
        assert len(rest) == world_size - 1
        assert all(kind in ("CollectiveError", "AgreementError", "RuntimeError") for kind, _ in rest), rest


# Ranks that are merely slow


def _tells_when_it_looked(this: Rank, times: int) -> None:
    """Set a key once this rank has looked several times where the others are, and all had published a position."""
    looked, find = [], position.find_apart

    def counted(*args: Any) -> str:
        reason = find(*args)
        store = dist.distributed_c10d._get_default_store()
        looked.append(store.check([f"crossframe/position/{rank}" for rank in range(this.world_size)]))
        if sum(looked) == times:
            this.store.set("looked", "")
        return reason

    failure.find_apart = counted  # type: ignore[assignment]


def _late(this: Rank) -> str:
    """The last rank is late to a collective, which rank 0 issued and does not wait for, and rank 1 waits for."""
    half = dist.new_group(range(1, this.world_size))
    if this.rank == 0:
        _tells_when_it_looked(this, 3)
        work: Any = dist.all_reduce(torch.ones(()), async_op=True)
        this.evaluate()
        work.wait()
    else:
        if this.rank == this.world_size - 1:
            this.store.wait(["looked"], timedelta(seconds=PATIENCE_SECONDS))
        dist.barrier(group=half)
        dist.all_reduce(torch.ones(()))
        this.evaluate()
    this.train()
    return "all is well"


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=LONG)])
def test_a_late_rank_is_waited_for(world_size):
    assert run_apart(_late, world_size) == [("ended", "all is well")] * world_size

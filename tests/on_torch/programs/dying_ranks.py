"""Trials in which one rank dies, wherever and however, and the others must end, and say why.

`python -m tests.on_torch.programs.dying_ranks` runs them. Each trial is a world of fresh processes; what happens
in it follows from the seed and the trial's number alone, but for the times at which processes run.
"""

import argparse
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torch_backend
from crossframe.trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Event
from tests.on_torch.helpers.failing_ranks import Boom
from tests.on_torch.helpers.models import Net, build_net, loss_of
from tests.ranks import start_process
from torch_backend.observe import Observer, observe

# What a process takes at most to raise, print a traceback and be gone, on a machine that does much else.
SLACK_SECONDS = 30.0

# FSDP1 with its flat parameters or the original ones, and FSDP2; at 4 ranks FSDP2 also with shards of 2 ranks between forward and
# backward (R08), and with 2 replicas of 2 shards.
MODES = ("flat", "orig", "fsdp2")
MODES_OF_4 = (*MODES, "fsdp2 group", "fsdp2 hybrid")
HOW = ("exit", "kill", "raise")
UNITS = ("", "blocks.0", "blocks.1", "blocks.2")
COLLECTIVES = {
    "gather in forward": (ALL_GATHER, "forward"),
    "gather in backward": (ALL_GATHER, "backward"),
    "reduction": (REDUCE_SCATTER, "backward"),
    "sum over replicas": (ALL_REDUCE, "backward"),
}
PLACES = (
    *("construction", "before the first forward", "forward", "between", "backward", "before the optimizer"),
    *("any time", *COLLECTIVES),
)
SAID = re.compile(
    r"^rank (\d+): (all_gather|reduce_scatter|all_reduce) of unit '([^']*)' \((forward|backward)\) between ranks .* failed: "
)


@dataclass(frozen=True)
class Trial:
    """One death.

    Attributes:
        where, how: see PLACES and HOW; at the `nth` time that the victim comes by, `delay` seconds later.
        store: who keeps the store: the "launcher", as under torchrun, or "rank 0".
        timeout: of the process group, in seconds.
    """

    mode: str
    world_size: int
    victim: int
    where: str
    how: str
    nth: int = 1
    delay: float = 0.0
    store: str = "launcher"
    timeout: float = 6.0

    @classmethod
    def drawn(cls, seed: int, number: int) -> "Trial":
        """Trial `number` of a series."""
        draw = random.Random(f"{seed}/{number}")
        world_size = draw.choice((2, 3, 3, 4))
        mode = draw.choice(MODES_OF_4 if world_size == 4 else MODES)
        places = [place for place in PLACES if place != "sum over replicas" or mode == "fsdp2 hybrid"]
        where, how = draw.choice(places), draw.choice(HOW)
        if where == "any time":
            how = draw.choice(("exit", "kill"))
        delay = draw.uniform(0, 0.12) if where == "any time" else draw.choice((0, 0, draw.uniform(0, 0.004)))
        return cls(
            mode=mode,
            world_size=world_size,
            victim=draw.randrange(world_size),
            where=where,
            how=how,
            nth=1 if where in ("construction", "before the first forward", "any time") else draw.randint(1, 9),
            delay=0 if how == "raise" else delay,
            store=draw.choice(("launcher", "launcher", "rank 0")),
        )


@dataclass(frozen=True)
class Outcome:
    """What a rank that did not die said, and when it was gone.

    Attributes:
        kind, message: of its error.
        seconds: from the victim's end to its own; None if it had to be killed.
    """

    rank: int
    kind: str
    message: str
    seconds: float | None

    def complaints(self, trial: Trial) -> list[str]:
        """What is wrong with it."""
        found = []
        if self.seconds is None or self.seconds > trial.timeout + SLACK_SECONDS:
            found.append(f"rank {self.rank} did not end in time ({self.seconds} s)")
        if self.kind == "CollectiveError":
            said = SAID.match(self.message)
            if said is None or int(said[1]) != self.rank or said[3] not in UNITS:
                found.append(f"rank {self.rank} does not name rank, unit and collective: {self.message}")
        elif self.kind != "AgreementError":
            found.append(f"rank {self.rank} ended with {self.kind}: {self.message}")
        elif trial.where not in ("construction", "before the first forward", "any time"):
            found.append(f"rank {self.rank} was in a step, and ended with {self.kind}: {self.message}")
        return found


class Bomb(Observer):
    """Goes off in the victim at the right time."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.left = trial.nth

    def passes(self, place: str) -> None:
        """The victim is at a place."""
        if place == self.trial.where:
            self.left -= 1
            if self.left == 0:
                self._goes_off()

    def event(self, event: Event) -> None:
        """The victim issues a collective."""
        for place, (kind, phase) in COLLECTIVES.items():
            if (event.kind, event.phase) == (kind, phase):
                self.passes(place)

    def _goes_off(self) -> None:
        if self.trial.how == "raise":
            raise Boom
        if self.trial.delay:
            threading.Timer(self.trial.delay, self._ends).start()
        else:
            self._ends()

    def _ends(self) -> None:
        if self.trial.how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL)


def run_trial(trial: Trial) -> tuple[list[Outcome], str]:
    """What became of the ranks that did not die, and all that any rank wrote to stderr."""
    keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    port = keeper.port
    if trial.store == "rank 0":
        del keeper
    with tempfile.TemporaryDirectory() as folder:
        connections: list[Connection] = []
        processes: list[Any] = []
        for rank in range(trial.world_size):
            ours, theirs = Pipe(duplex=False)
            processes.append(start_process(_rank, trial, rank, port, theirs, folder))
            theirs.close()
            connections.append(ours)
        victim = processes[trial.victim]
        victim.join(60)
        died = time.monotonic()
        seconds: dict[int, float] = {}
        deadline = died + trial.timeout + 2 * SLACK_SECONDS
        waiting = {process.sentinel: rank for rank, process in enumerate(processes) if rank != trial.victim}
        while waiting and time.monotonic() < deadline:
            for sentinel in wait(list(waiting), timeout=deadline - time.monotonic()):
                seconds[waiting.pop(sentinel)] = time.monotonic() - died  # type: ignore[call-overload]
        for process in processes:
            process.kill()
            process.join()
        outcomes = []
        for rank, connection in enumerate(connections):
            if rank != trial.victim:
                outcomes.append(Outcome(rank, *_heard(connection), seconds.get(rank)))
        written = "".join(f"--- rank {path.name} ---\n{path.read_text()}" for path in sorted(Path(folder).iterdir()))
    return outcomes, written


def _heard(connection: Connection) -> tuple[str, str]:
    try:
        return connection.recv()
    except EOFError:
        return "nothing", "it ended without a word"


def _rank(trial: Trial, rank: int, port: int, connection: Connection, folder: str) -> None:
    log = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    keeps = trial.store == "rank 0" and rank == 0
    store = dist.TCPStore("127.0.0.1", port, is_master=keeps, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=trial.world_size, timeout=timedelta(seconds=trial.timeout)
    )
    bomb = Bomb(trial)
    if rank != trial.victim:
        bomb.left = 0
    try:
        with observe(bomb):
            _train(trial, rank, bomb)
    except BaseException as error:
        connection.send((type(error).__name__, str(error)))
        raise
    connection.send(("nothing", "it trained to the end"))


def _train(trial: Trial, rank: int, bomb: Bomb) -> None:
    net = build_net()
    norm: torch.nn.Module = net.blocks[1].norm  # type: ignore[assignment]
    norm.register_forward_pre_hook(lambda *_: bomb.passes("forward"))
    norm.register_forward_hook(
        lambda module, args, output: output.register_hook(lambda grad: bomb.passes("backward")) and None
    )
    model = _sharded(net, trial, bomb)
    optimizer = torch.optim.AdamW(model.parameters())
    bomb.passes("before the first forward")
    bomb.passes("any time")
    stop = time.monotonic() + 40
    step = 0
    while time.monotonic() < stop:
        loss = loss_of(model, step, rank)
        bomb.passes("between")
        loss.backward()
        bomb.passes("before the optimizer")
        optimizer.step()
        optimizer.zero_grad()
        step += 1


def _sharded(net: Net, trial: Trial, bomb: Bomb) -> torch.nn.Module:
    mode, timeout = trial.mode, trial.timeout
    shard: Callable[..., Any]
    if mode in ("flat", "orig"):
        shard = partial(torch_backend.FullyShardedDataParallel, use_orig_params=mode == "orig")
    elif mode == "fsdp2 hybrid":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for axis in ("replicate", "shard"):  # which would have torch's usual 30 minutes
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), mesh.get_group(axis))
        shard = partial(torch_backend.fully_shard, mesh=mesh)
    else:
        shard = partial(torch_backend.fully_shard, reshard_after_forward=2 if mode == "fsdp2 group" else None)
    for i, block in enumerate(net.blocks):
        net.blocks[i] = shard(block)
        if i == 1:
            bomb.passes("construction")
    return shard(net)


def main() -> None:
    """Run a series, and say of each trial what became of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one trial, with all that its ranks wrote")
    arguments = parser.parse_args()
    numbers = range(arguments.trials) if arguments.only is None else [arguments.only]
    bad, slowest, kinds = 0, 0.0, Counter()
    for number in numbers:
        trial = Trial.drawn(arguments.seed, number)
        outcomes, written = run_trial(trial)
        complaints = [complaint for outcome in outcomes for complaint in outcome.complaints(trial)]
        bad += bool(complaints)
        slowest = max(slowest, *(outcome.seconds or float("inf") for outcome in outcomes))
        kinds.update(outcome.kind for outcome in outcomes)
        ended = " ".join("never" if outcome.seconds is None else f"{outcome.seconds:.1f}" for outcome in outcomes)
        print(f"{number:3} {'BAD' if complaints else 'ok '} ended after {ended} s: {trial}", flush=True)
        for complaint in complaints:
            print(f"      {complaint}")
        if arguments.only is not None:
            print(written, *(outcome.message for outcome in outcomes), sep="\n")
    print(
        f"{len(numbers)} trials of seed {arguments.seed}: {bad} bad, the slowest rank ended after {slowest:.1f} s; {dict(kinds)}"
    )
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()

"""Trials in which training is killed, or its disk or checkpoints fail, and goes on: `python -m tests.on_torch.programs.campaign`.

A trial is a training run of `experiments.train_torch` that comes to harm one or several times and is started again until it is
through. It must end as the run that nothing happened to: parameters, optimizer state and metrics bit for bit on as many ranks, to
rounding of float64 on others. What is drawn follows from the seed and the trial's number alone, but for the times at which
processes run.
"""

import argparse
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook

from crossframe.checkpoint import read
from crossframe.layout import Sharding
from crossframe.mesh import MeshSpec
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from experiments.train.settings import TrainSettings
from experiments.train_torch import run
from tests.ranks import start_process

STEPS, EVERY, KEEP, BATCH = 8, 2, 2, 12  # a batch that 1, 2, 3 and 4 ranks can share
WORLD_SIZE = 2
ADAM_EPSILON = 1e-8
# A rank whose neighbour died ends by itself within this, or is killed, as torchrun would.
GRACE_SECONDS = 4.0
SESSION_SECONDS = 120.0

# How a run is sharded, and what it computes. Those in float64, without dropout, are the same on any number of ranks.
CONFIGS: tuple[dict[str, Any], ...] = (
    {"api": "fsdp2", "dropout": 0.1},
    {"api": "fsdp2", "layout": "flat", "micro_batch_size": 3},
    {"api": "fsdp2", "layout": "ragged", "strategy": "shard_grad_op", "precision": "bfloat16"},
    {"api": "fsdp1", "dropout": 0.1, "micro_batch_size": 2},
    {"api": "fsdp1", "strategy": "no_shard"},
)
EXACT: tuple[dict[str, Any], ...] = (
    {"api": "fsdp2", "precision": "float64"},
    {"api": "fsdp2", "layout": "flat", "precision": "float64", "strategy": "shard_grad_op"},
    {"api": "fsdp2", "layout": "ragged", "precision": "float64"},
    {"api": "fsdp1", "precision": "float64"},
)
KINDS = (
    *("one rank killed", "all ranks killed", "one rank killed in a save", "all ranks killed in a save"),
    *("file too large", "disk full", "truncated", "bit flipped", "all damaged", "other world"),
    *("torchrun: one rank killed", "torchrun: all killed", "torchrun: launcher killed"),
)


@dataclass(frozen=True)
class Harm:
    """What happens to one rank of a session.

    Attributes:
        rank: the victim.
        whole_world: whether all ranks are killed at once.
        seconds: after which it is killed; or how long after what follows.
        event: the how many-th time that the victim touches the folder of checkpoints, or 0.
        call: the how many-th forward of any of its modules, or 0.
        limit: instead of a death, the most bytes that a file of the `event`-th save may have, or 0.
    """

    rank: int = 0
    whole_world: bool = False
    seconds: float = 0.0
    event: int = 0
    call: int = 0
    limit: int = 0


@dataclass(frozen=True)
class Session:
    """What became of the ranks between one start and their end.

    Attributes:
        statuses: exit status by rank; negative for signals.
        said: what each rank wrote.
        stuck: ranks that did not end by themselves after another had died.
        counts: of each rank that came to the end: how often it touched the checkpoints, and how many forwards there were.
    """

    statuses: tuple[int, ...]
    said: tuple[str, ...]
    stuck: tuple[int, ...] = ()
    counts: tuple[tuple[int, int], ...] = ()


# Sessions


def session(settings: TrainSettings, world_size: int, harm: Harm | None = None) -> Session:
    """Start ranks as torchrun would, and wait for their end."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        connections: list[Connection] = []
        processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = Pipe(duplex=False)
            leader = processes[0].pid if processes else 0
            processes.append(start_process(_rank, settings, rank, world_size, store.port, leader, harm, theirs, folder))
            theirs.close()
            connections.append(ours)
        stuck = _await_end(processes)
        counts = tuple(count for connection in connections for count in _heard(connection))
        said = tuple(Path(folder, str(rank)).read_text() for rank in range(world_size))
        return Session(tuple(process.exitcode for process in processes), said, stuck, counts)


def _heard(connection: Connection) -> Iterator[tuple[int, int]]:
    with suppress(EOFError):
        yield connection.recv()


def _await_end(processes: list[Any]) -> tuple[int, ...]:
    """Wait for all; once one has failed, the others have a while to end. Returns the ranks that then had to be killed."""
    waiting = {process.sentinel: rank for rank, process in enumerate(processes)}
    deadline = time.monotonic() + SESSION_SECONDS
    while waiting and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(waiting), timeout=left):
            rank = waiting.pop(sentinel)  # type: ignore[call-overload]
            processes[rank].join()
            if processes[rank].exitcode < 0:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    stuck = tuple(sorted(waiting.values()))
    for process in processes:
        process.kill()
        process.join()
    return stuck


def _rank(
    settings: TrainSettings,
    rank: int,
    world_size: int,
    port: int,
    leader: int,
    harm: Harm | None,
    connection: Connection,
    folder: str,
) -> None:
    log = os.open(f"{folder}/{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 2)
    _join_group(leader)
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # the store lives outside the ranks
    torch.set_num_threads(1)
    # Warnings of torch's own checkpoints, which the suite would take for errors.
    warnings.simplefilter("ignore")
    bomb = Bomb(settings.output, harm if harm is not None and harm.rank == rank else None)
    try:
        status = 0 if run(settings) else 1
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        status = 2
    connection.send((bomb.events, bomb.calls))
    connection.close()
    os._exit(status)


def _join_group(leader: int) -> None:
    """One process group for all ranks of a session, so that they can be killed at once."""
    while True:
        try:
            return os.setpgid(0, leader)
        except (PermissionError, ProcessLookupError):  # the leader has not made it yet
            time.sleep(0.001)


class Bomb:
    """Counts how often this process touches the folder of checkpoints and runs a module, and does the harm."""

    def __init__(self, output: Path, harm: Harm | None) -> None:
        self.events, self.calls, self._harm = 0, 0, harm
        self._inside = f"{output}/checkpoints/"
        self._saves: list[str] = []
        sys.addaudithook(self._hear)
        register_module_forward_pre_hook(self._called)
        if harm is not None and not harm.event and not harm.call:
            self._go_off_after(harm.seconds)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            return
        if not isinstance(args[0], str | Path) or not str(args[0]).startswith(self._inside):
            return
        self.events += 1
        harm = self._harm
        if harm is None:
            return
        if harm.limit:
            self._limit(str(args[0]))
        elif self.events == harm.event:
            self._go_off_after(harm.seconds)

    def _called(self, *_: Any) -> None:
        self.calls += 1
        if self._harm is not None and self.calls == self._harm.call:
            self._go_off_after(self._harm.seconds)

    def _limit(self, path: str) -> None:
        assert self._harm is not None
        saving = re.search(r"/writing-step-\d+", path)
        if saving and saving[0] not in self._saves:
            self._saves.append(saving[0])
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            limit = self._harm.limit if len(self._saves) == self._harm.event else hard
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    def _go_off_after(self, seconds: float) -> None:
        if seconds:
            timer = threading.Timer(seconds, self._go_off)
            timer.daemon = True
            timer.start()
        else:
            self._go_off()

    def _go_off(self) -> None:
        assert self._harm is not None
        if self._harm.whole_world:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


# What is on disk


def whole(path: Path) -> bool:
    """Whether a checkpoint is what its index says, by a way of its own."""
    try:
        files = json.loads((path / "index.json").read_text())["content"]["files"]
        return all(hashlib.sha256((path / name).read_bytes()).hexdigest() == of["sha256"] for name, of in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def finals(output: Path) -> list[Path]:
    """Finished checkpoints, the oldest first."""
    return sorted(path for path in (output / "checkpoints").glob("step-*"))


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def content(path: Path) -> dict[str, Any]:
    """All that a checkpoint holds, in full, by name."""
    saved, found = read(path), {}
    for section, sharding in saved.sections.items():
        alone = Sharding(tuple((unit, layout.over(1)) for unit, layout in sharding.units), MeshSpec(1))
        for (_, layout), line in zip(alone.units, saved.lines(section, alone, 0), strict=True):
            for spec, piece in zip(layout.params, layout.pieces(0), strict=True):
                entry, _, name = spec.name.rpartition(":")
                whole = torch.from_numpy(line[piece.shard_start : piece.shard_stop].copy()).view(spec.shape)
                found[f"optimizer.{name}.{entry}" if entry else f"model.{name}"] = whole
    return found | {f"optimizer.{key}": saved.value(key).item() for key in saved.values}


def metrics(output: Path) -> list[tuple[int, float, float]]:
    """Step, loss and norm of the gradient, of each step."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def differences(expected: Path, got: Path, *, exact: bool) -> list[str]:
    """Where a run differs from the one that nothing happened to, by name."""
    found = []
    ours, theirs = metrics(got), metrics(expected)
    if [step for step, *_ in ours] != [step for step, *_ in theirs]:
        return [f"metrics of steps {[step for step, *_ in ours]}"]
    bounds = bounds_for("float64")
    for (step, loss, norm), (_, expected_loss, expected_norm) in zip(ours, theirs, strict=True):
        within = abs(loss - expected_loss) <= bounds.loss * abs(expected_loss)
        within = within and abs(norm - expected_norm) <= bounds.parameter * abs(expected_norm)
        if (loss, norm) != (expected_loss, expected_norm) and (exact or not within):
            found.append(f"step {step}: loss {loss!r}, norm {norm!r}, expected {expected_loss!r}, {expected_norm!r}")
    last = f"checkpoints/step-{STEPS:08d}"
    a, b = content(expected / last), content(got / last)
    if a.keys() != b.keys():
        return [*found, f"names {sorted(a.keys() ^ b.keys())}"]
    largest = max(norm for *_, norm in theirs)
    for name, value in a.items():
        other = b[name]
        if not isinstance(value, Tensor):
            same = value == other
        elif exact:
            same = value.dtype == other.dtype and value.numpy().tobytes() == other.numpy().tobytes()
        else:
            distance = float((value - other).double().norm())
            same = value.dtype == other.dtype and distance <= _allowed(name, value, largest)
        if not same:
            found.append(
                f"{name} differs" + (f" by {(value - other).abs().max():.3g}" if isinstance(value, Tensor) else "")
            )
    return found


def _allowed(name: str, value: Tensor, largest: float) -> float:
    """How far rounding of float64 may take an entry, in norm, where gradients have at most the norm `largest`.

    `crossframe.verdict.measure.bounds_by_dtype` has the bound of parameters and of gradients, relative to what they are made of:
    the first moment is an average of gradients, the second of their squares. Where the gradient is zero in exact arithmetic, as a
    key's bias has it, AdamW divides what rounding makes of it by epsilon: with an error of a gradient of at most
    `bounds.loss * largest`, each step may differ by twice the learning rate times that over epsilon.
    """
    bounds, moved = bounds_for("float64"), TrainSettings.learning_rate * STEPS * value.numel() ** 0.5
    if name.startswith("model.") and name.endswith("key.bias"):
        return moved * 2 * bounds.loss * largest / ADAM_EPSILON
    scale = moved if name.startswith("model.") else largest**2 if name.endswith("exp_avg_sq") else largest
    return bounds.parameter * max(float(value.norm()), scale) if not name.endswith(".step") else 0.0


# Trials


@dataclass
class Outcome:
    """What became of a trial.

    Attributes:
        complaints: what is wrong; a trial is good without.
        harms: how often the run was harmed; `saves_cut`: how often that left a checkpoint half-written.
        resumed: from which steps it went on.
        stuck: ranks that had to be killed after another had died.
    """

    complaints: list[str]
    harms: int = 0
    saves_cut: int = 0
    resumed: tuple[int, ...] = ()
    stuck: int = 0


@dataclass(frozen=True)
class Reference:
    """A run that nothing happened to: its folder, and how often each rank touched the checkpoints and ran a module."""

    output: Path
    counts: tuple[tuple[int, int], ...]


class Trials:
    """Trials of one series.

    Args:
        folder: for everything they write.
        seed: of the series.
        async_save: whether training continues while checkpoints are written.
    """

    def __init__(self, folder: Path, seed: int, *, async_save: bool = False) -> None:
        self.folder, self.seed, self.async_save = folder, seed, async_save
        self._references: dict[str, Reference] = {}

    def kind(self, number: int) -> str:
        """The kind of a trial: all in turn, but for those that start torchrun, which take long."""
        torchrun = [kind for kind in KINDS if kind.startswith("torchrun")]
        if number % 20 == 19:
            return torchrun[number // 20 % len(torchrun)]
        others = [kind for kind in KINDS if kind not in torchrun]
        return others[number % len(others)]

    def run(self, number: int, kind: str | None = None) -> Outcome:
        """Run a trial, of a kind or of that which is its number's."""
        kind = kind or self.kind(number)
        draw = random.Random(f"{self.seed}/{number}/{kind}")
        config = draw.choice(EXACT if kind == "other world" else CONFIGS)
        output = self.folder / f"trial-{number}"
        act = {
            "file too large": self._file_too_large,
            "disk full": self._disk_full,
            "truncated": self._damaged,
            "bit flipped": self._damaged,
            "all damaged": self._all_damaged,
            "torchrun: one rank killed": self._torchrun,
            "torchrun: all killed": self._torchrun,
            "torchrun: launcher killed": self._torchrun,
        }.get(kind, self._killed)
        outcome = act(kind, draw, config, output)
        shutil.rmtree(output, ignore_errors=True)
        return outcome

    def reference(self, config: dict[str, Any]) -> Reference:
        """The run of these settings that nothing happens to."""
        key = json.dumps(config, sort_keys=True)
        if key not in self._references:
            output = self.folder / f"reference-{len(self._references)}"
            done = session(self._settings(config, output), WORLD_SIZE)
            assert done.statuses == (0,) * WORLD_SIZE, done
            self._references[key] = Reference(output, done.counts)
        return self._references[key]

    def _settings(self, config: dict[str, Any], output: Path) -> TrainSettings:
        common = {
            "model": "gpt-tiny",
            "steps": STEPS,
            "batch_size": BATCH,
            "warmup_steps": 2,
            "clip": 0.5,
            "device": "cpu",
            "async_save": self.async_save,
        }
        return TrainSettings(output, checkpoint_every=EVERY, keep=KEEP, **(common | config))

    def _killed(self, kind: str, draw: random.Random, config: dict[str, Any], output: Path) -> Outcome:
        reference, settings = self.reference(config), self._settings(config, output)
        outcome = Outcome([])
        for _ in range(draw.choice((1, 1, 2, 3))):
            left = 1 - (_step_of(finals(output)[-1]) if finals(output) else 0) / STEPS
            if not left:
                break
            victim = draw.randrange(WORLD_SIZE)
            events, calls = (max(1, int(left * count)) for count in reference.counts[victim])
            everyone = kind.startswith("all") or (kind == "other world" and draw.random() < 0.5)
            if kind.endswith("in a save") or (kind == "other world" and draw.random() < 0.5):
                delay = draw.choice((0.0, draw.uniform(0, 0.02)))
                harm = Harm(victim, everyone, delay, event=draw.randint(1, events))
            elif draw.random() < 0.8:
                harm = Harm(victim, everyone, draw.uniform(0, 0.02), call=draw.randint(1, calls))
            else:
                harm = Harm(victim, everyone, draw.uniform(0.05, 1))
            self._session(settings, WORLD_SIZE, harm, outcome)
        if kind == "other world":
            how = {name: value for name, value in draw.choice(EXACT).items() if name in ("api", "layout", "strategy")}
            settings = self._settings({"precision": "float64", **how}, output)
            self._to_the_end(settings, draw.choice((1, 3, 4)), outcome)
        else:
            self._to_the_end(settings, WORLD_SIZE, outcome)
        outcome.complaints += differences(reference.output, output, exact=kind != "other world")
        return outcome

    def _session(self, settings: TrainSettings, world_size: int, harm: Harm | None, outcome: Outcome) -> Session:
        """One session, and what must hold after any."""
        before = finals(settings.output)
        done = session(settings, world_size, harm)
        after = finals(settings.output)
        outcome.stuck += len(done.stuck)
        outcome.complaints += [f"{path.name} is not whole after {harm}" for path in after if not whole(path)]
        if before and (not after or after[-1] < before[-1]):
            outcome.complaints.append(f"{before[-1].name} is lost after {harm}")
        resumed = re.search(r"going on from .*, step (\d+)", done.said[0])
        expected = _step_of(before[-1]) if before else None
        if resumed:
            outcome.resumed += (int(resumed[1]),)
        if (int(resumed[1]) if resumed else expected) != expected:
            outcome.complaints.append(f"went on from step {resumed and resumed[1]}, expected {expected}: {done.said}")
        if harm is not None and -signal.SIGKILL in done.statuses:
            outcome.harms += 1
            left = (settings.output / "checkpoints").glob("*-step-*")
            outcome.saves_cut += any(path.name.startswith(("writing-", "removing-")) for path in left)
            if 0 in done.statuses and not harm.whole_world and len(after) < KEEP:
                outcome.complaints.append(f"a rank was killed and another says that all is well: {done}")
        return done

    def _to_the_end(self, settings: TrainSettings, world_size: int, outcome: Outcome) -> Session:
        done = self._session(settings, world_size, None, outcome)
        if set(done.statuses) != {0}:
            outcome.complaints.append(f"did not come to the end: {done}")
        if left := [
            path.name for path in (settings.output / "checkpoints").iterdir() if not path.name.startswith("step-")
        ]:
            outcome.complaints.append(f"left behind: {left}")
        return done

    def _file_too_large(self, kind: str, draw: random.Random, config: dict[str, Any], output: Path) -> Outcome:
        reference, settings = self.reference(config), self._settings(config, output)
        outcome = Outcome([])
        victim = draw.randrange(WORLD_SIZE)
        harm = Harm(victim, event=draw.randint(1, STEPS // EVERY), limit=draw.randint(8192, 60_000))
        done = self._session(settings, WORLD_SIZE, harm, outcome)
        outcome.harms = outcome.saves_cut = done.said[0].count("NOT SAVED")
        if len(set(done.statuses)) != 1 or done.statuses[0] not in (0, 1):
            outcome.complaints.append(f"a file too large ended the run: {done}")
        if "NOT SAVED" in done.said[0] and str(output / "checkpoints") not in done.said[0]:
            outcome.complaints.append(f"the folder is not named: {done.said[0]}")
        if done.statuses[0] == 1 and f"NOT SAVED at step {STEPS}" not in done.said[0]:
            outcome.complaints.append(f"status 1 though the last step is saved: {done.said[0]}")
        self._to_the_end(settings, WORLD_SIZE, outcome)
        outcome.complaints += differences(reference.output, output, exact=True)
        return outcome

    def _disk_full(self, kind: str, draw: random.Random, config: dict[str, Any], output: Path) -> Outcome:
        reference, settings = self.reference(config), self._settings(config, output)
        outcome = Outcome([], harms=1)
        one = sum(path.stat().st_size for path in finals(reference.output)[-1].iterdir())
        with small_disk(output, int(one * draw.uniform(0.3, 2.9))) as grow:
            done = self._session(settings, WORLD_SIZE, None, outcome)
            outcome.saves_cut += done.said[0].count("NOT SAVED")
            if "NOT SAVED" not in done.said[0] or "No space left" not in done.said[0]:
                outcome.complaints.append(f"does not say that the disk is full: {done.said[0]}")
            if set(done.statuses) != {1}:
                outcome.complaints.append(f"expected status 1: {done}")
            if left := [path.name for path in (output / "checkpoints").iterdir() if not path.name.startswith("step-")]:
                outcome.complaints.append(f"left behind on a full disk: {left}")
            grow()
            self._to_the_end(settings, WORLD_SIZE, outcome)
            outcome.complaints += differences(reference.output, output, exact=True)
        return outcome

    def _damaged(self, kind: str, draw: random.Random, config: dict[str, Any], output: Path) -> Outcome:
        reference, settings = self.reference(config), self._settings(config, output)
        shutil.copytree(reference.output, output)
        outcome = Outcome([], harms=1)
        good, bad = finals(output)
        name = damage(bad, kind, draw)
        done = session(settings, WORLD_SIZE)
        said = done.said[0]
        if not all(word in said for word in ("DAMAGED", name, bad.name, f"going on from {good}")):
            outcome.complaints.append(f"{kind} {name} of {bad.name} is not named: {said}")
        if set(done.statuses) != {0} or not (bad.parent / f"damaged-{bad.name}").exists():
            outcome.complaints.append(f"did not go on from {good.name}: {done}")
        outcome.resumed += (_step_of(good),)
        outcome.complaints += differences(reference.output, output, exact=True)
        return outcome

    def _all_damaged(self, kind: str, draw: random.Random, config: dict[str, Any], output: Path) -> Outcome:
        reference, settings = self.reference(config), self._settings(config, output)
        shutil.copytree(reference.output, output)
        outcome = Outcome([], harms=1)
        names = [damage(path, draw.choice(("truncated", "bit flipped")), draw) for path in finals(output)]
        before = _bytes(output)
        done = session(settings, WORLD_SIZE)
        if set(done.statuses) != {2} or not all(name in done.said[0] for name in ("no checkpoint is whole", *names)):
            outcome.complaints.append(f"expected a refusal that names {names}: {done}")
        if _bytes(output) != before:
            outcome.complaints.append("something was changed")
        return outcome

    def _torchrun(self, kind: str, draw: random.Random, config: dict[str, Any], output: Path) -> Outcome:
        reference, settings = self.reference(config), self._settings(config, output)
        outcome = Outcome([])
        with started_by_torchrun(settings, WORLD_SIZE) as agent:
            _await(lambda: bool(finals(output)) or agent.poll() is not None)
            time.sleep(draw.uniform(0, 1))
            tree = descendants(agent.pid)
            victims = [draw.choice(tree)] if tree else []
            if not kind.endswith("one rank killed"):
                victims = [agent.pid] if kind.endswith("launcher killed") else [*tree, agent.pid]
            for pid in victims:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            outcome.harms += bool(victims)
            status = agent.wait(SESSION_SECONDS)
        if kind.endswith("one rank killed") and status:
            outcome.complaints.append(f"torchrun did not start the ranks again, and ended with {status}")
        outcome.complaints += [f"{path.name} is not whole" for path in finals(output) if not whole(path)]
        for attempt in range(5):
            with started_by_torchrun(settings, WORLD_SIZE) as agent:
                if not (status := agent.wait(SESSION_SECONDS)):
                    break
            # Ranks that outlive their launcher train on, and meanwhile no other run may write there.
            if not kind.endswith("launcher killed") or attempt == 4:
                outcome.complaints.append(f"started again, it ended with {status}")
        outcome.complaints += differences(reference.output, output, exact=True)
        return outcome


def damage(path: Path, kind: str, draw: random.Random) -> str:
    """Damage a file of a checkpoint; returns its name."""
    file = draw.choice(sorted(path.iterdir()))
    whole_file = file.read_bytes()
    if kind == "bit flipped":
        at = draw.randrange(len(whole_file))
        file.write_bytes(whole_file[:at] + bytes([whole_file[at] ^ 1 << draw.randrange(8)]) + whole_file[at + 1 :])
    elif draw.random() < 0.3:
        file.unlink()
    else:
        file.write_bytes(whole_file[: draw.randrange(len(whole_file))])
    return file.name


def _bytes(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "lock"
    }


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[Any]:
    """A disk of this size at `path`; calling what it gives makes it large. Needs root."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path)], check=True)
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=100m", str(path)], check=True)
    finally:
        # Lazily: what was killed on it may not be quite gone.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def started_by_torchrun(settings: TrainSettings, world_size: int) -> Iterator[subprocess.Popen[bytes]]:
    """The script, started as a user starts it; torchrun starts failed ranks again."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)),
        *("--max-restarts", "3", "-m", "experiments.train_torch", *arguments(settings)),
    ]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # see "Training on a cluster" in README.md
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        yield agent
    finally:
        for pid in (*descendants(agent.pid), agent.pid) if agent.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


def arguments(settings: TrainSettings) -> list[str]:
    """The settings as options of the command."""
    return [
        word
        for name, value in vars(settings).items()
        if value is not None and value is not False
        for word in (f"--{name.replace('_', '-')}", *(() if value is True else (str(value),)))
    ]


def descendants(pid: int) -> list[int]:
    """The processes that a process started, and those that these started."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [each for child in children for each in (child, *descendants(child))]


def _await(done: Any) -> None:
    deadline = time.monotonic() + SESSION_SECONDS
    while not done():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def main() -> None:
    """Run a series, and say of each trial what became of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="the number of one trial")
    parser.add_argument("--kind", choices=KINDS, help="trials of one kind")
    parser.add_argument("--async-save", action="store_true", help="continue training while checkpoints are written")
    given = parser.parse_args()
    numbers = range(given.trials) if given.only is None else [given.only]
    totals: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        trials = Trials(Path(folder), given.seed, async_save=given.async_save)
        for number in numbers:
            kind = given.kind or trials.kind(number)
            if kind == "disk full" and os.geteuid():
                kind = "file too large"  # only root can make a small disk
            began = time.monotonic()
            outcome = trials.run(number, kind)
            told = f"{outcome.harms} harms, {outcome.saves_cut} saves cut, went on from {list(outcome.resumed)}"
            stuck = f", {outcome.stuck} ranks stuck" if outcome.stuck else ""
            verdict = "BAD" if outcome.complaints else "ok "
            print(f"{number:3} {verdict} {kind}: {told}{stuck} ({time.monotonic() - began:.1f} s)", flush=True)
            for complaint in outcome.complaints:
                print(f"      {complaint}", flush=True)
            totals.setdefault(kind, Counter()).update(
                {
                    "trials": 1,
                    "harms": outcome.harms,
                    "saves cut": outcome.saves_cut,
                    "resumed": len(outcome.resumed),
                    "bad": bool(outcome.complaints),
                }
            )
    columns = ("trials", "harms", "saves cut", "resumed", "bad")
    print(f"\nseed {given.seed}\n{'kind':28}" + "".join(f"{column:>12}" for column in columns))
    for kind, counts in [*totals.items(), ("all", sum(totals.values(), Counter()))]:
        print(f"{kind:28}" + "".join(f"{counts[column]:12}" for column in columns))
    raise SystemExit(any(counts["bad"] for counts in totals.values()))


if __name__ == "__main__":
    main()

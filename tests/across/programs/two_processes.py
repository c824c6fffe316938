"""What two processes of JAX do together, on CPUs over gloo.

`python -m tests.across.programs.two_processes RANK PORT FOLDER CHECK...` starts one of them.

Each has two devices. Each check is run by both, and what it returns is written to a file, or the error that it met.
"""

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from crossframe import MeshSpec
from crossframe.checkpoint import AsyncSaver, writing
from crossframe.errors import CrossframeError
from jax_backend import (
    Recorder,
    ShardedParams,
    load_checkpoint,
    make_mesh,
    save_checkpoint,
    shard,
    sharded_optimizer,
    summon_full_params,
    unshard,
)
from jax_backend.orbax import ShardedRestore, ShardedSave
from tests.on_jax.helpers import recorded_loops
from tests.on_jax.helpers.small import UNITS, small_loss, small_map, small_params

MESHES = {"shard": MeshSpec(4), "hybrid": MeshSpec(shard=2, replicate=2)}
STOPPED_IN = 2  # the step, from 0, in which the second process is asked to stop


def sharded_as(spec: MeshSpec, layout: str, seed: int = 0) -> ShardedParams:
    """The small model."""
    return shard(small_params(seed=seed), make_mesh(spec), units=UNITS, param_map=small_map(), layout=layout)


def same(found: Any, wanted: Any) -> bool:
    """Whether all that lies in this process is the same, bit for bit."""

    def here(array: jax.Array) -> list[bytes]:
        return [np.asarray(part.data).tobytes() for part in array.addressable_shards]

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(here(a) == here(b) and a.sharding == b.sharding for a, b in pairs)


def said(act: Any) -> str:
    """The error that an act raises."""
    try:
        act()
    except CrossframeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def checkpoints(folder: Path, rank: int) -> Any:
    """Saved on one mesh, loaded on the other, and what is damaged."""
    tx, found = sharded_optimizer(optax.adam(1e-2)), []
    made = {}
    for mesh, layout in (("shard", "per_param"), ("hybrid", "flat")):
        params = sharded_as(MESHES[mesh], layout)
        state = jax.jit(tx.update)(params, tx.init(params), params)[1]
        made[mesh] = params, state
        save_checkpoint(folder / mesh, params, state, about={"step": 3})
    for mesh, other in (("shard", "hybrid"), ("hybrid", "shard")):
        params, state = made[other]
        loaded = load_checkpoint(folder / mesh, jax.tree.map(lambda leaf: leaf * 0, params), tx.init(params))
        found.append(same(loaded, (params, state)))
    with AsyncSaver() as saver:
        save_checkpoint(folder / "async", params, state, saver=saver)
    found.append(same(load_checkpoint(folder / "async", params, tx.init(params)), (params, state)))
    multihost_utils.sync_global_devices("saved")
    if rank == 0:
        (folder / "shard" / "rank00002.safetensors").unlink()
    multihost_utils.sync_global_devices("damaged")
    errors = [said(lambda: load_checkpoint(folder / "shard", made["shard"][0]))]
    errors.append(said(lambda: save_checkpoint(folder / "hybrid", made["shard"][0])))
    write = writing.write_tensors
    if rank == 1:
        writing.write_tensors = lambda file, arrays: write(file / "no folder", arrays)
    save_checkpoint(folder / "failing", made["shard"][0], saver=saver)
    errors.append(said(saver.wait))
    writing.write_tensors = write
    return [found, errors]


def summons(folder: Path, rank: int) -> Any:
    """Shown on the devices, on the host and on the first rank alone; edits are written back."""
    full: Any = small_params()
    found = []
    for layout in ("flat", "per_param"):
        sharded = sharded_as(MESHES["shard"], layout)
        with summon_full_params(sharded) as summoned:
            found.append(all(jax.tree.leaves(jax.tree.map(np.array_equal, summoned.params, full))))
            summoned.params["inp"]["bias"] = summoned.params["inp"]["bias"] + 1
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with summon_full_params(summoned.sharded, offload_to_cpu=True) as again:
                found.append(bool(np.array_equal(again.params["inp"]["bias"], full["inp"]["bias"] + 1)))
                again.params["out"]["bias"][:] = 7
        found.append(len(warned) == 1)
        with summon_full_params(again.sharded, rank0_only=True, offload_to_cpu=True, writeback=False) as first:
            bias = first.params["out"]["bias"]
            found.append(bias is None if rank else bool(np.array_equal(bias, np.full(2, 7.0))))
        whole: Any = unshard(again.sharded)
        found.append(bool(np.array_equal(whole["out"]["bias"], np.full(2, 7.0))))
    return found


def orbax(folder: Path, rank: int) -> Any:
    """Saved by orbax on one mesh, restored on the other."""
    tx = sharded_optimizer(optax.adam(1e-2))
    saved, wanted = sharded_as(MESHES["shard"], "per_param"), sharded_as(MESHES["hybrid"], "flat")
    like = sharded_as(MESHES["hybrid"], "flat", seed=1)
    with ocp.CheckpointManager(folder / "orbax") as manager:
        manager.save(1, args=ShardedSave(saved, tx.init(saved)))
        manager.wait_until_finished()
        found = manager.restore(1, args=ShardedRestore(like, tx.init(like)))
    return [same(found, (wanted, tx.init(wanted)))]


def training(folder: Path, rank: int) -> Any:
    """A run that goes on where another stopped, is asked to stop in one process, and goes on to its end."""
    from experiments import train_jax  # which takes longer to import than other checks to run
    from experiments.train import loop
    from experiments.train.settings import TrainSettings

    settings = TrainSettings(**json.loads((folder / "settings.json").read_text()) | {"output": folder / "run"})
    devices = [next(d for d in jax.devices() if d.process_index == i) for i in range(2)]
    trainer = train_jax.JaxTrainer(settings, make_mesh(MeshSpec(2), devices))  # for both runs, which compiles once
    text_batch, before = train_jax.text_batch, signal.getsignal(signal.SIGTERM)

    def batch_and_signal(seed: int, step: int, *rest: Any) -> Any:
        if (rank, step) == (1, STOPPED_IN):
            os.kill(os.getpid(), signal.SIGTERM)
        return text_batch(seed, step, *rest)

    train_jax.text_batch = batch_and_signal  # type: ignore[assignment]
    stopped = loop.run(settings, train_jax.JaxProcesses(), lambda: trainer)
    train_jax.text_batch = text_batch
    there = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    ended = loop.run(settings, train_jax.JaxProcesses(), lambda: trainer)
    return [stopped, there, ended, signal.getsignal(signal.SIGTERM) is before]


def recordings(folder: Path, rank: int) -> Any:
    """FSDP by hand, and ShardedParams with what is inside of a step: all ranks in one recording, begun by the first process."""
    recorded_loops.run(folder / "by-hand", recorded_loops.mesh_of(data=2, fsdp=2), param_map=small_map())
    sharded = recorded_loops.sharded_small(2, 2)
    with Recorder(folder / "sharded", sharded, **recorded_loops.TOLD) as recorder:
        recorded_loops.train(recorder, sharded, small_loss)
    multihost_utils.sync_global_devices("recorded")

    def again() -> None:
        with Recorder(folder / "sharded", sharded):
            raise AssertionError("it was to be refused")

    return said(again)


CHECKS = {check.__name__: check for check in (checkpoints, summons, orbax, recordings, training)}


def main(rank: int, port: str, folder: Path, checks: list[str]) -> None:
    """Run these checks."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    found = {}
    for name in checks:
        try:
            found[name] = CHECKS[name](folder, rank)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
            raise
        finally:
            (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4:])

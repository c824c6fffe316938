"""One rank's part in recording: whatever shards the model, the loop and its recorder are the same."""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from experiments.bench.contestants import BARE, DDP, Dtypes, build
from experiments.bench.fsdp_variants.cells import Run
from experiments.data import Batch
from experiments.models.load_torch import load_initial
from experiments.parity.record_torch import optimizer_of
from experiments.parity.settings import RunSettings
from torch_backend.recorder import Recorder


def record_all(rank: int, runs: Sequence[Run], folder: str) -> list[str | None]:
    """Record runs of one number of ranks, one after another; for each what went wrong, where something did.

    What goes wrong on one rank alone leaves the others waiting, until their process group loses patience.
    """
    said: list[str | None] = []
    for run in runs:
        path = Path(folder, run.folder)
        existed = path.exists()
        dist.barrier()  # nobody makes it before all have looked
        try:
            for perturbed_run in range(run.perturbed_runs + 1):
                record(run, path, rank, perturbed_run)
            said.append(None)
        except Exception as error:
            said.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        dist.barrier()
        if rank == 0 and said[-1] is not None and not existed:
            shutil.rmtree(path, ignore_errors=True)
    return said


def record(run: Run, path: Path, rank: int, perturbed_run: int = 0) -> None:
    """Train and record one rank of the default process group; a perturbed run lies inside of the run that it is a perturbed run
    of."""
    settings = run.settings
    model, units = built(run)
    optimizer = optimizer_of(settings, model.parameters())
    with Recorder(
        path,
        model=model,
        optimizer=optimizer,
        units=units if run.contestant in (BARE, DDP) else None,
        dense=run.steps,
        steps=run.steps,
        perturbed_run=perturbed_run,
        overwrite=True,
        name=run.model,
        seed=settings.seed,
        settings={"clip": settings.clip, "accumulate": settings.accumulate},
    ) as recorder:
        for step in range(run.steps):
            batch = settings.batch(step, rank)
            loss = _backward(settings, model, batch)
            if settings.clip is not None:
                clip(model, settings.clip, run)
            optimizer.step()
            recorder.step(loss=loss, batch=batch.digest, sample_ids=batch.sample_ids)
            optimizer.zero_grad()


def built(run: Run) -> tuple[nn.Module, set[type]]:
    """The model with its initial values as a contestant shards it, and the classes of its units."""
    settings = run.settings
    module, units = settings.definition.make_torch()
    module = module.to(getattr(torch, settings.stored_dtype))
    load_initial(module, settings.initial_params)
    dtypes = None
    if settings.dtype != settings.stored_dtype:
        dtypes = Dtypes(getattr(torch, settings.dtype), getattr(torch, settings.stored_dtype))
    model = build(run.contestant, module, units, dtypes)
    if run.fault:
        assert run.contestant == DDP, run
        model.register_comm_hook(None, _summed)  # type: ignore[operator]
    return model, units


def _summed(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[reportPrivateImportUsage]
    """DDP's hook for one that forgets to divide."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def clip(model: Any, limit: float, run: Run) -> None:
    """Clip gradients as the interface of a contestant has it.

    torch's FSDP1 refuses to clip float64: there the norm is put together by hand.
    """
    if run.contestant == "torch FSDP1" and run.dtype == "float64":
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        squares = torch.stack([grad.square().sum() for grad in grads]).sum()
        if run.world_size > 1:
            dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, squares.sqrt())
    elif own := getattr(model, "clip_grad_norm_", None):
        own(limit)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), limit)


def _backward(settings: RunSettings, model: Any, batch: Batch) -> float:
    """Leave the reduced gradient of all microbatches; returns this rank's mean loss."""
    inputs, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets).long()
    if not inputs.is_floating_point():
        inputs = inputs.long()
    total, num = 0.0, settings.accumulate
    for i in range(num):
        part = slice(i * settings.batch_size, (i + 1) * settings.batch_size)
        with ExitStack() as stack:
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(i == num - 1)
            else:
                stack.enter_context(model.no_sync() if i < num - 1 and hasattr(model, "no_sync") else nullcontext())
            logits = model(inputs[part])
            loss = functional.cross_entropy(logits.flatten(0, -2), targets[part].flatten()) / num
            loss.backward()
        total += loss.item()
    return total

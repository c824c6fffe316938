"""A script that trains a Llama on one device, by an interleaved pipeline or by context parallelism, without a recorder.

Usage: train.py FORM [FAULT], FORM one of one, one-microbatches, interleaved, context.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from experiments.parallelism.axis import Axis
from experiments.parallelism.second.llama import LENGTH, VOCABULARY, Context, Decoder

STEPS, SAMPLES, MICROBATCHES = 3, 8, 4


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    samples = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return samples[:, :-1].contiguous(), samples[:, 1:].contiguous()


def make(stage: int = 0, stages: int = 1) -> Decoder:
    torch.manual_seed(0)
    return Decoder(experts=False, part=(stage, stages)).double()


def interleaved(fault: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    rank = mesh.get_local_rank()
    numbers = [rank, rank + 2]
    parts = [make(number, 4) for number in numbers]
    stages: list[Any] = [
        PipelineStage(part, number, 4, torch.device("cpu"), group=mesh.get_group())
        for part, number in zip(parts, numbers, strict=True)
    ]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss_of, scale_grads=fault != "script_scale")
    optimizers = [torch.optim.AdamW(part.parameters(), 1e-2, foreach=False) for part in parts]
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def context(fault: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    model.see(Context(Axis(mesh), "head_tail"))
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        with context_parallel(mesh, buffers=[tokens, targets], buffer_seq_dims=[1, 1]):
            loss_of(model(tokens), targets).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            dist.all_reduce(param.grad)
            if not (fault == "script_average" and name == "lm_head.weight"):
                param.grad.div_(2)
        optimizer.step()
        optimizer.zero_grad()


def one_device(microbatches: int) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    for step in range(STEPS):
        tokens, targets = batch_of(step)
        for x, y in zip(tokens.chunk(microbatches), targets.chunk(microbatches), strict=True):
            (loss_of(model(x), y) / microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    form, fault = (*sys.argv[1:], "")[:2]
    if form.startswith("one"):
        one_device(MICROBATCHES if form == "one-microbatches" else 1)
    else:
        dist.init_process_group("gloo")
        {"interleaved": interleaved, "context": context}[form](fault)
        dist.destroy_process_group()

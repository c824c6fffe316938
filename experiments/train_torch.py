"""Train a GPT on text, sharded over any number of ranks by torch_backend.

    torchrun --standalone --nproc-per-node 2 -m experiments.train_torch --output runs/gpt

The same command goes on from the newest whole checkpoint: on any number of ranks, through either interface, with any strategy
and layout, also where `experiments.train_jax` wrote it. A step follows from the seed and its number alone: the ranks share out
one batch, and what dropout draws follows from seed, step and rank. So a run is the same however often it was interrupted: bit for
bit on as many ranks, to rounding on others.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch.nn import functional

from crossframe.checkpoint import AsyncSaver, CheckpointError
from crossframe.errors import UsageError
from experiments.data import text_batch
from experiments.train import loop
from experiments.train.settings import TrainSettings
from experiments.train.sharded import Sharded, build
from torch_backend import load_checkpoint, save_checkpoint

DEFAULTS = TrainSettings(Path("runs/gpt"))
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def train(settings: TrainSettings, device: torch.device) -> bool:
    """Train to the end, or until SIGTERM asks to stop. All ranks of the default process group call it.

    Returns:
        Whether the last step that was taken is in a checkpoint.

    Raises:
        CrossframeError: settings, a folder or a checkpoint that cannot be used.
    """
    settings.num_microbatches(dist.get_world_size())  # before anything is made
    return loop.run(settings, TorchRanks(), lambda: TorchTrainer(settings, device))


class TorchRanks:
    """The ranks of the default process group; see `experiments.train.together.Ranks`."""

    noun = "rank"

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """What each rank passes."""
        found = [None] * self.size
        dist.all_gather_object(found, value)
        return found


class TorchTrainer:
    """The model and AdamW; see `experiments.train.loop.Trainer`."""

    def __init__(self, settings: TrainSettings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.sharded: Sharded = build(settings, device)
        self.optimizer = torch.optim.AdamW(self.sharded.model.parameters(), weight_decay=settings.weight_decay)

    def save(self, path: Path, about: dict[str, Any], saver: AsyncSaver | None = None) -> None:
        """Write a checkpoint."""
        save_checkpoint(path, self.sharded.model, self.optimizer, about=about, saver=saver)

    def load(self, path: Path) -> None:
        """Take over the state of one."""
        load_checkpoint(path, self.sharded.model, self.optimizer)

    def step(self, step: int, asked: Callable[[], bool]) -> tuple[float, float, bool]:
        """Take a step."""
        settings, device = self.settings, self.device
        rank, world_size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(int(np.random.SeedSequence((settings.seed, step, rank)).generate_state(1)[0]))
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)

        samples = settings.rank_batch_size(world_size)
        batch = text_batch(settings.seed, step, rank, world_size, samples, settings.definition.config.context)
        tokens, targets = (torch.from_numpy(part).long().to(device) for part in (batch.tokens, batch.targets))
        num_microbatches = settings.num_microbatches(world_size)
        total = torch.zeros((), dtype=torch.float64, device=device)
        parts = zip(tokens.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True)
        for i, (inputs, expected) in enumerate(parts):
            with self.sharded.microbatch(last=i == num_microbatches - 1):
                logits = self.sharded.model(inputs).to(getattr(torch, settings.stored_dtype))
                loss = functional.cross_entropy(logits.flatten(0, 1), expected.flatten()) / num_microbatches
                loss.backward()
            total += loss.detach()
        norm = self.sharded.clip_grad_norm(settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

        facts = torch.stack([total / world_size, torch.full_like(total, float(asked()))])
        dist.all_reduce(facts)
        return float(facts[0]), float(norm), bool(facts[1])


def _device(wanted: str) -> torch.device:
    """This rank's device.

    Raises:
        UsageError: fewer GPUs than ranks on this machine.
    """
    ranks, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and gpus < ranks):
        return torch.device("cpu")
    if gpus < ranks:
        raise UsageError(f"--device cuda: {ranks} ranks on this machine need as many GPUs, and it has {gpus}")
    # Bit for bit on GPUs too: some operations add up in an order of their own otherwise.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def run(settings: TrainSettings) -> bool:
    """`train` in a process that torchrun started; see there."""
    if "RANK" not in os.environ:
        raise UsageError(
            "start it by torchrun: torchrun --standalone --nproc-per-node 2 -m experiments.train_torch ..."
        )
    device = _device(settings.device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        return train(settings, device)
    finally:
        dist.destroy_process_group()


@app.command()
def main(
    output: Annotated[Path, typer.Option(help="Folder of checkpoints and metrics, which all ranks see.")],
    model: Annotated[str, typer.Option(help="gpt or gpt-tiny.")] = DEFAULTS.model,
    api: Annotated[str, typer.Option(help="fsdp1 or fsdp2.")] = DEFAULTS.api,
    layout: Annotated[
        str | None, typer.Option(help="fsdp2: per_param, flat or ragged. Default: the interface's")
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="full_shard, shard_grad_op, no_shard, hybrid_shard or hybrid_shard_zero2.")
    ] = DEFAULTS.strategy,
    shard: Annotated[
        int | None, typer.Option(help="Hybrid: ranks that hold one copy of the model. Default: those of a machine")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps of the whole run.")] = DEFAULTS.steps,
    batch_size: Annotated[int, typer.Option(help="Samples of a step, on all ranks together.")] = DEFAULTS.batch_size,
    micro_batch_size: Annotated[
        int | None, typer.Option(help="Samples of a rank in one forward; fewer than its part accumulate. Default: all")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="The highest, of AdamW.")] = DEFAULTS.learning_rate,
    warmup_steps: Annotated[int, typer.Option(help="Steps in which it rises.")] = DEFAULTS.warmup_steps,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.")] = DEFAULTS.weight_decay,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = DEFAULTS.clip,
    precision: Annotated[
        str, typer.Option(help="float32, float64, or bfloat16 to compute in over stored float32.")
    ] = DEFAULTS.precision,
    dropout: Annotated[float, typer.Option(help="Behind each MLP.")] = DEFAULTS.dropout,
    seed: Annotated[int, typer.Option(help="Where values, batches and dropout come from.")] = DEFAULTS.seed,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = DEFAULTS.checkpoint_every,
    async_save: Annotated[
        bool, typer.Option("--async-save", help="Continue training while a checkpoint is written.")
    ] = DEFAULTS.async_save,
    keep: Annotated[int, typer.Option(help="How many of the newest checkpoints stay.")] = DEFAULTS.keep,
    resume: Annotated[str, typer.Option(help="auto, none, or the folder of a checkpoint.")] = DEFAULTS.resume,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: GPUs if there are enough.")] = DEFAULTS.device,
) -> None:
    """Train a GPT on text, sharded; started again, go on from the newest whole checkpoint.

    Exit status: 0 trained or stopped, and saved; 1 not saved at the end; 2 wrong use, or no checkpoint that can be used.
    """
    given = dict(locals())
    try:
        saved = run(TrainSettings(**given))
    except (UsageError, CheckpointError) as error:  # which all ranks have alike
        if os.environ.get("RANK", "0") == "0":
            print(f"train_torch: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    raise typer.Exit(not saved)


if __name__ == "__main__":
    app()

"""Trains torchtitan's llama3 debug model, with its own trainer and its own parallelize function, on random tokens.

torchrun --nproc-per-node 2 train.py [--fsdp crossframe] [--steps 4] [--tp 2] [--microbatches 2] [--mistake]
"""

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", choices=["torch", "crossframe"], default="torch")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--microbatches", type=int, default=1)
parser.add_argument("--by-rank", action="store_true", help="A rank has the same samples in any number of microbatches.")
parser.add_argument("--same-start", action="store_true", help="Draw whole parameters: on a CPU, DTensor draws shards.")
parser.add_argument(
    "--mistake", action="store_true", help="Divide gradients by the ranks, although the loss is divided by all tokens."
)
options = parser.parse_args()

if options.fsdp == "crossframe":
    import torch_backend

    torch_backend.replace_torch_fsdp()

# torchtitan takes "cuda" where there is no accelerator, and asks the device's module for what torch.cpu lacks.
torch._utils._get_available_device_type = lambda: "cpu"
torch.cpu.get_device_name = lambda device=None: "CPU"
torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=1 << 34)
torch.cpu.memory_stats = lambda device=None: {}
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda device=None: None

from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.models.llama3.parallelize import parallelize_llama  # noqa: E402

dist_utils.set_pg_timeouts = lambda *args, **kwargs: None  # gloo has no barrier of devices
SAMPLES, SEQUENCE = 8, 64


class RandomTokens(BaseDataLoader):
    """The same tokens for every number of ranks: sample i of step s is drawn from (s, i)."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocabulary: int = 2048

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.config, self.size, self.rank, self.local = config, dp_world_size, dp_rank, local_batch_size
        self.at = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            rows = [self._sample(self._first() + i) for i in range(self.local)]
            tokens = torch.stack(rows)
            self.at += 1
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def _first(self) -> int:
        """The number of the first sample of a microbatch."""
        if not options.by_rank:
            return (self.at * self.size + self.rank) * self.local
        step, microbatch = divmod(self.at, options.microbatches)
        return ((step * self.size + self.rank) * options.microbatches + microbatch) * self.local

    def _sample(self, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randint(self.config.vocabulary, (SEQUENCE + 1,), generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class NoTokenizer(BaseTokenizer):
    """Tokens come from the data loader."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


def parallelize(model: torch.nn.Module, **how: Any) -> torch.nn.Module:
    """torchtitan's own, with sums that gloo has: a divide factor is else part of the reduction."""
    model = parallelize_llama(model, **how)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            if options.mistake:
                module.set_gradient_divide_factor(2.0)
    return model


@torch.no_grad()
def start(model: torch.nn.Module) -> None:
    """Initial values that do not depend on the sharding."""
    generator = torch.Generator().manual_seed(0)
    for param in model.parameters():
        drawn = 0.02 * torch.randn(param.shape, generator=generator) + (param.ndim == 1)
        if isinstance(param, DTensor):
            drawn = distribute_tensor(drawn, param.device_mesh, param.placements)
        param.copy_(drawn)


def main() -> None:
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    for layer in config.model_spec.model.layers:  # flex attention needs an accelerator
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.model_spec.parallelize_fn = parallelize
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    config.dataloader = RandomTokens.Config()
    config.tokenizer = NoTokenizer.Config()
    config.dump_folder = mkdtemp()
    config.training.steps = options.steps
    config.training.seq_len = SEQUENCE
    data_ranks = int(os.environ["WORLD_SIZE"]) // options.tp
    config.training.global_batch_size = SAMPLES
    config.training.local_batch_size = SAMPLES // options.microbatches // data_ranks
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.parallelism.tensor_parallel_degree = options.tp
    config.validator.enable = False
    config.checkpoint.enable = False
    config.debug.seed = 0
    config.debug.deterministic = True
    trainer = config.build()
    if options.same_start:
        start(trainer.model_parts[0])
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

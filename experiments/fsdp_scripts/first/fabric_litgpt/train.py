"""Pretraining of a small litgpt model by Lightning Fabric with its FSDP strategy."""

import argparse
import json
import os

import lightning as L
import torch
from lightning.fabric.strategies import FSDPStrategy
from litgpt import GPT, Config
from litgpt.model import Block
from litgpt.utils import chunked_cross_entropy
from safetensors.torch import save_file
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.utils.data import DataLoader, TensorDataset

CONFIGS = {
    "neox": {"n_query_groups": 4, "mlp_class_name": "GptNeoxMLP", "norm_class_name": "LayerNorm"},
    "llama": {
        "n_query_groups": 2, "mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm",
        "parallel_residual": False, "bias": False, "rotary_percentage": 1.0, "intermediate_size": 128,
    },
}  # fmt: skip


class CPUFSDPStrategy(FSDPStrategy):
    """Fabric refuses the exact class FSDPStrategy without a GPU, and hands FSDP no CPU device."""

    def setup_module(self, module):
        module = FSDP(
            module,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=torch.device("cpu"),
            **self._fsdp_kwargs,
        )
        # The wrapped module needs no policy any more. What is left to do is the activation checkpointing.
        self._fsdp_kwargs.pop("auto_wrap_policy", None)
        return super().setup_module(module)


def text(n, seed):
    """Repeated words over a small alphabet."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 96, (n, 5), generator=generator)
    return TensorDataset(words.repeat(1, 5)[:, :21])


@torch.no_grad()
def validate(fabric, model, loader):
    model.eval()
    losses = torch.stack([chunked_cross_entropy(model(x[:, :-1]), x[:, 1:]) for (x,) in loader])
    model.train()
    return fabric.all_reduce(losses.float().mean(), reduce_op="mean").item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--config", choices=CONFIGS, default="neox")
    p.add_argument("--sharding", default="FULL_SHARD")
    p.add_argument("--precision", default="32-true")
    p.add_argument("--reduce32", action="store_true")
    p.add_argument("--empty-init", action="store_true")
    p.add_argument("--checkpointing", action="store_true")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--lm-head-chunks", type=int, default=0)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    mixed = MixedPrecision(torch.bfloat16, torch.float32, torch.float32, cast_forward_inputs=False)
    strategy = CPUFSDPStrategy(
        auto_wrap_policy={Block},
        activation_checkpointing_policy={Block} if args.checkpointing else None,
        sharding_strategy=args.sharding,
        mixed_precision=mixed if args.reduce32 else None,
        state_dict_type="sharded",
        limit_all_gathers=True,
        process_group_backend="gloo",
    )
    fabric = L.Fabric(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, precision=args.precision
    )
    fabric.launch()
    fabric.seed_everything(33, verbose=False)

    config = Config(
        block_size=32, n_layer=3, n_embd=64, n_head=4, padded_vocab_size=96, vocab_size=96, **CONFIGS[args.config]
    )
    with fabric.init_module(empty_init=args.empty_init):
        model = GPT(config)
    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    optimizer = fabric.setup_optimizers(optimizer)
    train = DataLoader(text(192, 1), batch_size=4, shuffle=True)
    valid = DataLoader(text(16, 2), batch_size=4)
    train, valid = fabric.setup_dataloaders(train, valid)

    state = {"model": model, "optimizer": optimizer, "iteration": 0, "step": 0, "config": config.n_layer}
    if args.load:
        fabric.load(f"{args.load}/checkpoint", state)
    figures = {"loss": [], "grad_norm": [], "lr": [], "valid": [], "resumed_at": [state["iteration"], state["step"]]}
    batches = iter(train)
    for _ in range(state["iteration"]):
        next(batches)
    running = 0.0
    while state["step"] < args.steps:
        lr = 4e-3 * min(1.0, (state["step"] + 1) / 3)
        for group in optimizer.param_groups:
            group["lr"] = lr
        state["iteration"] += 1
        accumulating = state["iteration"] % args.accumulate != 0
        (x,) = next(batches)
        with fabric.no_backward_sync(model, enabled=accumulating):
            logits = model(x[:, :-1], lm_head_chunk_size=args.lm_head_chunks)
            target = x[:, 1:]
            loss = chunked_cross_entropy(logits, target, chunk_size=0 if args.lm_head_chunks == 0 else 40)
            fabric.backward(loss / args.accumulate)
        running += fabric.all_reduce(loss.detach().float(), reduce_op="mean").item() / args.accumulate
        if accumulating:
            continue
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        figures["loss"].append(running)
        figures["grad_norm"].append(norm.item())
        figures["lr"].append(lr)
        running = 0.0
        if state["step"] % 3 == 0:
            figures["valid"].append(validate(fabric, model, valid))
    if args.save:
        fabric.save(f"{args.out}/checkpoint", state)

    sharded = model._forward_module
    figures["dtypes"] = sorted({str(q.dtype) for q in sharded.parameters()})
    figures["local_numel"] = [q.numel() for q in sharded.parameters()]
    full_optim = FSDP.full_optim_state_dict(sharded, optimizer.optimizer, rank0_only=True)
    with FSDP.summon_full_params(sharded, rank0_only=True, writeback=False):
        weights = {k: v.detach().clone() for k, v in model.state_dict().items()} if fabric.is_global_zero else {}
    if fabric.is_global_zero:
        os.makedirs(args.out, exist_ok=True)
        save_file(weights, f"{args.out}/params.safetensors")
        flat = {f"{k}/{name}": v.clone() for name, s in full_optim["state"].items() for k, v in s.items()}
        save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    fabric.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

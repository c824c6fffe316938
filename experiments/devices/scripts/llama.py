"""Trains a Llama of transformers from random weights, on the device and with the kernels and dtypes that are asked for."""

import argparse
import contextlib

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 512, 128
KERNELS = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32", help="of weights")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    parser.add_argument("--attention", default="math", choices=["eager", *KERNELS])
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--optimizer", default="foreach", choices=["for-loop", "foreach", "fused"])
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--fully-shard", action="store_true")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    return parser.parse_args()


def draw(rng, table, batch_size):
    """Texts of a Markov chain, one token longer than the model's input."""
    tokens = np.empty((batch_size, LENGTH + 1), np.int64)
    tokens[:, 0] = rng.integers(VOCABULARY, size=batch_size)
    for i in range(LENGTH):
        tokens[:, i + 1] = table[tokens[:, i], rng.integers(table.shape[1], size=batch_size)]
    return torch.from_numpy(tokens)


def build(args):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        attention_dropout=0.0,
        use_cache=False,
        attn_implementation="eager" if args.attention == "eager" else "sdpa",
    )
    model = LlamaForCausalLM(config).to(args.device, getattr(torch, args.dtype))
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if args.compile:
        model.compile()
    if args.fully_shard:
        from torch_backend import fully_shard

        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def optimizer_of(model, args):
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    how = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), **how[args.optimizer])
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def kernel_of(attention):
    return sdpa_kernel(KERNELS[attention]) if attention in KERNELS else contextlib.nullcontext()


def main():
    args = parse()
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    model = build(args)
    optimizer, scheduler = optimizer_of(model, args)
    rng = np.random.default_rng(1)
    table = rng.integers(VOCABULARY, size=(VOCABULARY, 4))
    dtypes = torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.autocast)
    for step in range(args.steps):
        tokens = draw(rng, table, args.batch_size).to(args.device)
        total = 0.0
        for part in tokens.chunk(args.microbatches):
            inputs, targets = part[:, :-1], part[:, 1:]
            with kernel_of(args.attention), dtypes:
                logits = model(input_ids=inputs).logits
                loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            (loss / args.microbatches).backward()
            total += loss.item() / args.microbatches
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {total:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small causal language model with an own loop around accelerate's FSDP2 plugin."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    ParallelismConfig,
    set_seed,
)
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    get_linear_schedule_with_warmup,
)

VOCAB, SEQ = 384, 40


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--model", choices=["llama", "gpt2"], default="llama")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--precision", choices=["no", "bf16", "bf16-fp32-reduce"], default="no")
    p.add_argument("--no-reshard", action="store_true")
    p.add_argument("--offload", action="store_true")
    p.add_argument("--ac", action="store_true")
    p.add_argument("--efficient-loading", action="store_true", help="only rank 0 holds the initial weights")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--sync-each-batch", action="store_true")
    p.add_argument("--clip", type=float, default=None)
    p.add_argument("--hybrid", action="store_true")
    p.add_argument("--state-dict", choices=["SHARDED_STATE_DICT", "FULL_STATE_DICT"], default="SHARDED_STATE_DICT")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    return p.parse_args()


def build(kind):
    if kind == "gpt2":  # tied embeddings, no dropout so that runs can be compared
        config = GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=64, n_layer=3, n_head=4)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        return GPT2LMHeadModel(config), "GPT2Block"
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=144,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config), "LlamaDecoderLayer"


def dataset(seed, count):
    rng = torch.Generator().manual_seed(seed)
    start = torch.randint(0, VOCAB, (count, 1), generator=rng)
    stride = torch.randint(1, 5, (count, 1), generator=rng)
    return TensorDataset((start + stride * torch.arange(SEQ)) % VOCAB)


def main():
    args = parse()
    # accelerate shards only for accelerators: say that this group of CPU processes is such a group.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    set_seed(11)
    model, block = build(args.model)
    policy = None
    if args.precision == "bf16-fp32-reduce":
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=not args.no_reshard,
        mixed_precision_policy=policy,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block],
        cpu_offload=CPUOffloadPolicy(pin_memory=False) if args.offload else None,
        activation_checkpointing=args.ac,
        cpu_ram_efficient_loading=args.efficient_loading,
        state_dict_type=args.state_dict,
    )
    parallel = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2) if args.hybrid else None
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if args.precision == "bf16" else "no",
        fsdp_plugin=plugin,
        parallelism_config=parallel,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=args.accumulate, sync_each_batch=args.sync_each_batch
        ),
    )

    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    schedule = get_linear_schedule_with_warmup(optimizer, 2 * accelerator.num_processes, 12 * accelerator.num_processes)
    train = DataLoader(dataset(1, 8 * 4 * 12), batch_size=4, shuffle=True)
    valid = DataLoader(dataset(2, 24), batch_size=4)
    model, optimizer, train, valid, schedule = accelerator.prepare(model, optimizer, train, valid, schedule)

    local = {n: list(p.to_local().shape) for n, p in model.named_parameters()}
    start = 0
    if args.load:
        accelerator.load_state(str(args.load / "checkpoint"))
        start = json.loads((args.load / "figures.json").read_text())["steps"]

    def evaluate():
        model.eval()
        found = []
        with torch.no_grad():
            for (ids,) in valid:
                found.append(accelerator.gather_for_metrics(model(input_ids=ids, labels=ids).loss.float().reshape(1)))
        model.train()
        return torch.cat(found).mean().item()

    figures = {"losses": [], "grad_norms": [], "learning_rates": [], "eval_losses": [evaluate()], "local": local}
    step = start
    batches = accelerator.skip_first_batches(train, start * args.accumulate) if start else train
    model.train()
    micro = []
    for (ids,) in batches:
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            micro.append(accelerator.reduce(loss.detach().float(), reduction="mean").item())
            accelerator.backward(loss)
            if accelerator.sync_gradients and args.clip is not None:
                norm = accelerator.clip_grad_norm_(model.parameters(), args.clip)
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                figures["grad_norms"].append(norm.item())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            figures["losses"].append(sum(micro) / len(micro))
            figures["learning_rates"].append(schedule.get_last_lr()[0])
            micro = []
        if step == args.steps:
            break
    figures["eval_losses"].append(evaluate())
    figures["steps"] = step
    figures["units"] = [n for n, m in accelerator.unwrap_model(model).named_modules() if isinstance(m, FSDPModule)]

    if args.save:
        accelerator.save_state(str(args.out / "checkpoint"))
    state = accelerator.get_state_dict(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    optim = get_optimizer_state_dict(model, optimizer.optimizer, options=options)
    if accelerator.is_main_process:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({k: v.clone().contiguous() for k, v in state.items()}, args.out / "params.safetensors")
        flat = {f"{s}/{n}": t.contiguous() for n, d in optim["state"].items() for s, t in d.items()}
        save_file(flat, args.out / "optimizer.safetensors")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()

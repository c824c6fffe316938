"""Causal language model training by the HuggingFace Trainer with FSDP version 1."""

import argparse
import json
import os

import torch
import torch.distributed as dist
from accelerate.state import DistributedType, PartialState
from accelerate.utils import set_seed
from safetensors.torch import save_file
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


def allow_cpu_sharding():
    """Accelerate makes an FSDP state of accelerator groups only. Give the CPU group of gloo the same right."""
    state = PartialState()
    if state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU
        state.device = torch.device("cpu")


class Sums(Dataset):
    """Rows that count on from a start by a stride."""

    def __init__(self, n, seed):
        generator = torch.Generator().manual_seed(seed)
        start = torch.randint(0, 40, (n, 1), generator=generator)
        stride = torch.randint(1, 5, (n, 1), generator=generator)
        self.rows = (start + stride * torch.arange(16)) % 128

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {"input_ids": self.rows[i], "labels": self.rows[i], "attention_mask": torch.ones(16, dtype=torch.long)}


class Units(TrainerCallback):
    """Looks at the sharded model once training begins."""

    def __init__(self):
        self.found = {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.found["units"] = [name for name, m in model.named_modules() if isinstance(m, FSDP)]
        self.found["local_numel"] = sum(p.numel() for p in model.parameters())
        self.found["dtypes"] = sorted({str(p.dtype) for p in model.parameters()})


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--sharding", default="full_shard")
    p.add_argument("--wrap", choices=["layer", "size", "none"], default="layer")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--flat-params", action="store_true")
    p.add_argument("--checkpointing", choices=["fsdp", "trainer"])
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--forward-prefetch", action="store_true")
    p.add_argument("--backward-prefetch", default="backward_pre")
    p.add_argument("--tied", action="store_true")
    p.add_argument("--optim", default="adamw_torch")
    p.add_argument("--save-steps", type=int)
    p.add_argument("--load")
    args = p.parse_args()

    set_seed(21)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=args.tied, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)

    wrap = {
        "layer": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        "size": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 8000},
        "none": {"auto_wrap_policy": "NO_WRAP"},
    }
    training = TrainingArguments(
        output_dir=f"{args.out}/checkpoint",
        max_steps=args.steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=3e-3,
        weight_decay=0.1,
        warmup_steps=2,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr": 1e-4},
        max_grad_norm=0.8,
        optim=args.optim,
        bf16=args.bf16,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps" if args.save_steps else "no",
        save_steps=args.save_steps or 500,
        gradient_checkpointing=args.checkpointing == "trainer",
        fsdp=True,
        fsdp_config={
            "version": 1,
            "reshard_after_forward": args.sharding,
            "state_dict_type": "SHARDED_STATE_DICT",
            "use_orig_params": not args.flat_params,
            "forward_prefetch": args.forward_prefetch,
            "backward_prefetch": args.backward_prefetch,
            "activation_checkpointing": args.checkpointing == "fsdp",
            "limit_all_gathers": True,
            # Every rank builds the same model from the seed. The broadcast in Accelerate wants a GPU.
            "sync_module_states": False,
            **wrap[args.wrap],
        },
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=21,
    )
    allow_cpu_sharding()
    units = Units()
    trainer = Trainer(model, training, train_dataset=Sums(96, 1), eval_dataset=Sums(16, 2), callbacks=[units])
    checkpoint = None
    if args.load:
        folder = f"{args.load}/checkpoint"
        checkpoint = f"{folder}/{max(os.listdir(folder))}"
    result = trainer.train(resume_from_checkpoint=checkpoint)

    keep = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
    log = [{k: float(v) for k, v in line.items() if k in keep} for line in trainer.state.log_history]
    figures = {"log": log, "train_loss": result.training_loss, "eval": trainer.evaluate()["eval_loss"], **units.found}
    sharded = trainer.model_wrapped
    with FSDP.state_dict_type(sharded, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        weights = sharded.state_dict()
        optim = FSDP.optim_state_dict(sharded, trainer.optimizer.optimizer)
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        save_file({k: v.clone() for k, v in weights.items()}, f"{args.out}/params.safetensors")
        flat = {f"{k}/{name}": v.clone() for name, s in optim["state"].items() for k, v in s.items()}
        save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

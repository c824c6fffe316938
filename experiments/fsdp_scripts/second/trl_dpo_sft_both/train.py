"""TRL's SFTTrainer, DPOTrainer and RewardTrainer on a small Llama, sharded by either version of FSDP."""

import argparse
import json
import os

import datasets
import torch
import torch.distributed as dist
from accelerate.state import DistributedType, PartialState
from accelerate.utils import set_seed
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

# Nothing is cached on disk. So the rows need no hash, which takes pickling them.
datasets.arrow_dataset.generate_fingerprint = lambda dataset: f"rows{len(dataset)}"
datasets.disable_caching()

COLOURS = ["red", "green", "blue", "black", "white", "grey"]
THINGS = ["house", "tree", "car", "river", "stone", "bird", "boat", "lamp"]


def tokenizer():
    words = ["<pad>", "<s>", "</s>", "the", "is", "not", "and", "what", "colour", "has", "?", "."] + COLOURS + THINGS
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def rows(task, n, seed):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i, j, k in torch.randint(0, 1000, (n, 3), generator=generator).tolist():
        thing, right = THINGS[i % 8], COLOURS[(i % 8) % 6]
        wrong = COLOURS[((i % 8) + 1 + j % 5) % 6]
        prompt = f"what colour has the {thing} ?"
        good, bad = f" the {thing} is {right} .", f" the {thing} is {wrong} and not {right} ."
        if k % 2:
            good += f" the {thing} is not {wrong} ."
        if task == "sft":
            found.append({"prompt": prompt, "completion": good})
        elif task == "dpo":
            found.append({"prompt": prompt, "chosen": good, "rejected": bad})
        else:
            found.append({"chosen": prompt + good, "rejected": prompt + bad})
    return Dataset.from_list(found)


def fsdp_config(args):
    config = {
        "version": args.fsdp,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "state_dict_type": "SHARDED_STATE_DICT" if args.sharded else "FULL_STATE_DICT",
        "activation_checkpointing": args.checkpointing,
        "cpu_ram_efficient_loading": False,
    }
    if args.fsdp == 1:
        config["reshard_after_forward"] = "SHARD_GRAD_OP" if args.keep else "FULL_SHARD"
        config.update(use_orig_params=not args.flat, backward_prefetch="BACKWARD_PRE", sync_module_states=False)
        config.update(forward_prefetch=args.keep, limit_all_gathers=True)
    else:
        config["reshard_after_forward"] = not args.keep
    return config


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--task", choices=["sft", "dpo", "reward"], default="dpo")
    p.add_argument("--fsdp", type=int, choices=[1, 2], default=1)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--keep", action="store_true", help="keep the weights gathered after the forward")
    p.add_argument("--flat", action="store_true")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--checkpointing", action="store_true")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--loss", default="sigmoid", help="the loss of DPO")
    p.add_argument("--packing", action="store_true")
    p.add_argument("--sharded", action="store_true")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    set_seed(11)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=144, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, num_labels=1,
    )  # fmt: skip
    settings = dict(
        output_dir=f"{args.out}/checkpoint", max_steps=args.steps, per_device_train_batch_size=4,
        per_device_eval_batch_size=4, gradient_accumulation_steps=args.accumulate, learning_rate=4e-3,
        lr_scheduler_type="linear", warmup_steps=1, max_grad_norm=1.0, bf16=args.bf16, logging_steps=1,
        eval_strategy="steps", eval_steps=3, save_strategy="steps" if args.save else "no", save_steps=args.steps,
        fsdp=True, fsdp_config=fsdp_config(args), gradient_checkpointing=False, use_cpu=True, report_to=[],
        disable_tqdm=True, dataloader_pin_memory=False, seed=11, max_length=40,
    )  # fmt: skip
    make = {"sft": SFTConfig, "dpo": DPOConfig, "reward": RewardConfig}[args.task]
    if args.task == "dpo":
        settings.update(beta=0.2, loss_type=args.loss)
    elif args.task == "sft":
        settings.update(packing=args.packing, completion_only_loss=not args.packing)
    settings = make(**settings)
    # Accelerate shards over accelerators only. Give the CPU group of gloo the same right.
    state = PartialState()
    assert state.distributed_type == DistributedType.MULTI_CPU
    state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")

    model = (LlamaForSequenceClassification if args.task == "reward" else LlamaForCausalLM)(config)
    data = {"train_dataset": rows(args.task, 96, 1), "eval_dataset": rows(args.task, 16, 2)}
    if args.task == "dpo":
        reference = LlamaForCausalLM(config)
        reference.load_state_dict(model.state_dict())
        trainer = DPOTrainer(model, reference, settings, processing_class=words, **data)
    else:
        trainer = {"sft": SFTTrainer, "reward": RewardTrainer}[args.task](
            model, args=settings, processing_class=words, **data
        )
    last = None
    if args.load:
        folder = f"{args.load}/checkpoint"
        last = f"{folder}/{max(os.listdir(folder))}"
    trainer.train(resume_from_checkpoint=last)

    timing = ("runtime", "per_second", "total_flos", "total_flops")
    log = [
        {k: v for k, v in line.items() if isinstance(v, (int, float)) and not any(t in k for t in timing)}
        for line in trainer.state.log_history
    ]
    sharded = trainer.model_wrapped
    if args.fsdp == 1:
        units = [n for n, m in sharded.named_modules() if isinstance(m, FullyShardedDataParallel)]
    else:
        units = [n for n, m in sharded.named_modules() if isinstance(m, FSDPModule)]
    figures = {"log": log, "units": units, "dtypes": sorted({str(q.dtype) for q in sharded.parameters()})}
    figures["local"] = sum(q.numel() for q in sharded.parameters())
    if args.task == "dpo":
        figures["reference"] = type(trainer.ref_model).__name__
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(sharded, options=options)
    optim = get_optimizer_state_dict(sharded, trainer.optimizer.optimizer, options=options)
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

"""transformers' Trainer with FSDP2: full fine-tuning of a small Qwen3 or peft's LoRA on a frozen base."""

import argparse
import json
from pathlib import Path

import torch
from accelerate.utils import DistributedType
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

VOCAB, SEQ = 320, 36


class Sequences(Dataset):
    """Arithmetic sequences of random length, padded, with the prompt masked out of the loss."""

    def __init__(self, seed, count):
        rng = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(1, 9, (3,), generator=rng).tolist() for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        start, hop, cut = self.rows[index]
        length = SEQ - cut
        ids = [(start * 30 + hop * i) % (VOCAB - 2) + 2 for i in range(length)]
        pad = [0] * cut
        return {
            "input_ids": torch.tensor(ids + pad),
            "attention_mask": torch.tensor([1] * length + pad),
            "labels": torch.tensor([-100, -100] + ids[2:] + [-100] * cut),
        }


class Record(TrainerCallback):
    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        keep = {k: v for k, v in logs.items() if k in ("loss", "grad_norm", "learning_rate", "eval_loss")}
        if keep:
            self.rows.append({"step": state.global_step, **keep})


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--lora", action="store_true")
    p.add_argument("--train-embeddings", action="store_true", help="with LoRA: also train the embedding and the head")
    p.add_argument("--tied", action="store_true")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--half-weights", action="store_true", help="hold the frozen base in bfloat16")
    p.add_argument("--ac", action="store_true")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--no-reshard", action="store_true")
    p.add_argument("--efficient-loading", action="store_true")
    p.add_argument("--sharded", action="store_true", help="checkpoints of shards in place of full ones")
    p.add_argument("--optim", default="adamw_torch")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()

    set_seed(23)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=args.tied,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    if args.half_weights:
        model = model.to(torch.bfloat16)
    if args.lora:
        lora = LoraConfig(
            r=4,
            lora_alpha=16,
            lora_dropout=0.0,
            target_modules=["q_proj", "v_proj", "down_proj"],
            modules_to_save=["embed_tokens", "lm_head"] if args.train_embeddings else None,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora)
        # B starts at zero; give it some values so that A has gradients from the first step.
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.02)

    settings = TrainingArguments(
        output_dir=str(args.out / "checkpoint"),
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=args.accumulate,
        learning_rate=5e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        max_grad_norm=1.0,
        bf16=args.bf16,
        optim=args.optim,
        logging_steps=1,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps" if args.save else "no",
        save_steps=args.steps,
        report_to=[],
        disable_tqdm=True,
        seed=23,
        fsdp=True,
        fsdp_config={
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"],
            "reshard_after_forward": not args.no_reshard,
            "activation_checkpointing": args.ac,
            "cpu_ram_efficient_loading": args.efficient_loading,
            "state_dict_type": "SHARDED_STATE_DICT" if args.sharded else "FULL_STATE_DICT",
        },
    )
    # accelerate shards only for accelerators: say that this group of CPU processes is such a group.
    assert settings.device.type == "cpu"
    settings.distributed_state.distributed_type = DistributedType.MULTI_GPU

    record = Record()
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=Sequences(1, 400),
        eval_dataset=Sequences(2, 24),
        callbacks=[record],
    )
    last = args.load / "checkpoint" / "checkpoint-3" if args.load else None
    trainer.train(resume_from_checkpoint=str(last) if last else None)

    figures = {
        "losses": [row["loss"] for row in record.rows if "loss" in row],
        "log": record.rows,
        "trainable": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "units": [n for n, m in trainer.model.named_modules() if isinstance(m, FSDPModule)],
    }
    prompt = torch.tensor([[32, 35, 38, 41], [62, 67, 72, 77]])
    trainer.model.eval()
    with torch.no_grad():
        tokens = trainer.model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)
    figures["generated"] = tokens.tolist()
    state = trainer.accelerator.get_state_dict(trainer.model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    optimizer = trainer.optimizer.optimizer
    moments = get_optimizer_state_dict(trainer.model, optimizer, options=options).get("state", {})
    if trainer.is_world_process_zero():
        assert not any(isinstance(v, DTensor) for v in state.values())
        args.out.mkdir(parents=True, exist_ok=True)
        if args.lora:
            figures["adapter"] = sorted(get_peft_model_state_dict(trainer.model, state_dict=state))
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({n: v.clone().contiguous() for n, v in state.items()}, args.out / "params.safetensors")
        flat = {f"{s}/{n}": t for n, d in moments.items() for s, t in d.items() if isinstance(t, torch.Tensor)}
        save_file({n: t.contiguous() for n, t in flat.items()}, args.out / "optimizer.safetensors")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()

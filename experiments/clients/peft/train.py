"""Fine-tunes a tiny Llama by LoRA of peft, with the Trainer of transformers.

torchrun --nproc-per-node 2 train.py [--batch 4] [--accumulate 2] [--checkpointing] [--mistake]
"""

import argparse
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8, help="Samples of a rank and microbatch.")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--checkpointing", action="store_true", help="Compute activations again in backward.")
parser.add_argument("--mistake", action="store_true", help="Leave use_rslora on: scale by alpha / sqrt(r).")
args = parser.parse_args()

VOCABULARY, LENGTH = 96, 12


class Texts(Dataset):
    """Random tokens; the labels of a prompt of four tokens are masked."""

    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (size, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        labels = tokens.clone()
        labels[:4] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def base_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    torch.manual_seed(0)
    lora = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "down_proj"],
        use_rslora=args.mistake,
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(base_model(), lora)
    model.print_trainable_parameters()
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulate,
        gradient_checkpointing=args.checkpointing,
        learning_rate=1e-2,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    Trainer(model, arguments, train_dataset=Texts(64)).train()
    merged = model.merge_and_unload()
    with torch.no_grad():
        text = Texts(64)[0]["input_ids"][None]
        print(f"loss of the first text {merged(input_ids=text, labels=text).loss.item():.4f}")


if __name__ == "__main__":
    main()

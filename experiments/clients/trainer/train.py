"""Trains a tiny Llama with transformers' Trainer and FSDP, on random tokens of uneven length.

torchrun --nproc-per-node 2 train.py [--fsdp crossframe] [--version 1] [--batch 2] [--accumulate 2] [--mistake]
"""

import argparse
import tempfile

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", choices=["torch", "crossframe", "none"], default="torch")
parser.add_argument("--version", type=int, choices=[1, 2], default=2, help="accelerate's fsdp_version")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--batch", type=int, default=4, help="Samples of a rank and microbatch.")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--checkpointing", action="store_true", help="Recompute activations in backward.")
parser.add_argument("--mistake", action="store_true", help="Divide the loss of a rank by its own number of tokens.")
options = parser.parse_args()

if options.fsdp == "crossframe":
    import torch_backend

    torch_backend.replace_torch_fsdp()

from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments  # noqa: E402

VOCABULARY, LENGTH = 128, 24


class RandomTexts(torch.utils.data.Dataset):
    """Texts of 8 to 24 tokens, padded to 24."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(1, VOCABULARY, (LENGTH,), generator=generator)
        length = int(torch.randint(8, LENGTH + 1, (), generator=generator))
        mask = (torch.arange(LENGTH) < length).long()
        return {"input_ids": tokens * mask, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
    )
    config = {"version": options.version, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    if options.version == 1:
        config["sync_module_states"] = False  # where accelerate asks for an accelerator
    if options.checkpointing:
        config["activation_checkpointing"] = True
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        fsdp=options.fsdp != "none",
        fsdp_config=config if options.fsdp != "none" else None,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulate,
        average_tokens_across_devices=not options.mistake,
        learning_rate=3e-3,
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=1.0,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    if options.fsdp != "none":  # accelerate shards on accelerators alone
        PartialState(cpu=True)
        PartialState._shared_state["device"] = torch.device("cpu")  # FSDP1 tells it from cpu:0
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = Trainer(model, arguments, train_dataset=RandomTexts())
    trainer.train()


if __name__ == "__main__":
    main()

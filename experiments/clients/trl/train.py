"""Fine-tunes a tiny Qwen2 on prompts and completions with TRL's SFTTrainer, or on preferences with its DPOTrainer.

torchrun --nproc-per-node 2 train.py [--fsdp crossframe] [--task dpo] [--batch 2] [--accumulate 2] [--mistake]
"""

import argparse
import random
import tempfile

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", choices=["torch", "crossframe"], default="torch")
parser.add_argument("--task", choices=["sft", "dpo"], default="sft")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--batch", type=int, default=2, help="Samples of a rank and microbatch.")
parser.add_argument("--accumulate", type=int, default=2)
parser.add_argument(
    "--mistake", action="store_true", help="Average the means of microbatches, which have unequal numbers of tokens."
)
options = parser.parse_args()

if options.fsdp == "crossframe":
    import torch_backend

    torch_backend.replace_torch_fsdp()

from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM  # noqa: E402
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

WORDS = 100


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS))]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def texts(*columns: str) -> Dataset:
    """Random words, 3 to 12 in each column."""
    draw = random.Random(0)

    def text() -> str:
        return " " + " ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(3, 12)))

    return Dataset.from_dict({column: [text() for _ in range(64)] for column in columns})


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=WORDS + 4,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def main() -> None:
    common = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
        "max_steps": options.steps,
        "per_device_train_batch_size": options.batch,
        "gradient_accumulation_steps": options.accumulate,
        "gradient_checkpointing": False,
        "learning_rate": 3e-3,
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": [],
    }
    PartialState(cpu=True)  # accelerate shards on accelerators alone
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    if options.task == "sft":
        data = texts("prompt", "completion")
        trainer = SFTTrainer(model(), SFTConfig(**common), train_dataset=data, processing_class=tokenizer())
    else:
        data = texts("prompt", "chosen", "rejected")
        trainer = DPOTrainer(
            model(), model(), args=DPOConfig(**common), train_dataset=data, processing_class=tokenizer()
        )
    if options.mistake:
        trainer.model_accepts_loss_kwargs = False
    trainer.train()


if __name__ == "__main__":
    main()

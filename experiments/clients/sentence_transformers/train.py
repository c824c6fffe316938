"""Trains a tiny BERT on pairs of sentences with SentenceTransformerTrainer and negatives from the batch.

python train.py [--loss plain|cached] [--mistake]
"""

import argparse
import random
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

parser = argparse.ArgumentParser()
parser.add_argument("--loss", choices=["plain", "cached"], default="plain")
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--mistake", action="store_true", help="Accumulate two batches of half the size: fewer negatives.")
args = parser.parse_args()

WORDS = 80


def tokenizer() -> PreTrainedTokenizerFast:
    names = ["[PAD]", "[UNK]", *(f"w{number}" for number in range(WORDS))]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32)


def model() -> SentenceTransformer:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS + 2,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.2,
    )
    folder = tempfile.mkdtemp()
    BertModel(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(32, pooling_mode="mean")], device="cpu")


def pairs(size: int) -> Dataset:
    draw = random.Random(1)

    def text() -> str:
        return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randint(4, 9)))

    return Dataset.from_dict({"anchor": [text() for _ in range(size)], "positive": [text() for _ in range(size)]})


def main() -> None:
    encoder = model()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        max_steps=args.steps,
        per_device_train_batch_size=4 if args.mistake else 8,
        gradient_accumulation_steps=2 if args.mistake else 1,
        learning_rate=2e-3,
        warmup_steps=2,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
    )
    if args.loss == "plain":
        loss = MultipleNegativesRankingLoss(encoder)
    else:
        loss = CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=4)
    SentenceTransformerTrainer(encoder, arguments, train_dataset=pairs(64), loss=loss).train()
    embeddings = encoder.encode(["w1 w2 w3", "w3 w2 w1"], show_progress_bar=False)
    print(f"similarity {encoder.similarity(embeddings[0], embeddings[1]).item():.4f}")


if __name__ == "__main__":
    main()

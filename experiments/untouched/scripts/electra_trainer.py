"""Train a small Electra of transformers by its Trainer to classify tokens, with frozen embeddings of words.

Sequences have padding, which attention does not see and labels do not count. Every step has two microbatches.
"""

import argparse
import os
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset
from transformers import ElectraConfig, ElectraForTokenClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.models.electra import modeling_electra

CLEAN = {
    "base": "the Trainer's loop, with evaluation after every second step",
    "no_evaluation": "no evaluation",
    "fused": "fused AdamW",
    "own_optimizer": "the optimizer and its schedule are made by the script",
    "eager": "attention by matrix products",
    "own_loss": "the loss by hand, from the Trainer's number of labels",
    "one_batch": "one batch of all samples instead of two microbatches",
    "checkpointing": "activation checkpointing",
    "callback": "a callback that reads gradients",
    "subclass": "a subclass of the Trainer that computes the loss as the Trainer does",
    "renamed": "a subclass of the model's class, of another name",
    "hand_loop": "a loop by hand instead of the Trainer's",
}
FAULTS = {
    "loss_not_divided": "microbatches are averaged over their own labels, and their sum is not divided by their number",
    "mask_lost": "attention also sees padding",
    "clip_norm": "gradients are clipped to norm 1 instead of 0.25",
    "norms_decayed": "biases and norms are decayed",
}
VOCABULARY, LABELS, LENGTH = 60, 5, 16


class Tagger(ElectraForTokenClassification):
    """Electra under another name."""


class Sentences(Dataset):
    """Tokens, of which 0 is padding, and a label for each token: its value and the one before it, modulo their number."""

    def __init__(self, num: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed + 303)
        tokens = torch.randint(1, VOCABULARY, (num, LENGTH), generator=draw)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (num, 1), generator=draw)
        self.mask = torch.arange(LENGTH) < lengths
        self.tokens = tokens * self.mask
        labels = (tokens + tokens.roll(1, 1)) % LABELS
        self.labels = labels.where(self.mask, torch.tensor(-100))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "attention_mask": self.mask[i].long(), "labels": self.labels[i]}


def by_hand(outputs, labels: Tensor, num_items_in_batch=None) -> Tensor:
    logits = outputs.logits
    counted = labels >= 0
    right = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(right * counted).sum() / num_items_in_batch


def averaged(outputs, labels: Tensor, num_items_in_batch=None) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def summed(outputs, labels: Tensor, num_items_in_batch=None) -> Tensor:
    logits = outputs.logits.flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch


class Reader(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
        assert any(param.grad is not None for param in model.parameters())


class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> ElectraForTokenClassification:
    config = ElectraConfig(
        vocab_size=VOCABULARY,
        embedding_size=24,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=LENGTH,
        num_labels=LABELS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout=0.0,
        initializer_range=0.1,
        attn_implementation="eager" if "eager" in on else "sdpa",
    )
    if "mask_lost" in on:
        modeling_electra.create_bidirectional_mask = lambda *args, **kwargs: None
    torch.manual_seed(seed)
    model = (Tagger if "renamed" in on else ElectraForTokenClassification)(config).to(dtype)
    model.electra.embeddings.word_embeddings.weight.requires_grad_(False)
    return model


def make_optimizer(model: torch.nn.Module, on: set[str]):
    params = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    plain = [name for name, _ in params if name.endswith("bias") or "LayerNorm" in name]
    everything = "norms_decayed" in on
    groups = [
        {"params": [each for name, each in params if everything or name not in plain], "weight_decay": 0.1},
        {"params": [each for name, each in params if not everything and name in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([each for each in groups if each["params"]], lr=3e-3, betas=(0.9, 0.999))
    return optimizer, torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / 2 if step < 2 else (5 - step) / 3
    )


def train_by_hand(model: torch.nn.Module, data: Dataset, steps: int, on: set[str]) -> None:
    """What the Trainer does, without it; its sampler's order is that of the data."""
    optimizer, schedule = make_optimizer(model, on)
    model.train()
    for step in range(steps):
        rows = [data[i] for i in range(8 * step, 8 * step + 8)]
        batches = [
            {name: torch.stack([row[name] for row in part]) for name in part[0]} for part in (rows[:4], rows[4:])
        ]
        num_labels = sum(int((batch["labels"] >= 0).sum()) for batch in batches)
        for batch in batches:
            labels = batch.pop("labels")
            summed(model(**batch), labels, num_labels).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


class InOrder(OwnTrainer):
    """A Trainer whose samples come in the order of the data."""

    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class PlainInOrder(Trainer):
    def _get_train_sampler(self, *args, **kwargs):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    model = make_model(options.seed, getattr(torch, options.dtype), on)
    data, held_out = Sentences(8 * options.steps, options.seed), Sentences(8, options.seed + 1)
    if "hand_loop" in on:
        train_by_hand(model, data, options.steps, on)
        return
    whole = "one_batch" in on
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            seed=options.seed,
            max_steps=options.steps,
            per_device_train_batch_size=8 if whole else 4,
            gradient_accumulation_steps=1 if whole else 2,
            learning_rate=3e-3,
            warmup_steps=2,
            lr_scheduler_type="linear",
            weight_decay=0.1,
            max_grad_norm=1.0 if "clip_norm" in on else 0.25,
            optim="adamw_torch_fused" if "fused" in on else "adamw_torch",
            eval_strategy="no" if "no_evaluation" in on else "steps",
            eval_steps=2,
            save_strategy="no",
            report_to=[],
            gradient_checkpointing="checkpointing" in on,
            gradient_checkpointing_kwargs={"use_reentrant": False} if "checkpointing" in on else None,
            disable_tqdm=True,
            logging_steps=1,
        )
        trainer = (InOrder if "subclass" in on else PlainInOrder)(
            model=model,
            args=arguments,
            train_dataset=data,
            eval_dataset=held_out,
            compute_loss_func=by_hand if "own_loss" in on else averaged if "loss_not_divided" in on else summed,
            callbacks=[Reader()] if "callback" in on else None,
            optimizers=make_optimizer(model, on) if on & {"own_optimizer", "norms_decayed"} else (None, None),
        )
        trainer.train()


if __name__ == "__main__":
    main()

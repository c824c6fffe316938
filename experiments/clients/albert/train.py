"""Pretrains a small ALBERT by masked language modelling on random padded texts: one layer, passed four times.

python train.py [--accumulate 2] [--attention eager] [--loss selected|model] [--stock] [--dropout 0.1] [--mistake]
"""

import argparse

import torch
import torch.nn.functional as F
from transformers import AlbertConfig, AlbertForMaskedLM
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.albert.modeling_albert import AlbertTransformer

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1, help="Number of microbatches per step.")
parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
parser.add_argument("--loss", choices=["sum", "selected", "model"], default="sum", help="How the loss is computed.")
parser.add_argument("--stock", action="store_true", help="Use the encoder of transformers instead of ours.")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--lr", type=float, default=2e-3, help="Peak AdamW learning rate.")
parser.add_argument("--mistake", action="store_true", help="Pass the attention mask to the first pass only.")
args = parser.parse_args()

VOCAB, SEQ_LEN, PAD, MASK, FIRST_WORD, IGNORE = 60, 20, 0, 1, 4, -100


class TracedEncoder(AlbertTransformer):
    """ALBERT's encoder that also keeps how far each pass moves the hidden states."""

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        x = self.embedding_hidden_mapping_in(hidden_states)
        layer = self.albert_layer_groups[0]
        self.moved = []
        for depth in range(self.config.num_hidden_layers):
            previous = x.detach()
            if args.mistake and depth > 0:
                x = layer(x, **kwargs)
            else:
                x = layer(x, attention_mask, **kwargs)
            self.moved.append((x.detach() - previous).pow(2).mean().sqrt())
        return BaseModelOutput(last_hidden_state=x)


def build_model():
    config = AlbertConfig(
        vocab_size=VOCAB,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_hidden_groups=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=SEQ_LEN,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
        initializer_range=0.15,
        pad_token_id=PAD,
        attn_implementation=args.attention,
    )
    model = AlbertForMaskedLM(config)
    if not args.stock:
        encoder = TracedEncoder(config)
        encoder.load_state_dict(model.albert.encoder.state_dict())
        model.albert.encoder = encoder
    return model


def make_batch(step):
    """Random texts of 8 to 20 tokens, of which about a fifth are replaced by the mask token."""
    rng = torch.Generator().manual_seed(1000 + step)
    shape = (args.batch_size, SEQ_LEN)
    words = torch.randint(FIRST_WORD, VOCAB, shape, generator=rng)
    lengths = torch.randint(8, SEQ_LEN + 1, (args.batch_size, 1), generator=rng)
    lengths[0] = SEQ_LEN
    real = torch.arange(SEQ_LEN) < lengths
    hidden = (torch.rand(shape, generator=rng) < 0.2) & real
    hidden[:, 1] = True  # at least one target per text
    return {
        "input_ids": words.masked_fill(hidden, MASK).masked_fill(~real, PAD),
        "attention_mask": real.long(),
        "labels": words.masked_fill(~hidden, IGNORE),
    }


def mlm_loss(model, batch, num_targets):
    """Sum of the losses of this microbatch, divided by the number of targets of the whole batch."""
    labels = batch["labels"]
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if args.loss == "model":
        mean = model(**inputs, labels=labels).loss
        return mean * ((labels != IGNORE).sum() / num_targets)
    logits = model(**inputs).logits
    if args.loss == "selected":
        target = labels != IGNORE
        return F.cross_entropy(logits[target], labels[target], reduction="sum") / num_targets
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / num_targets


def parameter_groups(model):
    decayed, others = [], []
    for parameter in model.parameters():
        (decayed if parameter.ndim > 1 else others).append(parameter)
    return [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]


def main():
    torch.manual_seed(0)
    model = build_model()
    model.train()
    torch.manual_seed(1)  # dropout draws the same masks whichever encoder was built
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=args.lr, betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))

    for step in range(args.steps):
        batch = make_batch(step)
        num_targets = (batch["labels"] != IGNORE).sum()
        total = 0.0
        optimizer.zero_grad()
        for i in range(args.accumulate):
            micro = {key: value.chunk(args.accumulate)[i] for key, value in batch.items()}
            loss = mlm_loss(model, micro, num_targets)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        line = f"step {step} loss {total:.7f} grad norm {norm.item():.5f}"
        if not args.stock:
            line += " moved " + " ".join(f"{moved.item():.3f}" for moved in model.albert.encoder.moved)
        print(line)


if __name__ == "__main__":
    main()

"""Train a small T5 of transformers on copied and reversed sequences, with Adam's rule in a subclass and loss scaling by hand."""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5 import modeling_t5

CLEAN = {
    "base": "labels smoothed by torch, inverse square root schedule",
    "own_smoothing": "the smoothed loss as a mixture of two means",
    "scaled_loss": "the loss is scaled by 1024, and gradients by its inverse before the optimizer steps",
    "one_by_one": "six microbatches of one sample, of the same number of labels",
    "last_first": "the same microbatches in the opposite order",
    "foreach": "foreach AdamW",
    "renamed": "a subclass of the model's class, of another name",
    "hand_shift": "decoder inputs are shifted by the script instead of by the model",
    "frozen_scale": "gradients are multiplied by 1 in a hook of each parameter",
}
FAULTS = {
    "half_scores": "attention of encoder block 1 rounds its queries to float16",
    "decoder_not_shifted": "the decoder is given the labels themselves",
    "one_sided_bias": "the decoder's relative positions are bucketed in both directions",
    "norm_mean": "the last norm of the encoder also subtracts the mean",
    "scaled_attention": "decoder block 0 scales its scores by the root of the width of a head, which T5 does not",
    "unscaled_last": "gradients of the head are not scaled back",
    "smoothing_sum": "smoothing of 0.1 is added to the loss instead of mixed into it",
    "cross_detached": "the encoder's output is detached before cross-attention",
}
VOCABULARY = 64


class MySeq2Seq(T5ForConditionalGeneration):
    """T5 under another name."""


class CentredNorm(modeling_t5.T5LayerNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


def bucket_both_ways(given):
    def bucket(relative_position, bidirectional=True, num_buckets=32, max_distance=128):
        return given(relative_position, bidirectional=True, num_buckets=num_buckets, max_distance=max_distance)

    return bucket


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    torch.manual_seed(seed)
    model = T5ForConditionalGeneration(config).to(dtype)
    if "renamed" in on:
        model.__class__ = MySeq2Seq
    if "norm_mean" in on:
        model.encoder.final_layer_norm.__class__ = CentredNorm
    if "one_sided_bias" in on:
        attention = model.decoder.block[0].layer[0].SelfAttention
        attention._relative_position_bucket = bucket_both_ways(attention._relative_position_bucket)
    if "half_scores" in on:
        query = model.encoder.block[1].layer[0].SelfAttention.q
        project = query.forward
        query.forward = lambda hidden: project(hidden).half().to(hidden.dtype)
    if "scaled_attention" in on:
        model.decoder.block[0].layer[0].SelfAttention.scaling = 8**-0.5
    if "cross_detached" in on:
        for block in model.decoder.block:
            cross = block.layer[1].EncDecAttention
            for part in (cross.k, cross.v):
                part.register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    return model


def batch_of(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """(source, labels), 6 samples of 10 tokens: every other sample is to be reversed."""
    draw = torch.Generator().manual_seed(15485863 + 1009 * seed + step)
    source = torch.randint(2, VOCABULARY, (6, 10), generator=draw)
    labels = source.clone()
    labels[::2] = labels[::2].flip(1)
    return source, labels


def smoothed(logits: Tensor, labels: Tensor, on: set[str], smoothing: float = 0.1) -> Tensor:
    logits, labels = logits.flatten(0, 1), labels.flatten()
    if "own_smoothing" in on:
        logs = F.log_softmax(logits, -1)
        return -(1 - smoothing) * logs.gather(1, labels[:, None]).mean() - smoothing * logs.mean()
    if "smoothing_sum" in on:
        return F.cross_entropy(logits, labels) - smoothing * F.log_softmax(logits, -1).mean()
    return F.cross_entropy(logits, labels, label_smoothing=smoothing)


def loss_of(model: T5ForConditionalGeneration, source: Tensor, labels: Tensor, on: set[str]) -> Tensor:
    if "decoder_not_shifted" in on:
        shifted = labels
    elif "hand_shift" in on:
        shifted = F.pad(labels, (1, 0), value=0)[:, :-1]
    else:
        shifted = model.prepare_decoder_input_ids_from_labels(labels)
    return smoothed(model(input_ids=source, decoder_input_ids=shifted).logits, labels, on)


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
    model = make_model(options.seed, getattr(torch, options.dtype), on)
    if "frozen_scale" in on:
        for param in model.parameters():
            param.register_hook(lambda grad: grad * 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0, foreach="foreach" in on)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 2, ((step + 1) / 2) ** -0.5))
    scale = 1024.0 if on & {"scaled_loss", "unscaled_last"} else 1.0
    for step in range(options.steps):
        source, labels = batch_of(step, options.seed)
        rows = [slice(i, i + 1) for i in range(6)] if on & {"one_by_one", "last_first"} else [slice(0, 6)]
        total = 0.0
        for part in reversed(rows) if "last_first" in on else rows:
            loss = loss_of(model, source[part], labels[part], on) / len(rows)
            (loss * scale).backward()
            total += loss.item()
        if scale != 1.0:
            for name, param in model.named_parameters():
                if param.grad is not None and not ("unscaled_last" in on and name == "shared.weight"):
                    param.grad /= scale
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        print(f"step {step} loss {total:.12f}", flush=True)


if __name__ == "__main__":
    main()

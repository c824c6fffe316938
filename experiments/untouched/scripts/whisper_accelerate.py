"""Train a small Whisper of transformers on spectrograms of noise, with accelerate.

Every step has two microbatches, clips gradients, and updates averages of parameters.
"""

import argparse
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import WhisperConfig, WhisperForConditionalGeneration

CLEAN = {
    "base": "accelerate accumulates and clips",
    "plain": "the same loop without accelerate",
    "clip_hand": "clipping by hand, without accelerate's function",
    "reversed": "microbatches in the opposite order",
    "eager": "attention by matrix products",
    "loss_by_model": "the loss that the model computes from labels",
    "fused": "fused AdamW",
    "foreach": "foreach AdamW",
    "library_average": "averages by torch.optim.swa_utils",
    "no_average": "no averages",
    "checkpointing": "activation checkpointing by transformers",
    "hooks": "hooks that look at gradients of parameters",
    "convolution_unfolded": "the first convolution as a product of matrices",
    "renamed": "a subclass of the model's class, of another name",
    "threads": "two threads",
}
FAULTS = {
    "no_last_norm": "the encoder's last norm is skipped",
    "cross_scale": "layer 0 of the decoder scales scores of the encoder's states by 1 / head_dim instead of its root",
    "divided_twice": "the script divides the loss by the number of microbatches, as accelerate does again",
    "average_trains": "after step 2 the averaged weights are copied into the model",
    "stale_gradients": "gradients are not set to zero after step 1",
}
VOCABULARY, MELS, FRAMES, END = 48, 6, 24, 1


class Listener(WhisperForConditionalGeneration):
    """Whisper under another name."""


class Unfolded(nn.Conv1d):
    """The same parameters and the same function as nn.Conv1d, by a product of matrices."""

    def forward(self, input: Tensor) -> Tensor:
        padded = F.pad(input, (self.padding[0], self.padding[0]))
        rows = padded.unfold(-1, self.kernel_size[0], self.stride[0]).transpose(1, 2).flatten(-2)
        return (rows @ self.weight.flatten(1).T + self.bias).transpose(1, 2)


def make_model(seed: int, dtype: torch.dtype, on: set[str]) -> WhisperForConditionalGeneration:
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=MELS,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=FRAMES // 2,
        max_target_positions=16,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        init_std=0.1,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=END,
        eos_token_id=END,
        decoder_start_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        attn_implementation="eager" if "eager" in on else "sdpa",
    )
    torch.manual_seed(seed)
    model = (Listener if "renamed" in on else WhisperForConditionalGeneration)(config).to(dtype)
    if "no_last_norm" in on:
        model.model.encoder.layer_norm.forward = lambda hidden: hidden
    if "cross_scale" in on:
        model.model.decoder.layers[0].encoder_attn.scaling = 1 / 8
    if "convolution_unfolded" in on:
        model.model.encoder.conv1.__class__ = Unfolded
    if "checkpointing" in on:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "hooks" in on:
        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: None)
    return model.train()


def microbatches_of(step: int, seed: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """(spectrograms (3, MELS, FRAMES), labels (3, 9)) of two microbatches; -100 after the end of a text."""
    draw = torch.Generator().manual_seed(4001 * seed + step)
    found = []
    for _ in range(2):
        labels = torch.randint(3, VOCABULARY, (3, 9), generator=draw)
        lengths = torch.randint(4, 9, (3, 1), generator=draw)
        labels = labels.where(torch.arange(9) < lengths, torch.tensor(-100))
        labels.scatter_(1, lengths, END)
        sound = torch.randn(3, MELS, FRAMES, generator=draw)
        sound[:, 0] += labels[:, :1] / VOCABULARY
        found.append((sound.to(dtype), labels))
    return found


def clip(params: list[nn.Parameter], accelerator: Accelerator | None, on: set[str]) -> None:
    if "clip_hand" in on:
        total = torch.stack([param.grad.square().sum() for param in params if param.grad is not None]).sum().sqrt()
        for param in params:
            if param.grad is not None:
                param.grad.mul_(torch.clamp(0.5 / (total + 1e-6), max=1.0))
    elif accelerator is None:
        nn.utils.clip_grad_norm_(params, 0.5)
    else:
        accelerator.clip_grad_norm_(params, 0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    torch.set_num_threads(2 if "threads" in on else 1)
    dtype = getattr(torch, options.dtype)
    model: nn.Module = make_model(options.seed, dtype, on)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, weight_decay=0.1, fused=True if "fused" in on else None, foreach="foreach" in on
    )
    accelerator = None if "plain" in on else Accelerator(cpu=True, gradient_accumulation_steps=2)
    average, values = None, [param.detach().clone() for param in model.parameters()]
    if "library_average" in on:
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
        )
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    params = list(model.parameters())
    for step in range(options.steps):
        batches = microbatches_of(step, options.seed, dtype)
        num_labels = sum(int((labels >= 0).sum()) for _, labels in batches)
        if "reversed" in on:
            batches.reverse()
        total = 0.0
        for sound, labels in batches:
            output = model(input_features=sound, labels=labels)
            if "loss_by_model" in on:
                loss = output.loss * (labels >= 0).sum() / num_labels
            else:
                loss = F.cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_labels
            total += loss.item()
            if "divided_twice" in on:
                loss = loss / 2
            if accelerator is None:
                loss.backward()
            else:  # accelerate divides by the number of microbatches
                with accelerator.accumulate(model):
                    accelerator.backward(loss * 2)
        clip(params, accelerator, on)
        optimizer.step()
        if not ("stale_gradients" in on and step == 1):
            optimizer.zero_grad()
        if average is not None:
            average.update_parameters(model)
        elif "no_average" not in on:
            with torch.no_grad():
                for value, param in zip(values, params, strict=True):
                    value.mul_(0.8).add_(param, alpha=0.2)
                    if "average_trains" in on and step == 2:
                        param.copy_(value)
        print(f"step {step} loss {total:.12f}", flush=True)


if __name__ == "__main__":
    main()

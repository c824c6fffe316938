"""Train a bidirectional GRU on packed sequences with lightning's Fabric, dropout, two optimizers and a one-cycle schedule."""

import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

CLEAN = {
    "base": "packed sequences, Fabric's clipping",
    "plain": "the same loop without Fabric",
    "by_hand": "the GRU as a loop over the arithmetic of its cell",
    "own_dropout": "dropout by a mask from the same random numbers",
    "foreach": "foreach optimizers",
    "other_order": "optimizers step in the other order",
    "clip_hand": "clipping by hand",
    "sum_over_count": "the loss as a sum over its count",
    "evaluation": "evaluation after every second step",
    "hooks": "hooks that look at gradients of parameters",
    "renamed": "a subclass of the model's class, of another name",
    "group_per_param": "one group of parameters for each parameter",
    "sorted": "sequences are sorted by length when they are packed",
}
FAULTS = {
    "reset_before": "the reset gate is applied before the product with the hidden state (with by_hand)",
    "stays_in_eval": "after the evaluation of step 1 the model stays in eval mode (with evaluation)",
    "skipped_step": "no optimizer steps at step 2",
    "schedule_twice": "the schedule moves two steps at a time",
}
VOCABULARY, WIDTH, HIDDEN, TAGS, LENGTH = 50, 16, 16, 7, 12


class Gru(nn.GRU):
    """The parameters of a bidirectional nn.GRU of one layer, position by position."""

    before = False

    def direction(self, x: Tensor, mask: Tensor, suffix: str) -> Tensor:
        enter, recur = getattr(self, f"weight_ih_l0{suffix}"), getattr(self, f"weight_hh_l0{suffix}")
        enter_bias, recur_bias = getattr(self, f"bias_ih_l0{suffix}"), getattr(self, f"bias_hh_l0{suffix}")
        hidden, found = x.new_zeros(len(x), HIDDEN), [x] * x.shape[1]
        times = range(x.shape[1] - 1, -1, -1) if suffix else range(x.shape[1])
        for i in times:
            reset_in, update_in, new_in = F.linear(x[:, i], enter, enter_bias).chunk(3, -1)
            reset_by, update_by, new_by = F.linear(hidden, recur, recur_bias).chunk(3, -1)
            reset, update = (reset_in + reset_by).sigmoid(), (update_in + update_by).sigmoid()
            if self.before:
                new_by = F.linear(reset * hidden, recur[2 * HIDDEN :], recur_bias[2 * HIDDEN :])
            else:
                new_by = reset * new_by
            after = (1 - update) * (new_in + new_by).tanh() + update * hidden
            hidden = torch.where(mask[:, i, None], after, hidden)
            found[i] = torch.where(mask[:, i, None], after, torch.zeros_like(after))
        return torch.stack(found, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return torch.cat([self.direction(x, mask, ""), self.direction(x, mask, "_reverse")], -1)


class OwnDropout(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return input
        mask = F.dropout(torch.ones_like(input), self.p)
        return input * mask


class Tagger(nn.Module):
    """Tokens (batch, LENGTH), of which 0 is padding, to logits (batch, LENGTH, TAGS)."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        kind = Gru if "by_hand" in on else nn.GRU
        self.recur = kind(WIDTH, HIDDEN, batch_first=True, bidirectional=True)
        self.drop = (OwnDropout if "own_dropout" in on else nn.Dropout)(0.1)
        self.head = nn.Linear(2 * HIDDEN, TAGS)
        self.on = on

    def forward(self, tokens: Tensor) -> Tensor:
        x, mask = self.embed(tokens), tokens > 0
        lengths = mask.sum(1)
        if isinstance(self.recur, Gru):
            self.recur.before = "reset_before" in self.on
            hidden = self.recur(x, mask)
        elif "sorted" in self.on:
            order = lengths.argsort(descending=True)
            packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
            hidden = pad_packed_sequence(self.recur(packed)[0], batch_first=True, total_length=LENGTH)[0]
            hidden = hidden[order.argsort()]
        else:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            hidden = pad_packed_sequence(self.recur(packed)[0], batch_first=True, total_length=LENGTH)[0]
        return self.head(self.drop(hidden))


class Labeller(Tagger):
    """The tagger under another name."""


def batch_of(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens (8, LENGTH) and their tags; a tag of -100 is that of padding."""
    draw = torch.Generator().manual_seed(5003 * seed + step)
    tokens = torch.randint(1, VOCABULARY, (8, LENGTH), generator=draw)
    lengths = torch.randint(4, LENGTH + 1, (8, 1), generator=draw)
    lengths[0] = LENGTH
    mask = torch.arange(LENGTH) < lengths
    tags = (tokens + tokens.roll(1, 1)) % TAGS
    return tokens * mask, tags.where(mask, torch.tensor(-100))


def loss_of(logits: Tensor, tags: Tensor, on: set[str]) -> Tensor:
    if "sum_over_count" in on:
        return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="sum") / (tags >= 0).sum()
    return F.cross_entropy(logits.flatten(0, 1), tags.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    model: nn.Module = (Labeller if "renamed" in on else Tagger)(on).to(getattr(torch, options.dtype))
    if "hooks" in on:
        for param in model.parameters():
            param.register_hook(lambda grad: None)
    others = [param for name, param in model.named_parameters() if not name.startswith("embed")]
    foreach = "foreach" in on
    sgd = torch.optim.SGD(model.embed.parameters(), lr=0.5, foreach=foreach)
    groups = [{"params": [param]} for param in others] if "group_per_param" in on else others
    adam = torch.optim.Adam(groups, lr=1e-3, foreach=foreach)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 1e-2, total_steps=2 * options.steps + 1, cycle_momentum=False)
    optimizers: list[torch.optim.Optimizer] = [sgd, adam]
    fabric = None if "plain" in on else Fabric(accelerator="cpu", devices=1)
    if fabric is not None:
        model, *optimizers = fabric.setup(model, *optimizers)
    for step in range(options.steps):
        tokens, tags = batch_of(step, options.seed)
        loss = loss_of(model(tokens), tags, on)
        if fabric is None:
            loss.backward()
        else:
            fabric.backward(loss)
        if "clip_hand" in on:
            total = torch.stack([param.grad.norm() for param in others]).norm()
            for param in others:
                param.grad.mul_((0.4 / (total + 1e-6)).clamp(max=1.0))
        else:
            nn.utils.clip_grad_norm_(others, 0.4)
        if not ("skipped_step" in on and step == 2):
            for optimizer in optimizers[::-1] if "other_order" in on else optimizers:
                optimizer.step()
        for _ in range(2 if "schedule_twice" in on else 1):
            schedule.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                print(f"evaluation {model(tokens).argmax(-1).float().mean().item():.6f}")
            if "stays_in_eval" not in on:
                model.train()


if __name__ == "__main__":
    main()

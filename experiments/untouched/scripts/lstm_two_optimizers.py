"""Train an LSTM language model with two optimizers, a hand-made loss scale, and steps that are skipped when it overflows.

The embedding is trained by Adagrad, everything else by a subclass of AdamW. Hidden states go from one step to the next.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLEAN = {
    "base": "the loss is scaled, and step 2 is skipped because the scale overflows",
    "unscaled": "the loss is not scaled, and step 2 is skipped all the same",
    "smaller_scale": "the scale starts at 64 instead of 1024",
    "cell_loop": "the LSTM as a loop over an LSTM cell's arithmetic",
    "plain_adamw": "torch's AdamW instead of a subclass of it",
    "own_adamw": "a hand-written optimizer of AdamW's rule",
    "foreach": "foreach optimizers",
    "other_order": "the optimizers step in the other order",
    "clip_hand": "gradients are clipped by hand instead of by torch",
    "generator": "batches are drawn from the default generator instead of one of their own",
    "reused": "the output layer is called twice, on each half of the positions",
    "evaluation": "evaluation after every second step",
    "split_batch": "two microbatches of equal size, with a carried state for each",
}
FAULTS = {
    "betas": "beta2 0.99 instead of 0.999",
    "no_bias_correction": "the subclass of AdamW does not correct its moments for their bias",
    "skips_one_more": "step 4 is skipped, although nothing overflows",
    "embedding_rate": "the embedding's learning rate is 0.15 instead of 0.1",
    "coupled_decay": "decay is added to gradients instead of to the step",
    "stale_state": "the hidden state of step 0 is carried into every step",
    "detached_cell": "the output of the LSTM is detached before the output layer",
    "steps_overflow": "the step that overflows is not skipped, and its gradients are cut to finite numbers",
    "forget_gate": "input and forget gates are exchanged (with cell_loop)",
    "clip_scaled": "gradients are clipped before the scale is taken out of them",
}
VOCABULARY, WIDTH, HIDDEN = 72, 24, 32


class ScaledAdamW(torch.optim.AdamW):
    """AdamW which counts its steps."""

    def __init__(self, params, **options) -> None:
        super().__init__(params, **options)
        self.num_steps = 0

    def step(self, closure=None):  # type: ignore[override]
        self.num_steps += 1
        return super().step(closure)


class OwnAdamW(torch.optim.AdamW):
    """AdamW's rule written by hand."""

    corrects, coupled = True, False

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad, state = param.grad, self.state[param]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(param)
                    state["exp_avg_sq"] = torch.zeros_like(param)
                state["step"] += 1
                count = state["step"].item()
                if self.coupled:
                    grad = grad + group["weight_decay"] * param
                else:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                first, second = (1 - beta1**count, 1 - beta2**count) if self.corrects else (1.0, 1.0)
                root = (state["exp_avg_sq"] / second).sqrt() + group["eps"]
                param.sub_(group["lr"] * (state["exp_avg"] / first) / root)


class UncorrectedAdamW(OwnAdamW):
    corrects = False


class CoupledAdamW(OwnAdamW):
    coupled = True


class CellLoop(nn.LSTM):
    """The same parameters and the same function as nn.LSTM of one layer, position by position."""

    exchanges_gates = False

    def forward(self, input: Tensor, hx: tuple[Tensor, Tensor]):  # type: ignore[override]
        hidden, cell = hx[0][0], hx[1][0]
        outputs = []
        for x in input.unbind(1):
            gates = F.linear(x, self.weight_ih_l0, self.bias_ih_l0) + F.linear(
                hidden, self.weight_hh_l0, self.bias_hh_l0
            )
            enter, forget, new, leave = gates.chunk(4, -1)
            if self.exchanges_gates:
                enter, forget = forget, enter
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            hidden = leave.sigmoid() * cell.tanh()
            outputs.append(hidden)
        return torch.stack(outputs, 1), (hidden[None], cell[None])


class LanguageModel(nn.Module):
    """Tokens (batch, time) and the state before them to logits (batch, time, vocabulary) and the state after them."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        kind = CellLoop if on & {"cell_loop", "forget_gate"} else nn.LSTM
        self.lstm = kind(WIDTH, HIDDEN, batch_first=True)
        if isinstance(self.lstm, CellLoop):
            self.lstm.exchanges_gates = "forget_gate" in on
        self.norm = nn.LayerNorm(HIDDEN)
        self.out = nn.Linear(HIDDEN, VOCABULARY)
        self.on = on

    def forward(self, tokens: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, (hidden, cell) = self.lstm(self.embed(tokens), (hidden, cell))
        if "detached_cell" in self.on:
            x = x.detach()
        x = self.norm(x)
        if "reused" in self.on:
            half = x.shape[1] // 2
            return torch.cat([self.out(x[:, :half]), self.out(x[:, half:])], 1), hidden, cell
        return self.out(x), hidden, cell


def make_optimizers(model: LanguageModel, on: set[str]) -> list[torch.optim.Optimizer]:
    rest = [param for name, param in model.named_parameters() if not name.startswith("embed")]
    kinds = {"plain_adamw": torch.optim.AdamW, "own_adamw": OwnAdamW}
    kinds |= {"no_bias_correction": UncorrectedAdamW, "coupled_decay": CoupledAdamW}
    kind = next((kinds[name] for name in kinds if name in on), ScaledAdamW)
    foreach = "foreach" in on
    betas = (0.9, 0.99) if "betas" in on else (0.9, 0.999)
    rate = 0.15 if "embedding_rate" in on else 0.1
    found: list[torch.optim.Optimizer] = [
        torch.optim.Adagrad(model.embed.parameters(), lr=rate, foreach=foreach),
        kind(rest, lr=4e-3, betas=betas, weight_decay=0.1, foreach=foreach),
    ]
    return found[::-1] if "other_order" in on else found


def clip(params: list[nn.Parameter], most: float, on: set[str]) -> None:
    if "clip_hand" not in on:
        nn.utils.clip_grad_norm_(params, most)
        return
    total = sum(float(param.grad.pow(2).sum()) for param in params if param.grad is not None) ** 0.5
    for param in params:
        if param.grad is not None:
            param.grad.mul_(min(1.0, most / (total + 1e-6)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="base", help="names joined by +")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    on = set(options.variant.split("+"))
    assert on <= CLEAN.keys() | FAULTS.keys(), on
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    torch.manual_seed(options.seed)
    model = LanguageModel(on).to(dtype)
    optimizers = make_optimizers(model, on)
    params = list(model.parameters())
    draw = None if "generator" in on else torch.Generator().manual_seed(options.seed + 17)
    if draw is None:
        torch.manual_seed(options.seed + 17)
    batch_size = 8
    hidden = cell = torch.zeros(1, batch_size, HIDDEN, dtype=dtype)
    scale = 1.0 if "unscaled" in on else 64.0 if "smaller_scale" in on else 1024.0
    for step in range(options.steps):
        tokens = torch.randint(0, VOCABULARY, (batch_size, 17), generator=draw)
        parts = [slice(0, 4), slice(4, 8)] if "split_batch" in on else [slice(0, 8)]
        total, states = 0.0, []
        for part in parts:
            logits, after, cell_after = model(tokens[part, :-1], hidden[:, part], cell[:, part])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[part, 1:].flatten()) / len(parts)
            (loss * scale).backward()
            total += loss.item()
            states.append((after.detach(), cell_after.detach()))
        if step == 0 or "stale_state" not in on:
            hidden, cell = (torch.cat(each, 1) for each in zip(*states, strict=True))
        if step == 2:  # as if a gradient had been too large for the scale
            assert params[-1].grad is not None
            params[-1].grad[0] = torch.inf
        if "steps_overflow" in on:
            for param in params:
                if param.grad is not None:
                    param.grad.nan_to_num_(posinf=0.0)
        is_finite = all(bool(torch.isfinite(param.grad).all()) for param in params if param.grad is not None)
        if "clip_scaled" in on:
            clip(params, 0.5, on)
        for param in params:
            if param.grad is not None:
                param.grad.div_(scale)
        if is_finite and not ("skips_one_more" in on and step == 4):
            if "clip_scaled" not in on:
                clip(params, 0.5, on)
            for optimizer in optimizers:
                optimizer.step()
        elif not is_finite and scale > 1.0:
            scale /= 2
        for optimizer in optimizers:
            optimizer.zero_grad()
        print(f"step {step} loss {total:.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                held_out = torch.randint(0, VOCABULARY, (8, 17), generator=torch.Generator().manual_seed(step))
                print(f"evaluation {model(held_out, hidden, cell)[0].logsumexp(-1).mean().item():.6f}")
            model.train()


if __name__ == "__main__":
    main()

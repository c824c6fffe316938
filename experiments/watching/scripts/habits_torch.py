"""Train a small net of some kind for some hundred steps, with a habit that could be mistaken for a fault, or with a fault."""

import argparse
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

CLEAN = {
    "attention": "a transformer of characters; AdamW without decay of norms and biases",
    "step_decay": "Adam with L2 decay; the learning rate falls to a tenth at two steps",
    "gru": "a recurrent net with clipped gradients; SGD",
    "conv": "a convolutional net with batch norm; RMSprop with momentum",
    "regression": "a loss that falls by six orders of magnitude; SGD with momentum",
    "curriculum": "targets become harder every hundred steps; AdamW",
    "summed": "the loss is a sum over a batch of changing size; SGD",
    "dropout": "half of the features are dropped, and labels are smoothed; AdamW",
    "negative": "the likelihood of a normal distribution, whose logarithm changes its sign; Adam",
    "triplet": "a margin loss that is exactly 0 in more and more steps; AdamW",
    "rare_words": "an embedding most of whose rows have no gradient; Adagrad",
    "microbatches": "four microbatches under autocast to bfloat16; AdamW",
    "averaged": "an average of the weights replaces them every fifty steps; SGD",
}
FAULTS = {
    "zero_in_logarithm": "at the start, one target has probability 0",
    "inputs_not_scaled": "from the start on, inputs are a hundred times as large",
    "labels_shuffled": "from the start on, labels belong to other samples",
    "rate_too_large": "from the start on, the learning rate is 300 times as large",
    "left_out": "from the start on, the optimizer has no parameters of one block",
    "decayed_by_hand": "from the start on, all weights also shrink by a thousandth after each update",
    "detached": "from the start on, the output of a block is detached",
    "scaled_block": "from the start on, the output of a block is ten thousand times as large",
}
CLASSES, WIDTH, FEATURES, WORDS, LENGTH, BATCH = 12, 40, 20, 400, 12, 24
Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)
        self.factor, self.is_detached = 1.0, False

    def forward(self, x: Tensor) -> Tensor:
        y = self.factor * self.second(self.dropout(torch.tanh(self.first(self.norm(x)))))
        return x + (y.detach() if self.is_detached else y)


class Features(nn.Module):
    """A residual net of features."""

    def __init__(self, outputs: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, outputs)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Words(nn.Module):
    """A net of words: attention, a recurrent one, or their mean."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.leave = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.inner: nn.Module = nn.Identity()
        if kind == "attention":
            self.inner = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        elif kind == "gru":
            self.inner = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        x = self.inner(self.embedding(words))
        x = x[0][:, -1] if isinstance(x, tuple) else x.mean(1)
        return self.leave(x)


class Images(nn.Sequential):
    """A convolutional net."""

    def __init__(self) -> None:
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES))


def model_of(on: str) -> nn.Module:
    if on in ("attention", "gru", "rare_words"):
        return Words(on)
    if on == "conv":
        return Images()
    outputs = {"regression": 1, "negative": 2, "triplet": 8}.get(on, CLASSES)
    return Features(outputs, dropout=0.5 if on == "dropout" else 0.0)


def optimizer_of(on: str, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    if on == "attention":
        kinds = [[p for p in params if (p.dim() > 1) is wide] for wide in (True, False)]
        groups = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, 1e-3, betas=(0.9, 0.99))
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "step_decay": lambda: torch.optim.Adam(params, 3e-3, weight_decay=1e-3),
        "gru": lambda: torch.optim.SGD(params, 0.3),
        "conv": lambda: torch.optim.RMSprop(params, 1e-3, momentum=0.9),
        "regression": lambda: torch.optim.SGD(params, 0.02, momentum=0.9),
        "summed": lambda: torch.optim.SGD(params, 2e-3),
        "negative": lambda: torch.optim.Adam(params, 2e-3),
        "rare_words": lambda: torch.optim.Adagrad(params, 0.05),
        "averaged": lambda: torch.optim.SGD(params, 0.05),
    }
    return made.get(on, lambda: torch.optim.AdamW(params, 2e-3))()


def batches(on: str, steps: int, rank: int) -> Iterator[Batch]:
    """The batch of each step."""
    draw = torch.Generator().manual_seed(rank + 1)
    fixed = torch.Generator().manual_seed(0)
    teacher = torch.randn(FEATURES, CLASSES, generator=fixed)
    of_word = torch.randn(WORDS, CLASSES, generator=fixed)
    for step in range(steps):
        size = BATCH
        if on == "summed":
            size = int(torch.randint(8, 40, (1,), generator=draw))
        if on in ("attention", "gru", "rare_words"):
            words = (WORDS * torch.rand(size, LENGTH, generator=draw) ** 3).long()
            yield words, of_word[words].mean(1).argmax(-1)
        elif on == "conv":
            images = torch.randn(size, 3, 10, 10, generator=draw)
            yield images, (images.mean((2, 3)) @ teacher[:3]).argmax(-1)
        else:
            x = torch.randn(size, FEATURES, generator=draw)
            scores = x @ teacher
            if on == "curriculum":
                scores = scores + min(step // 100, 4) * torch.sin(3 * scores)
            yield x, scores[:, 0] if on in ("regression", "negative") else scores.argmax(-1)


def loss_of(on: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    outputs = model(x)
    if on == "regression":
        return (outputs[:, 0] - 0.2 * y).square().mean()
    if on == "negative":
        return functional.gaussian_nll_loss(outputs[:, 0], 0.1 * y, outputs[:, 1].exp())
    if on == "triplet":
        same = y[:, None] == y[None]
        apart = torch.cdist(outputs, outputs)
        near = torch.where(same, apart, 0.0).amax(1)
        far = torch.where(same, torch.inf, apart).amin(1)
        return functional.relu(near - far + 0.05).mean()
    return functional.cross_entropy(
        outputs, y, reduction="sum" if on == "summed" else "mean", label_smoothing=0.1 if on == "dropout" else 0.0
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", required=True, choices=CLEAN | FAULTS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--start", type=int, default=205)
    options = parser.parse_args()
    on, start = options.variant, options.start
    torch.set_num_threads(1)
    torch.manual_seed(5)
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    model = net = model_of(on)
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(net)
    optimizer = optimizer_of(on, net)
    average = {name: param.detach().clone() for name, param in net.named_parameters()}
    for step, (x, y) in enumerate(batches(on, options.steps, rank)):
        is_faulty = step >= start
        group = optimizer.param_groups[0]
        if on == "step_decay" and step in (options.steps // 2, 3 * options.steps // 4):
            group["lr"] *= 0.1
        if is_faulty and on == "inputs_not_scaled":
            x = 100 * x
        if is_faulty and on == "labels_shuffled":
            y = y.roll(1)
        if step == start and on == "rate_too_large":
            group["lr"] *= 300
        if step == start and on == "left_out":
            own = {id(param) for param in net.blocks[1].parameters()}  # type: ignore[index, union-attr]
            group["params"] = [param for param in group["params"] if id(param) not in own]
        if isinstance(net, Features):
            net.blocks[1].is_detached = is_faulty and on == "detached"  # type: ignore[assignment]
            net.blocks[1].factor = 1e4 if is_faulty and on == "scaled_block" else 1.0  # type: ignore[assignment]
        if on == "microbatches":
            for part, own_y in zip(x.chunk(4), y.chunk(4), strict=True):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = loss_of(on, model, part, own_y) / 4
                loss.backward()
        else:
            loss = loss_of(on, model, x, y)
            if step == start and on == "zero_in_logarithm":
                loss = loss + 0 * torch.log(model(x).softmax(-1)[0, 0] * 0)
            loss.backward()
        if on == "gru":
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, param in net.named_parameters():
                if is_faulty and on == "decayed_by_hand":
                    param.mul_(0.999)
                if on == "averaged":
                    average[name].lerp_(param, 0.02)
                    if step % 50 == 49:
                        param.copy_(average[name])


if __name__ == "__main__":
    main()

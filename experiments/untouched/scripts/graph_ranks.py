"""Train a small graph net, written by hand, on several ranks: padded graphs, classes of nodes and a value of each graph, NAdam.

A step's loss is the sum over all nodes of all ranks by their number, and the mean over all graphs.
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

CLEAN = {
    "base": "messages by products with the matrix of neighbours, gradients of DDP",
    "edges": "messages by a list of edges and index_add",
    "by_hand": "gradients are reduced by the script",
    "fsdp2": "sharded by torch's fully_shard",
    "ours": "sharded by torch_backend's fully_shard",
    "own_norm": "layer norm by hand",
    "own_loss": "the loss of nodes by hand from logsumexp",
    "own_nadam": "the rule of NAdam written out",
    "foreach": "foreach NAdam",
    "scaled_after": "messages are divided by degrees after the sum instead of before it",
    "evaluation": "evaluation after every second step",
    "renamed": "a subclass of the model's class, of another name",
}
FAULTS = {
    "own_count": "each rank divides by its own number of nodes",
    "padding_pooled": "the mean over a graph's nodes counts padding",
    "rank_sum": "on rank 1 layer 1 adds messages up instead of averaging them",
}
NODES, FEATURES, WIDTH, CLASSES, GRAPHS = 9, 6, 16, 4, 8


class Norm(nn.LayerNorm):
    by_hand = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.by_hand:
            return super().forward(input)
        centred = input - input.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


class Layer(nn.Module):
    """A node's own state and the mean of its neighbours' states, each by a product, normed; added to the node's state."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.message = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = Norm(WIDTH)
        self.norm.by_hand = "own_norm" in on
        self.on, self.adds_up = on, False

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        degrees = edges.sum(-1, keepdim=True).clamp(min=1)
        degrees = torch.ones_like(degrees) if self.adds_up else degrees
        sent = self.message(x)
        if "edges" in self.on:
            graph, to, start = edges.nonzero(as_tuple=True)
            rows = sent[graph, start] / degrees[graph, to]
            found = torch.zeros_like(sent).flatten(0, 1).index_add(0, graph * NODES + to, rows).view_as(sent)
        elif "scaled_after" in self.on:
            found = edges @ sent / degrees
        else:
            found = (edges / degrees) @ sent
        return x + F.silu(self.norm(self.own(x) + found))


class GraphNet(nn.Module):
    """Features (graphs, NODES, FEATURES), edges and a mask of nodes to logits of nodes and a value of each graph."""

    def __init__(self, on: set[str]) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(Layer(on) for _ in range(3))
        self.classes = nn.Linear(WIDTH, CLASSES)
        self.value = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.on = on

    def forward(self, features: Tensor, edges: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(features)
        for layer in self.layers:
            x = layer(x, edges)
        if "padding_pooled" in self.on:
            pooled = x.mean(1)
        else:
            pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.classes(x), self.value(pooled)[:, 0]


class Reader(GraphNet):
    """The graph net under another name."""


class OwnNAdam(torch.optim.NAdam):
    """NAdam's rule written by hand."""

    @torch.no_grad()
    def step(self, closure=None):  # type: ignore[override]
        for group in self.param_groups:
            (first, second), decay = group["betas"], group["momentum_decay"]
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["step"], state["mu_product"] = torch.zeros(()), torch.ones(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
                state["step"] += 1
                count = state["step"].item()
                now, later = (first * (1 - 0.5 * 0.96 ** (at * decay)) for at in (count, count + 1))
                state["mu_product"] *= now
                grad, product = param.grad + group["weight_decay"] * param, state["mu_product"].item()
                state["exp_avg"].lerp_(grad, 1 - first)
                state["exp_avg_sq"].mul_(second).add_((1 - second) * grad.square())
                root = (state["exp_avg_sq"] / (1 - second**count)).sqrt() + group["eps"]
                param.sub_(group["lr"] * (1 - now) / (1 - product) * grad / root)
                param.sub_(group["lr"] * later / (1 - product * later) * state["exp_avg"] / root)


def wrap(model: GraphNet, on: set[str]) -> nn.Module:
    if on & {"fsdp2", "ours"}:
        if "fsdp2" in on:
            from torch.distributed.fsdp import fully_shard
        else:
            from torch_backend import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        return model
    return model if "by_hand" in on else nn.parallel.DistributedDataParallel(model)


def batch_of(step: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """GRAPHS graphs of 4 to NODES nodes. A node's class counts its neighbours; a graph's value is a mean of features."""
    draw = torch.Generator().manual_seed(6007 * seed + step)
    features = torch.randn(GRAPHS, NODES, FEATURES, generator=draw)
    mask = torch.arange(NODES) < torch.randint(4, NODES + 1, (GRAPHS, 1), generator=draw)
    upper = (torch.rand(GRAPHS, NODES, NODES, generator=draw) < 0.4).triu(1)
    edges = (upper | upper.transpose(1, 2)) & mask[:, None] & mask[:, :, None]
    value = (features[..., 0].sin() * mask).sum(1) / mask.sum(1)
    floats = {"features": features * mask[..., None], "edges": edges, "mask": mask, "value": value}
    return {name: tensor.to(dtype) for name, tensor in floats.items()} | {"labels": edges.sum(-1) % CLASSES}


def loss_of(logits: Tensor, batch: dict[str, Tensor], on: set[str]) -> Tensor:
    """The sum over nodes."""
    is_node, labels = batch["mask"] > 0, batch["labels"]
    if "own_loss" in on:
        return (logits.logsumexp(-1) - logits.gather(-1, labels[..., None])[..., 0])[is_node].sum()
    return F.cross_entropy(logits[is_node], labels[is_node], reduction="sum")


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
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    model = (Reader if "renamed" in on else GraphNet)(on).to(dtype)
    if "rank_sum" in on and rank == 1:
        model.layers[1].adds_up = True
    model = wrap(model, on)
    params = list(model.parameters())
    kind = OwnNAdam if "own_nadam" in on else torch.optim.NAdam
    optimizer = kind(params, lr=4e-3, weight_decay=1e-3, foreach=True if "foreach" in on else None)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, 2 * options.steps, 2.0)
    for step in range(options.steps):
        batch = {name: each.chunk(world_size)[rank] for name, each in batch_of(step, options.seed, dtype).items()}
        num_nodes = batch["mask"].double().sum()
        if "own_count" in on:
            num_nodes = num_nodes * world_size
        else:
            dist.all_reduce(num_nodes)
        logits, values = model(batch["features"], batch["edges"], batch["mask"])
        nodes = loss_of(logits, batch, on) * world_size / num_nodes.to(dtype)  # gradients of ranks are averaged
        loss = nodes + F.mse_loss(values, batch["value"])
        loss.backward()
        if "by_hand" in on:
            for param in params:
                dist.all_reduce(param.grad)
                param.grad /= world_size
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.12f}", flush=True)
        if "evaluation" in on and step % 2:
            model.eval()
            with torch.no_grad():
                model(batch["features"], batch["edges"], batch["mask"])
            model.train()
    del model  # DDP's destructor must not be the last owner of gloo's threads: it joins them while it holds the GIL
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

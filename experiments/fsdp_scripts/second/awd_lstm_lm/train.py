"""A word-level LSTM language model with tied embeddings: truncated backpropagation and averaged SGD."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy

WORDS = 90


class LockedDropout(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or not self.p:
            return x
        mask = x.new_empty(1, x.size(1), x.size(2)).bernoulli_(1 - self.p)
        return x * mask / (1 - self.p)


class LanguageModel(nn.Module):
    def __init__(self, dim=40, hidden=56, layers=3, dropout=0.2):
        super().__init__()
        self.embed = nn.Embedding(WORDS, dim)
        sizes = [dim] + [hidden] * (layers - 1) + [dim]
        self.rnns = nn.ModuleList(nn.LSTM(i, o) for i, o in zip(sizes[:-1], sizes[1:], strict=True))
        self.drop = LockedDropout(dropout)
        self.decoder = nn.Linear(dim, WORDS)
        nn.init.uniform_(self.embed.weight, -0.1, 0.1)
        self.decoder.weight = self.embed.weight

    def forward(self, words, hidden=None):
        """Returns the scores, the new hidden states, and the last output before and after dropout."""
        x = self.drop(self.embed(words))
        states = []
        for i, rnn in enumerate(self.rnns):
            raw, state = rnn(x, None if hidden is None else hidden[i])
            states.append(state)
            x = self.drop(raw)
        return self.decoder(x), states, {"raw": raw, "dropped": x}


def detach(hidden):
    return [tuple(h.detach() for h in state) for state in hidden]


def stream(n, columns, seed):
    """A walk over the words: each one is followed by one of three others."""
    generator = torch.Generator().manual_seed(seed)
    follow = torch.randint(0, WORDS, (WORDS, 3), generator=torch.Generator().manual_seed(1))
    walk = [torch.randint(0, WORDS, (columns,), generator=generator)]
    for _ in range(n - 1):
        walk.append(follow[walk[-1], torch.randint(0, 3, (columns,), generator=generator)])
    return torch.stack(walk)


def make_optimizer(model, args):
    params = model.parameters()
    if args.orig_params:
        named = list(model.named_parameters())
        params = [
            {"params": [q for n, q in named if "bias" in n], "weight_decay": 0.0},
            {"params": [q for n, q in named if "bias" not in n]},
        ]
    return {
        "sgd": lambda: torch.optim.SGD(params, lr=4.0, weight_decay=1.2e-6, foreach=args.foreach),
        "adagrad": lambda: torch.optim.Adagrad(params, lr=0.05, lr_decay=0.01, foreach=args.foreach),
        "rmsprop": lambda: torch.optim.RMSprop(params, lr=3e-3, centered=True, momentum=0.5, foreach=args.foreach),
        "radam": lambda: torch.optim.RAdam(params, lr=1e-2, foreach=args.foreach),
        "lbfgs": lambda: torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=5),
    }[args.optimizer]()


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    total, hidden = 0.0, None
    for i in range(0, len(data) - 1, 10):
        piece = data[i : i + 11]
        logits, hidden, _ = model(piece[:-1], hidden)
        total += F.cross_entropy(logits.float().flatten(0, 1), piece[1:].flatten(), reduction="sum").item()
    model.train()
    return total / data[1:].numel()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=8)
    p.add_argument("--strategy", default="FULL_SHARD")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--orig-params", action="store_true")
    p.add_argument("--ignore-embedding", action="store_true", help="leave the shared weight out of the shards")
    p.add_argument("--optimizer", default="sgd")
    p.add_argument("--foreach", action="store_true")
    p.add_argument("--average-from", type=int, help="the step at which averaged SGD takes over")
    p.add_argument("--dropout", type=float, default=0.2)
    p.add_argument("--clip", type=float, default=0.25)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = LanguageModel(dropout=args.dropout)
    shared = model.embed.weight
    policy = ModuleWrapPolicy({nn.LSTM})
    if args.strategy == "SHARD_GRAD_OP":
        policy = lambda module, recurse, nonwrapped_numel: lambda_auto_wrap_policy(  # noqa: E731
            module, recurse, nonwrapped_numel, lambda_fn=lambda m: isinstance(m, nn.LSTM)
        )
    model = FSDP(
        model,
        device_id=torch.device("cpu"),
        sharding_strategy=getattr(fsdp.ShardingStrategy, args.strategy),
        mixed_precision=fsdp.MixedPrecision(torch.bfloat16, torch.float32, torch.float32) if args.bf16 else None,
        auto_wrap_policy=policy,
        use_orig_params=args.orig_params,
        ignored_states=[shared] if args.ignore_embedding else None,
        limit_all_gathers=False,
    )
    optimizer = make_optimizer(model, args)

    start, hidden = 0, None
    file = "{}/checkpoint/rank{}.pt"
    if args.load:
        saved = torch.load(file.format(args.load, rank), weights_only=False)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, hidden = saved["step"], saved["hidden"]

    train, valid = stream(200, 4, seed=20 + rank), stream(31, 6, seed=2)
    lengths = torch.randint(6, 14, (args.steps,), generator=torch.Generator().manual_seed(3)).tolist()
    place = sum(lengths[:start])
    torch.manual_seed(40 + rank)
    figures = {"loss": [], "grad_norm": [], "lr": [], "valid": [], "closures": 0, "switched": None}
    for step in range(start, args.steps):
        if step == args.average_from:
            optimizer = torch.optim.ASGD(model.parameters(), lr=4.0, lambd=0.0, t0=0, weight_decay=1.2e-6)
            figures["switched"] = step
        n = lengths[step]
        source, target = train[place : place + n], train[place + 1 : place + n + 1]
        place += n
        old = [g["lr"] for g in optimizer.param_groups]
        for g in optimizer.param_groups:
            g["lr"] *= n / 10

        def closure():
            nonlocal kept, norm
            figures["closures"] += 1
            optimizer.zero_grad()
            logits, kept, outputs = model(source, hidden)
            loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
            activation = 2 * outputs["dropped"].float().pow(2).mean()
            slowness = (outputs["raw"][1:] - outputs["raw"][:-1]).float().pow(2).mean()
            (loss + activation + slowness).backward()
            if args.ignore_embedding:
                # FSDP does not look after this gradient.
                dist.all_reduce(shared.grad)
                shared.grad.div_(world)
            norm = model.clip_grad_norm_(args.clip)
            return loss.detach()

        kept = norm = None
        loss = optimizer.step(closure)
        hidden = detach(kept)
        figures["lr"].append([g["lr"] for g in optimizer.param_groups])
        for g, lr in zip(optimizer.param_groups, old, strict=True):
            g["lr"] = lr
        dist.all_reduce(loss)
        figures["loss"].append(loss.item() / world)
        figures["grad_norm"].append(norm.item())
        if step % 2:
            figures["valid"].append(evaluate(model, valid))

    if args.save:
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            saved = {"model": model.state_dict()}
        saved.update(optimizer=optimizer.state_dict(), step=args.steps, hidden=hidden)
        os.makedirs(f"{args.out}/checkpoint", exist_ok=True)
        torch.save(saved, file.format(args.out, rank))
        figures["local_state"] = {k: list(v.shape) for k, v in saved["model"].items()}
    if figures["switched"] is not None:
        # Look at the average, then put the weights back.
        now = [q.detach().clone() for q in model.parameters()]
        with torch.no_grad():
            for q in model.parameters():
                q.copy_(optimizer.state[q]["ax"])
        figures["valid_of_average"] = evaluate(model, valid)
        with torch.no_grad():
            for q, back in zip(model.parameters(), now, strict=True):
                q.copy_(back)
        figures["valid_put_back"] = evaluate(model, valid)
    figures["shapes"] = {n: list(q.shape) for n, q in model.named_parameters()}
    with FSDP.summon_full_params(model, rank0_only=True, writeback=False, offload_to_cpu=False):
        if rank == 0:
            root = model.module
            figures["still_tied"] = root.decoder.weight is root.embed.weight
            figures["lstm"] = [list(w.shape) for w in root.rnns[0].all_weights[0]]
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        weights = model.state_dict()
        optim = {"state": {}} if args.optimizer == "lbfgs" else FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        os.makedirs(args.out, exist_ok=True)
        save_file({k: v.clone() for k, v in weights.items()}, f"{args.out}/params.safetensors")
        if optim["state"]:
            flat = {f"{k}/{n}": torch.as_tensor(v).clone() for n, s in optim["state"].items() for k, v in s.items()}
            save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

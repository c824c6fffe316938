"""A captioner for pictures and sound with fully_shard: modalities that are missing on some ranks and a chunked loss."""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

VOCAB, DIM, TEXT, PREFIX, PAD = 203, 40, 20, 3, 0


@dataclass
class CaptionerOutput:
    hidden: torch.Tensor
    prefix: torch.Tensor
    alignment: torch.Tensor


class Attention(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x, context=None, *, causal=False):
        context = x if context is None else context
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (self.q(x), *self.kv(context).chunk(2, dim=-1))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.causal = causal
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, 3 * DIM), nn.Linear(3 * DIM, DIM)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x):
        x = x + self.attention(self.norm1(x), causal=self.causal)
        return x + self.scale * self.down(F.gelu(self.up(self.norm2(x))))


class Perceiver(nn.Module):
    """Turns whatever there is, pictures and sound or neither, into a prefix of fixed length."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(PREFIX, DIM) * 0.2)
        self.patches = nn.Conv2d(3, DIM, 4, stride=4)
        self.frames = nn.Conv1d(5, DIM, 5, stride=3)
        self.missing = nn.Embedding(2, DIM)
        self.resample = Attention()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, *, batch, pictures=None, sound=None):
        x = self.queries.expand(batch, -1, -1)
        found = {}
        for i, (name, data) in enumerate({"pictures": pictures, "sound": sound}.items()):
            if data is None:
                x = x + self.missing.weight[i]
                found[name] = F.normalize(self.missing.weight[i].expand(batch, -1), dim=-1)
                continue
            tokens = (self.patches(data) if name == "pictures" else self.frames(data)).flatten(2).transpose(1, 2)
            x = x + self.resample(self.norm(x), tokens)  # the same resampler for both
            found[name] = F.normalize(tokens.mean(1), dim=-1)
        return x, found


class Captioner(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.perceiver = Perceiver()
        self.embed = nn.Embedding(VOCAB, DIM, padding_idx=PAD)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(depth))
        self.norm = nn.RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.temperature = nn.Parameter(torch.tensor([math.log(5.0)]))
        self.register_buffer("positions", torch.randn(TEXT + PREFIX, DIM) * 0.1)

    def forward(self, *, ids, pictures=None, sound=None):
        prefix, found = self.perceiver(batch=len(ids), pictures=pictures, sound=sound)
        x = torch.cat([prefix, self.embed(ids)], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        # Computed on every rank so that the backward has the same outputs everywhere; it counts where both are there.
        scores = self.temperature.exp() * found["pictures"] @ found["sound"].T
        both = float(pictures is not None and sound is not None)
        alignment = both * F.cross_entropy(scores.float(), torch.arange(len(ids)))
        return CaptionerOutput(self.norm(x)[:, PREFIX:], prefix, alignment)


class CountingAllGather:
    """An all-gather of our own: allocates its buffers and counts the calls."""

    def __init__(self):
        self.calls = 0

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


def batch(step, rank):
    rng = torch.Generator().manual_seed(100 * step + rank)
    kind = torch.randint(0, 7, (4, 1), generator=rng)
    ids = (kind * 11 + (kind + 2) * torch.arange(TEXT + 1)) % (VOCAB - 1) + 1
    lengths = torch.randint(TEXT // 2, TEXT + 2, (4, 1), generator=rng)
    ids = torch.where(torch.arange(TEXT + 1) < lengths, ids, PAD)
    pictures = torch.randn(4, 3, 16, 16, generator=rng) + kind[:, :, None, None]
    sound = torch.randn(4, 5, 32, generator=rng) * 0.5 + kind[:, :, None]
    mode = (step + rank) % 4  # 0: both, 1: pictures, 2: sound, 3: text alone
    return ids, pictures if mode in (0, 1) else None, sound if mode in (0, 2) else None


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=7)
    p.add_argument("--chunks", type=int, default=4)
    p.add_argument("--loss", choices=["one-backward", "backward-per-chunk", "checkpoint"], default="one-backward")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--output-fp32", action="store_true")
    p.add_argument("--hsdp", action="store_true")
    p.add_argument("--separate-group", action="store_true")
    p.add_argument("--custom-comm", action="store_true")
    p.add_argument("--recover", action="store_true", help="a broken batch raises in the forward of step 2")
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape, names = ((world // 2, 2), ("replicate", "shard")) if args.hsdp else ((world,), ("shard",))
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)

    torch.manual_seed(7)
    model = Captioner()
    policy = fsdp.MixedPrecisionPolicy()
    if args.bf16:
        out_dtype = torch.float32 if args.output_fp32 else None
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=out_dtype)
    options = {"mesh": mesh, "mp_policy": policy}
    fsdp.fully_shard(model.perceiver, **options)
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    fsdp.fully_shard([model.norm, model.head], **options, reshard_after_forward=False)
    fsdp.fully_shard(model, **options)
    # Which sensors there are differs from rank to rank; all ranks still have to reduce the same gradients.
    model.set_reduce_scatter_unused_params(True)
    model.set_modules_to_forward_prefetch([model.perceiver, model.blocks[0]])
    for left, right in zip(model.blocks, model.blocks[1:], strict=False):
        left.set_modules_to_forward_prefetch([right])
        right.set_modules_to_backward_prefetch([left])
    gather = CountingAllGather()
    if args.custom_comm:
        for block in model.blocks:
            block.set_custom_all_gather(gather)
    if args.separate_group:
        model.set_separate_reduce_scatter_group(True)
        model.set_reduce_scatter_max_input_buffers(2)
    seen = []
    if args.hsdp:
        # The hook sees the gradients of the last block right after they were reduced.
        model.blocks[-1].set_all_reduce_hook(lambda grad: seen.append(grad.norm().item()))

    decay = [q for q in model.parameters() if q.ndim > 1]
    rest = [q for q in model.parameters() if q.ndim == 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.NAdam(groups, lr=3e-3)
    start = 0
    if args.load:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=args.load / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        start = state["step"]

    def head_loss(hidden, labels, count):
        losses = F.cross_entropy(model.head(hidden).float().flatten(0, 1), labels.flatten(), ignore_index=PAD,
                                 reduction="sum")  # fmt: skip
        return losses / count

    def train_step(ids, pictures, sound):
        labels = ids[:, 1:]
        count = (labels != PAD).sum()
        output = model(ids=ids[:, :-1], pictures=pictures, sound=sound)
        extra = 1e-3 * output.prefix.float().square().mean() + 0.1 * output.alignment.float()
        pieces = list(zip(output.hidden.chunk(args.chunks, dim=1), labels.chunk(args.chunks, dim=1), strict=True))
        if args.loss == "backward-per-chunk":
            total, grads = torch.zeros(()), []
            model.set_is_last_backward(False)
            for hidden, target in pieces:
                leaf = hidden.detach().requires_grad_()
                loss = head_loss(leaf, target, count)
                loss.backward()
                grads.append(leaf.grad)
                total += loss.detach()
            model.set_is_last_backward(True)
            torch.autograd.backward([output.hidden, extra], [torch.cat(grads, 1), None])
            return total + extra.detach()
        if args.loss == "checkpoint":
            parts = [checkpoint(head_loss, hidden, target, count, use_reentrant=False) for hidden, target in pieces]
        else:
            parts = [head_loss(hidden, target, count) for hidden, target in pieces]
        loss = torch.stack(parts).sum() + extra
        loss.backward()
        return loss.detach()

    figures = {"losses": [], "grad_norms": [], "recovered": [], "temperature": []}
    for step in range(start, args.steps):
        ids, pictures, sound = batch(step, rank)
        if args.recover and step == 2:
            try:
                train_step(torch.full_like(ids, VOCAB), pictures, sound)
            except IndexError:
                figures["recovered"].append(step)
                model.reset_iter_state()
                optimizer.zero_grad()
        loss = train_step(ids, pictures, sound)
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        figures["losses"].append(loss.item() / world)
        figures["grad_norms"].append(norm.full_tensor().item())
        figures["temperature"].append(model.temperature.full_tensor().item())

    model.eval()
    with torch.no_grad():
        ids, pictures, sound = batch(500, 0)
        output = model(ids=ids[:, :-1], pictures=pictures, sound=sound)
        logits = model.head(output.hidden)
    # The head ran alone after the model, so its group still waits for the norm: put everything back in place.
    model.reset_iter_state()
    figures |= {"eval_tokens": logits.argmax(-1)[0].tolist(), "eval_dtype": str(logits.dtype), "seen": seen}
    figures |= {
        "gathers": gather.calls,
        "local_shapes": {n: list(q._local_tensor.shape) for n, q in model.named_parameters()},
    }
    if args.save:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": args.steps}
        dcp.save(state, checkpoint_id=args.out / "checkpoint")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    weights, moments = get_state_dict(model, optimizer, options=full)
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({k: v.contiguous() for k, v in weights.items()}, args.out / "params.safetensors")
        tensors = {k: v.contiguous() for k, v in moments.items() if isinstance(v, torch.Tensor)}
        save_file(tensors, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

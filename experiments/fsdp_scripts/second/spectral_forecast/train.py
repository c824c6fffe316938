"""A surrogate for a one-dimensional flow: convolutions, Fourier layers with complex weights, an LSTM over time."""

import argparse
import contextlib
import json
from collections import namedtuple
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

FIELDS, WIDTH, MODES, GRID, FRAMES = 3, 18, 5, 32, 6
Forecast = namedtuple("Forecast", ["next", "log_scale", "energy"])


class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH, MODES, dtype=torch.complex64) / WIDTH
        self.weight = nn.Parameter(
            weight.to(torch.complex128) if torch.get_default_dtype() is torch.float64 else weight
        )

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        kept = torch.einsum("bim,iom->bom", spectrum[..., :MODES], self.weight)
        return torch.fft.irfft(F.pad(kept, (0, spectrum.shape[-1] - MODES)), n=x.shape[-1])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fourier, self.skip = Fourier(), nn.Conv1d(WIDTH, WIDTH, 1)
        self.norm = nn.GroupNorm(3, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x + self.gain * F.gelu(self.norm(self.fourier(x) + self.skip(x)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(FIELDS, WIDTH, 3, padding=1), nn.Conv1d(WIDTH, WIDTH, 3, padding=1, stride=2)
        self.norm1, self.norm2 = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Squash(nn.Module):
    """A parametrization that keeps the readout's weights within a range."""

    def forward(self, weight):
        return 2 * torch.tanh(weight / 2)


class Surrogate(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.memory = nn.LSTM(WIDTH, 14, num_layers=2, batch_first=True, bidirectional=True, proj_size=5)
        self.decode = parametrizations.weight_norm(nn.ConvTranspose1d(WIDTH + 10, WIDTH, 2, stride=2))
        self.readout = nn.Conv1d(WIDTH, FIELDS, 1)
        parametrize.register_parametrization(self.readout, "weight", Squash())
        self.coarse = nn.Linear(WIDTH, FIELDS)
        self.log_scale = nn.Parameter(torch.zeros(FIELDS))
        self.offload = False

    def forward(self, frames, *, coarse=False):
        batch, steps = frames.shape[:2]
        x = self.encoder(frames.flatten(0, 1))
        saver = torch.autograd.graph.save_on_cpu() if self.offload else contextlib.nullcontext()
        with saver:
            for layer in self.layers:
                x = layer(x)
        x = x.view(batch, steps, WIDTH, -1)
        memory, _ = self.memory(x.mean(-1))
        now = torch.cat([x[:, -1], memory[:, -1, :, None].expand(-1, -1, x.shape[-1])], 1)
        change = self.readout(F.gelu(self.decode(now)))
        if coarse:
            change = change + self.coarse(x[:, -1].mean(-1))[..., None]
        return Forecast(frames[:, -1] + change, self.log_scale.expand(batch, -1), change.square().mean())


def simulate(seed, batch, dtype):
    """Travelling and decaying waves in three coupled fields."""
    rng = torch.Generator().manual_seed(seed)
    amplitude, phase = torch.rand(2, batch, 1, FIELDS, 1, generator=rng, dtype=dtype)
    wave = torch.randint(1, 4, (batch, 1, FIELDS, 1), generator=rng)
    time = torch.arange(FRAMES + 1, dtype=dtype).view(1, -1, 1, 1)
    space = torch.arange(GRID, dtype=dtype) * 2 * torch.pi / GRID
    fields = amplitude * torch.exp(-0.05 * wave * time) * torch.sin(wave * space - 0.4 * time + 6 * phase)
    fields = fields + 0.1 * fields.roll(1, dims=2) ** 2
    return fields[:, :-1], fields[:, -1]


def make_optimizer(name, params):
    return {
        "rmsprop": lambda: torch.optim.RMSprop(params, lr=3e-3, centered=True, momentum=0.5, foreach=True),
        "adagrad": lambda: torch.optim.Adagrad(params, lr=2e-2, lr_decay=0.01),
        "radam": lambda: torch.optim.RAdam(params, lr=6e-3, weight_decay=0.01, decoupled_weight_decay=True),
        "adamax": lambda: torch.optim.Adamax(params, lr=6e-3, foreach=False),
        "amsgrad": lambda: torch.optim.Adam(params, lr=4e-3, amsgrad=True),
        "nesterov": lambda: torch.optim.SGD(params, lr=3e-2, momentum=0.9, nesterov=True),
    }[name]()


def shard(model, mesh, args):
    policy = MixedPrecisionPolicy()
    if args.reduce_fp64:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    options = {"mesh": mesh, "reshard_after_forward": args.reshard}
    for layer in model.layers:
        fully_shard(layer.fourier, **options)  # complex numbers are reduced apart from the real ones
        fully_shard(layer, mp_policy=policy, **options)
    for module in (model.encoder, model.memory, model.decode):
        fully_shard(module, mp_policy=policy, **options)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=7)
    p.add_argument("--optimizer", default="radam")
    p.add_argument("--float64", action="store_true")
    p.add_argument("--reduce-fp64", action="store_true")
    p.add_argument(
        "--reshard", type=lambda s: {"yes": True, "no": False}.get(s) if not s.isdigit() else int(s), default=True
    )
    p.add_argument("--save-on-cpu", action="store_true")
    p.add_argument("--recompute", action="store_true", help="recompute the whole model in the backward")
    p.add_argument("--clip-by-hook", type=float, help="clamp each gradient as soon as it is reduced")
    p.add_argument("--reload-on", type=int, help="read the checkpoint back on fewer ranks and evaluate there")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = torch.float64 if args.float64 else torch.float32
    torch.set_default_dtype(dtype)

    torch.manual_seed(13)
    model = Surrogate()
    shard(model, init_device_mesh("cpu", (world,)), args)
    model.offload = args.save_on_cpu
    params = [q for q in model.parameters() if q.requires_grad]
    counts = {"hooks": 0}
    if args.clip_by_hook:

        def clamp(param):
            counts["hooks"] += 1
            if not param.grad.is_complex():
                param.grad.to_local().clamp_(-args.clip_by_hook, args.clip_by_hook)

        for param in params:
            param.register_post_accumulate_grad_hook(clamp)
    optimizer = make_optimizer(args.optimizer, params)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    start = 0
    if args.load:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "plateau": plateau.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=args.load / "checkpoint")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        plateau.load_state_dict(state["plateau"])
        start = state["step"]

    def loss_of(net, seed, coarse=False):
        frames, target = simulate(seed, 4, dtype)
        frames.requires_grad_(args.recompute)
        if args.recompute:
            out = checkpoint(net, frames, coarse=coarse, use_reentrant=False)
        else:
            out = net(frames, coarse=coarse)
        scale = out.log_scale[..., None]
        return (((out.next - target) * torch.exp(-scale)).square() + 2 * scale).mean() + 0.01 * out.energy

    def gather_buffers():
        """Running statistics differ from rank to rank: go on with their mean."""
        for buffer in model.buffers():
            if buffer.is_floating_point():
                dist.all_reduce(buffer)
                buffer.div_(world)

    def evaluate(net, seed=5000):
        net.eval()
        with torch.no_grad():
            loss = loss_of(net, seed)
        net.train()
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return loss

    figures = {"losses": [], "grad_norms": [], "evaluations": [], "lr": [], "largest": []}
    for step in range(start, args.steps):
        loss = loss_of(model, step * world + rank, coarse=step % 3 == 2)
        loss.backward()
        grads = [q.grad for q in params if q.grad is not None]
        figures["grad_norms"].append(
            [len(grads), *(g.full_tensor().abs().square().sum().sqrt().item() for g in grads[:6])]
        )
        figures["largest"].append(model.memory.weight_hh_l0.grad.full_tensor().abs().max().item())
        optimizer.step()
        optimizer.zero_grad()
        gather_buffers()
        total = torch.stack([loss.detach(), evaluate(model, 5000 + rank)])
        dist.all_reduce(total)
        figures["losses"].append(total[0].item() / world)
        figures["evaluations"].append(total[1].item() / world)
        plateau.step(total[1].item() / world)
        figures["lr"].append(plateau.get_last_lr()[0])

    # How much does the forecast depend on each of the frames?
    frames, _ = simulate(6000, 4, dtype)
    frames.requires_grad_()
    model.eval()
    (sensitivity,) = torch.autograd.grad(model(frames).next.square().sum(), frames)
    figures["sensitivity"] = sensitivity.square().sum((0, 2, 3)).tolist()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.save or args.reload_on:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "plateau": plateau.state_dict(), "step": args.steps}
        dcp.save(state, checkpoint_id=args.out / "checkpoint")
    if args.reload_on:
        few = DeviceMesh("cpu", list(range(args.reload_on)))
        if rank < args.reload_on:
            torch.manual_seed(99)
            again = Surrogate()
            shard(again, few, args)
            state = {"model": get_model_state_dict(again)}
            dcp.load(state, checkpoint_id=args.out / "checkpoint", process_group=few.get_group())
            set_model_state_dict(again, state["model"])
            figures["reloaded"] = evaluate(again).item()
            figures["shapes_reloaded"] = {n: list(q.to_local().shape) for n, q in again.named_parameters()}
        dist.barrier()
    figures["shapes"] = {n: list(q.to_local().shape) for n, q in model.named_parameters()}
    figures |= counts
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=full)
    moments = get_optimizer_state_dict(model, optimizer, options=full)
    if rank == 0:
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        tensors = {k: (torch.view_as_real(v) if v.is_complex() else v).contiguous() for k, v in weights.items()}
        save_file(tensors, args.out / "params.safetensors")
        flat = {}
        for name, entry in moments["state"].items():
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    flat[f"{key}/{name}"] = (torch.view_as_real(value) if value.is_complex() else value).contiguous()
        save_file(flat, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

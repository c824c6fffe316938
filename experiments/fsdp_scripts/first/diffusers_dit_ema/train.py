"""Train a small diffusers DiT with fully_shard, with an exponential moving average kept as DTensor shards."""

import argparse
import copy
import dataclasses
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMScheduler, DiTTransformer2DModel
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

CLASSES, SIZE, CHANNELS = 5, 8, 3


def build():
    return DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        num_layers=3,
        norm_num_groups=1,
        sample_size=SIZE,
        patch_size=2,
        num_embeds_ada_norm=CLASSES,
    )


class ShardedEMA:
    """Moving average over the local shards: same placements as the parameters, no communication."""

    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model, step):
        decay = min(self.decay, (1 + step) / (10 + step))
        for n, p in model.named_parameters():
            self.shadow[n].lerp_(p.detach(), 1 - decay)

    @torch.no_grad()
    def swap(self, model):
        for n, p in model.named_parameters():
            kept = p.detach().clone()
            p.copy_(self.shadow[n])
            self.shadow[n].copy_(kept)


def images(seed, rows):
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (rows,), generator=rng)
    line = torch.linspace(-1, 1, SIZE)
    waves = torch.sin((labels[:, None, None] + 1) * (line[:, None] + line[None, :]) * 2)
    clean = waves[:, None].repeat(1, CHANNELS, 1, 1) + 0.05 * torch.randn(rows, CHANNELS, SIZE, SIZE, generator=rng)
    noise = torch.randn(clean.shape, generator=rng)
    times = torch.randint(0, 100, (rows,), generator=rng)
    return clean, labels, noise, times


def load_full_weights(model, reference):
    """Fill the sharded parameters with full tensors one by one."""
    full = reference.state_dict()
    sharded = {}
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            value = distribute_tensor(full[name], value.device_mesh, value.placements)
        else:
            value = full[name]
        sharded[name] = torch.nn.Parameter(value) if isinstance(value, DTensor) else value
    model.load_state_dict(sharded, assign=True)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--load-by", choices=["distribute", "broadcast", "direct"], default="distribute")
    p.add_argument("--bf16", action="store_true")
    p.add_argument("--output-fp32", action="store_true")
    p.add_argument("--no-cast-inputs", action="store_true")
    p.add_argument("--hsdp", action="store_true")
    p.add_argument("--reshard", choices=["default", "yes", "no"], default="default")
    p.add_argument("--checkpointing", action="store_true")
    p.add_argument("--freeze-embeddings", action="store_true")
    p.add_argument("--ignore-positions", action="store_true", help="leave the patch embedding out of the sharding")
    p.add_argument("--optimizer", choices=["adamw", "foreach", "fused", "sgd"], default="adamw")
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if args.hsdp:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(31)
    reference = build().eval()  # stands for the pretrained weights
    if args.load_by == "direct":
        model = copy.deepcopy(reference)
    else:
        with torch.device("meta"):
            model = build()
        buffers = dict(reference.named_buffers())
        for name, _ in list(model.named_buffers()):
            module, _, leaf = name.rpartition(".")
            model.get_submodule(module)._buffers[leaf] = buffers[name].clone()
    if args.freeze_embeddings:
        model.pos_embed.requires_grad_(False)
    if args.checkpointing:
        model.enable_gradient_checkpointing()
    policy = fsdp.MixedPrecisionPolicy()
    if args.bf16:
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            cast_forward_inputs=not args.no_cast_inputs,
        )
    options = {"mesh": mesh, "mp_policy": policy}
    if args.reshard != "default":
        options["reshard_after_forward"] = args.reshard == "yes"
    ignored = set(model.pos_embed.parameters()) if args.ignore_positions else set()
    for index, block in enumerate(model.transformer_blocks):
        # The model calls the embedding layers of its first block once more after the last block: keep them.
        fsdp.fully_shard(block, **(options | {"reshard_after_forward": False} if index == 0 else options))
    if args.output_fp32:
        options["mp_policy"] = dataclasses.replace(policy, output_dtype=torch.float32)
    fsdp.fully_shard(model, ignored_params=ignored, **options)
    if args.load_by == "broadcast":
        model.to_empty(device="cpu")
        for name, buffer in model.named_buffers():
            buffer.copy_(dict(reference.named_buffers())[name])
        how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, reference.state_dict() if rank == 0 else {}, options=how)
    elif args.load_by == "distribute":
        load_full_weights(model, reference)
        if args.freeze_embeddings:
            model.pos_embed.requires_grad_(False)

    trainable = [p for p in model.parameters() if p.requires_grad]
    if args.optimizer == "sgd":
        optimizer = torch.optim.SGD(trainable, lr=0.05, momentum=0.9, nesterov=True, foreach=False)
    else:
        chosen = {"foreach": True} if args.optimizer == "foreach" else {"fused": args.optimizer == "fused"}
        optimizer = torch.optim.AdamW(trainable, lr=2e-3, weight_decay=0.02, **chosen)
    ema = ShardedEMA(model, 0.9)
    noiser = DDPMScheduler(num_train_timesteps=100)
    start = 0
    if args.load:
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "ema": ema.shadow,
            "step": torch.zeros((), dtype=torch.long),
        }
        dcp.load(state, checkpoint_id=args.load / "checkpoint")
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        start = int(state["step"])

    input_dtype = torch.bfloat16 if args.no_cast_inputs else torch.float32

    def loss_of(seed, rows=4):
        clean, labels, noise, times = images(seed, rows)
        noisy = noiser.add_noise(clean, noise, times).to(input_dtype)
        out = model(noisy, timestep=times, class_labels=labels).sample
        return F.mse_loss(out.float(), noise)

    def validate():
        model.eval()
        with torch.no_grad():
            value = loss_of(70000 + rank, 8)
        dist.all_reduce(value)
        model.train()
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
        return value.item() / world

    figures = {"losses": [], "grad_norms": [], "validation": [], "ema_validation": []}
    model.train()
    for step in range(start, args.steps):
        # Same draws of the label dropout for every run of this step.
        torch.manual_seed(500 * step + rank)
        loss = loss_of(step * world + rank)
        loss.backward()
        grads = [q.grad for q in trainable if isinstance(q.grad, DTensor)]
        plain = [q.grad for q in trainable if q.grad is not None and not isinstance(q.grad, DTensor)]
        for grad in plain:
            dist.all_reduce(grad)
            grad.div_(world)
        total = torch.nn.utils.get_total_norm(grads).full_tensor()
        if plain:
            total = torch.stack([total, torch.nn.utils.get_total_norm(plain)]).norm()
        for grad in grads + plain:
            grad.mul_((args.clip / (total + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update(model, step)
        value = loss.detach().clone()
        dist.all_reduce(value)
        figures["losses"].append(value.item() / world)
        figures["grad_norms"].append(total.item())
        if step % 3 == 2:
            figures["validation"].append(validate())
            ema.swap(model)
            figures["ema_validation"].append(validate())
            ema.swap(model)

    if args.save:
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "ema": ema.shadow,
            "step": torch.tensor(args.steps),
        }
        dcp.save(state, checkpoint_id=args.out / "checkpoint")

    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=full)
    moments = get_optimizer_state_dict(model, optimizer, options=full).get("state", {})
    averages = {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in ema.shadow.items()}
    figures["ema_sums"] = {n: v.double().sum().item() for n, v in averages.items()}

    # Draw pictures from the average with a few DDIM steps.
    ema.swap(model)
    model.eval()
    sampler = DDIMScheduler(num_train_timesteps=100)
    sampler.set_timesteps(3)
    sample = torch.randn(2, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        for t in sampler.timesteps:
            out = model(sample.to(input_dtype), timestep=t.expand(2), class_labels=torch.tensor([0, 3])).sample
            sample = sampler.step(out.float(), t, sample).prev_sample
    figures["sample"] = sample.flatten()[:24].tolist()
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "figures.json").write_text(json.dumps(figures, indent=1))
        save_file({n: v.contiguous() for n, v in weights.items()}, args.out / "params.safetensors")
        flat = {f"{s}/{n}": t.contiguous() for n, d in moments.items() for s, t in d.items()}
        flat |= {f"ema/{n}": v.contiguous() for n, v in averages.items()}
        save_file(flat, args.out / "optimizer.safetensors")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Lightning's Trainer with ModelParallelStrategy: a small byte model with FSDP2 and tensor parallel layers."""

import argparse
import json
import os
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

VOCAB, SEQ, WIDTH, HEADS = 256, 32, 64, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wv = nn.Linear(WIDTH, WIDTH, bias=False)
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, WIDTH // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(L.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.model = None

    def configure_model(self):
        if self.model is not None:
            return
        if self.args.meta:
            with torch.device("meta"):
                self.model = Decoder()  # the strategy materializes with reset_parameters
        else:
            self.model = Decoder()
        tp_mesh, dp_mesh = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if tp_mesh.size() > 1:
            plan = {f"attention.{n}": ColwiseParallel() for n in ("wq", "wk", "wv")}
            plan |= {"attention.wo": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in self.model.blocks:
                parallelize_module(block, tp_mesh, plan)
        if self.args.ac:
            apply_activation_checkpointing(self.model, check_fn=lambda m: isinstance(m, Block))
        if dp_mesh.size() > 1:
            policy = MixedPrecisionPolicy()
            if self.args.mixed:
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options = {"mesh": dp_mesh, "mp_policy": policy, "reshard_after_forward": not self.args.no_reshard}
            for block in self.model.blocks:
                fully_shard(block, **options)
            fully_shard(self.model, **options)

    def loss(self, batch):
        ids = batch[0]
        return F.cross_entropy(self.model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        # The foreach kernels do not take parameters of two meshes at a time.
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, foreach=False)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=16)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if gradient_clip_val is not None:
            groups = {}  # by device mesh
            for p in self.parameters():
                groups.setdefault(getattr(p.grad, "device_mesh", None), []).append(p)
            norms = [nn.utils.get_total_norm([p.grad for p in group]) for group in groups.values()]
            norms = [n.full_tensor() if isinstance(n, DTensor) else n for n in norms]
            total = torch.linalg.vector_norm(torch.stack(norms))
            for group in groups.values():
                nn.utils.clip_grads_with_norm_(group, gradient_clip_val, total)
            self.grad_norms.append(total.item())


class Recorder(Callback):
    def __init__(self):
        self.figures = {"losses": [], "val_losses": [], "learning_rates": []}

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.figures["losses"].append(trainer.callback_metrics["train_loss"].item())
        self.figures["learning_rates"].append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer, module):
        self.figures["val_losses"].append(trainer.callback_metrics["val_loss"].item())


def loader(seed, count, shuffle):
    rng = torch.Generator().manual_seed(seed)
    period = torch.randint(2, 7, (count, 1), generator=rng)
    table = torch.randint(0, VOCAB, (count, 8), generator=rng)
    return DataLoader(TensorDataset(table.gather(1, torch.arange(SEQ + 1) % period)), batch_size=4, shuffle=shuffle)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out", type=Path)
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--tensor", type=int, default=1)
    p.add_argument("--meta", action="store_true")
    p.add_argument("--mixed", action="store_true")
    p.add_argument("--precision", default="32-true")
    p.add_argument("--no-reshard", action="store_true")
    p.add_argument("--ac", action="store_true")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--clip", type=float, default=None)
    p.add_argument("--single-file", action="store_true")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load", type=Path)
    args = p.parse_args()

    world = int(os.environ["WORLD_SIZE"])
    L.seed_everything(5, verbose=False)
    strategy = ModelParallelStrategy(
        data_parallel_size=world // args.tensor,
        tensor_parallel_size=args.tensor,
        save_distributed_checkpoint=not args.single_file,
    )
    recorder = Recorder()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        precision=args.precision,
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        val_check_interval=4,
        num_sanity_val_steps=0,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.out,
    )
    module = LanguageModel(args)
    module.grad_norms = recorder.figures["grad_norms"] = []
    checkpoint = str(args.load / "checkpoint" / "last.ckpt") if args.load else None
    trainer.fit(module, loader(1, 96 * world, True), loader(2, 16 * world, False), ckpt_path=checkpoint)
    if args.save:
        trainer.save_checkpoint(args.out / "checkpoint" / "last.ckpt")

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optim_state = get_state_dict(module.model, trainer.optimizers[0], options=options)
    recorder.figures["placements"] = {n: str(getattr(p, "placements", None)) for n, p in module.named_parameters()}
    if trainer.is_global_zero:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "figures.json").write_text(json.dumps(recorder.figures, indent=1))
        save_file({k: v.contiguous() for k, v in model_state.items()}, args.out / "params.safetensors")
        flat = {f"{s}/{n}": t.contiguous() for n, d in optim_state["state"].items() for s, t in d.items()}
        save_file(flat, args.out / "optimizer.safetensors")
    trainer.strategy.barrier()


if __name__ == "__main__":
    main()

"""A Lightning Trainer with FSDPStrategy on a small text classifier."""

import argparse
import json
import os
from contextlib import contextmanager

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import FSDPStrategy
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap
from torch.utils.data import DataLoader, TensorDataset

CUSTOM = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)


class CPUFSDPStrategy(FSDPStrategy):
    """FSDPStrategy on the CPU. Lightning refuses the exact class there, and hands FSDP no CPU device."""

    def fsdp_arguments(self):
        return {
            "cpu_offload": self.cpu_offload,
            "mixed_precision": self.mixed_precision_config,
            "sharding_strategy": self.sharding_strategy,
            "device_id": torch.device("cpu"),
            **self.kwargs,
        }

    def _setup_model(self, model):
        if not any(isinstance(m, FSDP) for m in model.modules()):
            model = FSDP(model, **self.fsdp_arguments())
        return super()._setup_model(model)

    @contextmanager
    def model_sharded_context(self):
        with enable_wrap(wrapper_cls=FSDP, **self.fsdp_arguments()):
            yield


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Net(nn.Module):
    def __init__(self, manual_wrap, dim=64, depth=3):
        super().__init__()
        self.embed = nn.Embedding(64, dim)
        blocks = [Block(dim, 4) for _ in range(depth)]
        self.blocks = nn.ModuleList([wrap(b) for b in blocks] if manual_wrap else blocks)
        self.head = nn.Linear(dim, 5)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


class Classifier(L.LightningModule):
    def __init__(self, manual_wrap=False, lr=3e-3):
        super().__init__()
        self.manual_wrap, self.lr, self.net = manual_wrap, lr, None
        self.seen = {"loss": [], "grad_norm": [], "lr": [], "val_loss": [], "val_accuracy": []}

    def configure_model(self):
        if self.net is not None:
            return
        torch.manual_seed(11)
        net = Net(self.manual_wrap)
        self.net = wrap(net) if self.manual_wrap else net

    def forward(self, tokens):
        return self.net(tokens)

    def training_step(self, batch, index):
        tokens, labels = batch
        loss = nn.functional.cross_entropy(self(tokens).float(), labels)
        self.seen["loss"].append(self.trainer.strategy.reduce(loss.detach()).item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.seen["lr"].append(optimizer.param_groups[0]["lr"])

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if gradient_clip_val is not None:
            root = self.net if self.manual_wrap else self.trainer.strategy.model
            norm = root.clip_grad_norm_(gradient_clip_val)
            self.seen["grad_norm"].append(norm.item())

    def validation_step(self, batch, index):
        tokens, labels = batch
        logits = self(tokens).float()
        self.log("val_loss", nn.functional.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", (logits.argmax(1) == labels).float().mean(), sync_dist=True)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            for name in ("val_loss", "val_accuracy"):
                self.seen[name].append(self.trainer.callback_metrics[name].item())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=self.lr, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data(n, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 64, (n, 16), generator=generator)
    return TensorDataset(tokens, (tokens[:, :4].sum(dim=1) // 30) % 5)


def clean(name):
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def main():
    p = argparse.ArgumentParser()
    p.add_argument("out")
    p.add_argument("--steps", type=int, default=6)
    p.add_argument("--sharding", default="FULL_SHARD")
    p.add_argument("--precision", default="32-true")
    p.add_argument("--custom-precision", action="store_true")
    p.add_argument("--wrap", choices=["policy", "manual", "none"], default="policy")
    p.add_argument("--activation-checkpointing", action="store_true")
    p.add_argument("--accumulate", type=int, default=1)
    p.add_argument("--clip", type=float)
    p.add_argument("--no-orig-params", action="store_true")
    p.add_argument("--save", action="store_true")
    p.add_argument("--load")
    args = p.parse_args()

    L.seed_everything(7, verbose=False)
    strategy = CPUFSDPStrategy(
        auto_wrap_policy=ModuleWrapPolicy({Block}) if args.wrap == "policy" else None,
        activation_checkpointing_policy={Block} if args.activation_checkpointing else None,
        sharding_strategy=args.sharding,
        mixed_precision=CUSTOM if args.custom_precision else None,
        state_dict_type="sharded",
        process_group_backend="gloo",
        use_orig_params=not args.no_orig_params,
    )
    callbacks = [LearningRateMonitor("step")]
    if args.save:
        folder = f"{args.out}/checkpoint"
        callbacks.append(
            ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=args.steps, save_top_k=-1)
        )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        precision=args.precision,
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=args.clip,
        callbacks=callbacks,
        logger=DummyLogger(),
        enable_checkpointing=args.save,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    model = Classifier(manual_wrap=args.wrap == "manual")
    train = DataLoader(data(96, 1), batch_size=8, shuffle=True)
    valid = DataLoader(data(32, 2), batch_size=8)
    resume = None
    if args.load:
        folder = f"{args.load}/checkpoint"
        resume = f"{folder}/{max(os.listdir(folder))}"
    trainer.fit(model, train, valid, ckpt_path=resume)

    figures = dict(model.seen, global_step=trainer.global_step)
    figures["dtypes"] = sorted({str(p.dtype) for p in trainer.strategy.model.parameters()})
    figures["units"] = [name for name, m in trainer.strategy.model.named_modules() if isinstance(m, FSDP)]
    if args.no_orig_params:
        optim = None
    else:
        optim = FSDP.full_optim_state_dict(trainer.strategy.model, trainer.optimizers[0])
    with FSDP.summon_full_params(trainer.strategy.model, writeback=False):
        weights = {clean(k): v.detach().clone() for k, v in trainer.strategy.model.named_parameters()}
    if trainer.is_global_zero:
        os.makedirs(args.out, exist_ok=True)
        save_file(
            weights,
            f"{args.out}/params.safetensors",
        )
        if optim:
            flat = {f"{k}/{name}": v.clone() for name, s in optim["state"].items() for k, v in s.items()}
            save_file(flat, f"{args.out}/optimizer.safetensors")
        with open(f"{args.out}/figures.json", "w") as f:
            json.dump(figures, f, indent=1)
    trainer.strategy.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

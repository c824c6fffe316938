"""Trains a tiny GPT-2 with levanter's Trainer on random tokens, with parameters and batch divided over all devices.

python train.py [--sharding fsdp|replicated] [--microbatch 2] [--policy mixed] [--no-padding] [--mistake]
"""

import argparse
import tempfile
from pathlib import Path

import haliax as hax
import jax
import jmp
import levanter
import numpy as np
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample
from levanter.optim import AdamConfig
from levanter.tracker.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.mesh import MeshConfig

parser = argparse.ArgumentParser()
parser.add_argument("--sharding", choices=["fsdp", "replicated"], default="fsdp")
parser.add_argument("--policy", choices=["full", "mixed"], default="full", help="mixed: layers compute in bfloat16.")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument(
    "--microbatch", type=int, default=-1, help="Samples of a device and microbatch. -1: one microbatch."
)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--no-padding", dest="padding", action="store_false", help="All texts have one length.")
parser.add_argument("--mistake", action="store_true", help="Leave padding in the loss: ignore_id is not stated.")
options = parser.parse_args()

VOCABULARY, LENGTH, PADDING = 64, 16, 0


def texts(pos: hax.Axis) -> list[LmExample]:
    """Random tokens, padded to one length."""
    random = np.random.default_rng(0)
    found = []
    for _ in range(options.steps * options.batch):
        tokens = random.integers(1, VOCABULARY, size=LENGTH, dtype=np.int32)
        length = random.integers(LENGTH // 2, LENGTH + 1)
        if options.padding:
            tokens[length:] = PADDING
        ignored = None if options.mistake else PADDING
        found.append(LmExample.causal(hax.named(tokens, pos), ignore_id=ignored))
    return found


def main() -> None:
    folder = tempfile.mkdtemp()
    config = TrainerConfig(
        id="tiny",
        seed=0,
        mp=jmp.get_policy("f32" if options.policy == "full" else "params=float32,compute=bfloat16,output=float32"),
        tracker=NoopConfig(),
        mesh=MeshConfig(param_mapping={"embed": "data"} if options.sharding == "fsdp" else {}),
        train_batch_size=options.batch,
        per_device_parallelism=options.microbatch,
        num_train_steps=options.steps,
        checkpointer=CheckpointerConfig(base_path=f"{folder}/checkpoints"),
        log_dir=Path(folder) / "logs",
        require_accelerator=False,
    )
    levanter.initialize(config)
    model_config = Gpt2Config(max_seq_len=LENGTH, hidden_dim=32, num_layers=2, num_heads=4)
    data = ListAsyncDataset(texts(model_config.max_Pos))
    optimizer = AdamConfig(learning_rate=3e-3, weight_decay=0.1, warmup=1).build(options.steps)

    def loss_fn(model, example: LmExample, *, key=None):
        return model.compute_next_token_loss(example, key=key)

    with Trainer(config, optimizer, loss_fn) as trainer:
        model_key, training_key = jax.random.split(jax.random.PRNGKey(0))
        vocab = hax.Axis("vocab", VOCABULARY)
        state = trainer.initial_state(training_key, model_init=lambda: model_config.build(vocab, key=model_key))
        info = trainer.train(state, trainer.data_loader(data))
        print(f"loss {info.loss:.4f}")


if __name__ == "__main__":
    main()

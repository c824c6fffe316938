"""Fine-tunes LoRA adapters of a small decoder of flax.nnx with the PeftTrainer of Tunix.

python train.py [--loop own] [--loss own [--mistake]] [--even [--accumulate 2]] [--full] [--resume]

Texts have a prompt, an answer and padding. The loss is that of the answers; attention is to prompts and answers. Batches are
divided over all devices. With --mistake, the loss function of our own has the mask of the inputs instead of that of the
targets: the first token of an answer is not learned, and the first token of the padding is.
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tunix.sft import utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--batch", type=int, default=8, help="Texts of a step.")
parser.add_argument("--accumulate", type=int, default=1, help="Microbatches of a step.")
parser.add_argument("--loop", choices=["trainer", "own"], default="trainer")
parser.add_argument(
    "--loss", choices=["default", "own"], default="default", help="The loss function of Tunix, or one of ours."
)
parser.add_argument("--even", action="store_true", help="All answers have the same number of tokens.")
parser.add_argument(
    "--resume", action="store_true", help="Go on from a checkpoint with a new trainer after three steps."
)
parser.add_argument("--full", action="store_true", help="Train all weights, without adapters.")
parser.add_argument("--mistake", action="store_true", help="The mask of the loss is not shifted; --loss own.")
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS, RANK, PAD = 48, 16, 32, 4, 2, 4, 0


def linear(inputs, outputs, rngs):
    if args.full:
        return nnx.Linear(inputs, outputs, use_bias=False, rngs=rngs)
    return nnx.LoRALinear(inputs, outputs, lora_rank=RANK, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm0 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = linear(WIDTH, 3 * WIDTH, rngs)
        self.out = linear(WIDTH, WIDTH, rngs)
        self.norm1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = linear(WIDTH, 2 * WIDTH, rngs)
        self.down = linear(2 * WIDTH, WIDTH, rngs)

    def __call__(self, x, mask):
        qkv = self.qkv(self.norm0(x)).reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
        q, k, v = jnp.moveaxis(qkv, 2, 0)
        x = x + self.out(nnx.dot_product_attention(q, k, v, mask=mask[:, None]).reshape(x.shape))
        return x + self.down(nnx.silu(self.up(self.norm1(x))))


class Decoder(nnx.Module):
    """As models of Tunix: (tokens, positions, cache, mask) to (logits, cache)."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens, positions, cache, mask):
        x = self.embed(tokens) + self.places(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x)), cache


def texts():
    """Batches of the steps: tokens, and a mask that is 1 at answers. In answers a token mostly follows from the one before."""
    random = np.random.default_rng(0)
    follower = random.permutation(np.arange(1, VOCABULARY))
    found = []
    for _ in range(args.steps):
        tokens = random.integers(1, VOCABULARY, size=(args.batch, LENGTH), dtype=np.int32)
        for i in range(LENGTH - 1):
            kept = random.random(args.batch) < 0.2
            tokens[:, i + 1] = np.where(kept, tokens[:, i + 1], follower[tokens[:, i] - 1])
        places = np.arange(LENGTH)
        begin = random.integers(2, 5, size=(args.batch, 1))
        end = begin + 8 if args.even else random.integers(8, LENGTH, size=(args.batch, 1))
        tokens = np.where(places < end, tokens, PAD).astype(np.int32)
        found.append(TrainingInput(input_tokens=tokens, input_mask=(places >= begin) & (places < end)))
    return found


def microbatches(batches):
    size = args.batch // args.accumulate
    return [
        jax.tree.map(lambda x, i=i: x[i * size : (i + 1) * size], x) for x in batches for i in range(args.accumulate)
    ]


def model_input(x):
    real = x.input_tokens != PAD
    return {
        "input_tokens": x.input_tokens,
        "input_mask": x.input_mask,
        "positions": utils.build_positions_from_mask(real),
        "attention_mask": utils.make_causal_attn_mask(real),
    }


def own_loss(model, input_tokens, input_mask, positions, attention_mask):
    logits, _ = model(input_tokens, positions, None, attention_mask)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], input_tokens[:, 1:])
    mask = input_mask[:, :-1] if args.mistake else input_mask[:, 1:]
    return (losses * mask).sum() / mask.sum()


def make_transformation():
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 2 * args.steps)
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, weight_decay=0.01))


def make_model(mesh):
    model = Decoder(nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
    return model


def train(model, batches, steps, directory=None):
    """Trains up to the step by the trainer, from the last checkpoint in the directory."""
    config = TrainingConfig(
        eval_every_n_steps=2,
        max_steps=steps,
        gradient_accumulation_steps=args.accumulate if args.accumulate > 1 else None,
        checkpoint_root_directory=directory,
        pbar_description=None,
    )
    trainer = PeftTrainer(model, make_transformation(), config).with_gen_model_input_fn(model_input)
    if args.loss == "own":
        trainer = trainer.with_loss_fn(own_loss)
    first = trainer.train_steps
    trainer.train(batches)
    for step, loss in enumerate(trainer.metrics_logger.get_metric_history("", "loss", "train"), first):
        print(f"step {step} loss {loss:.9g}")


def own_loop(model, batches, of_batch):
    kind = nnx.Param if args.full else nnx.LoRAParam
    optimizer = nnx.Optimizer(model, make_transformation(), wrt=kind)

    @nnx.jit
    def train_step(model, optimizer, batch):
        inputs = model_input(batch)
        loss, grads = nnx.value_and_grad(own_loss, argnums=nnx.DiffState(0, kind))(model, **inputs)
        optimizer.update(model, grads)
        return loss

    for step, batch in enumerate(batches):
        loss = train_step(model, optimizer, jax.device_put(batch, of_batch))
        print(f"step {step} loss {loss:.9g}")


def main():
    mesh = Mesh(np.array(jax.devices()), ("fsdp",))
    batches = microbatches(texts())
    model = make_model(mesh)
    with mesh:
        if args.loop == "own":
            own_loop(model, batches, NamedSharding(mesh, P("fsdp")))
        elif args.resume:
            with tempfile.TemporaryDirectory() as directory:
                train(model, batches, args.steps // 2, directory)
                model = make_model(mesh)
                train(model, batches, args.steps, directory)
        else:
            train(model, batches, args.steps)
    params = nnx.state(model, nnx.Param if args.full else nnx.LoRAParam)
    print(f"norm of the trained parameters {optax.global_norm(nnx.to_pure_dict(params)):.9g}")
    return nnx.to_pure_dict(params)


if __name__ == "__main__":
    main()

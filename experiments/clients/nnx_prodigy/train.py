"""Trains a decoder of flax.nnx, whose layers nnx.scan applies, with the Prodigy optimizer of optax.contrib and dropout.

python train.py [--style functional [--donate] [--mistake]] [--unrolled] [--remat]

Batches are sharded over all devices by NamedSharding, and parameters are replicated. With --mistake the functional style drops
the state of the random streams that a step returns, so that each step has the masks of the first one.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=8, help="Samples of all devices.")
parser.add_argument(
    "--style", choices=["objects", "functional"], default="objects", help="nnx.jit, or split and jax.jit."
)
parser.add_argument("--unrolled", action="store_true", help="A loop of Python over layers instead of nnx.scan.")
parser.add_argument("--remat", action="store_true", help="Compute layers again in backward.")
parser.add_argument("--donate", action="store_true", help="Donate the state to the functional step.")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument(
    "--mistake", action="store_true", help="Functional style: keep the first state of the random streams."
)
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 12, 32, 4, 2


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(args.dropout, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(self.mlp_norm(x)))))


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, WIDTH)))

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return Block(rngs)

        self.blocks = stack(rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]

        def forward(block, x):
            return block(x)

        if args.remat:
            forward = nnx.remat(forward)
        if args.unrolled:
            graphdef, state = nnx.split(self.blocks)
            states = []
            for i in range(LAYERS):
                block = nnx.merge(graphdef, jax.tree.map(lambda leaf, i=i: leaf[i], state))
                x = forward(block, x)
                states.append(nnx.state(block))
            nnx.update(self.blocks, jax.tree.map(lambda *leaves: jnp.stack(leaves), *states))
        else:
            x = nnx.scan(lambda x, block: forward(block, x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.embed.attend(self.norm(x))


def loss_fn(model, tokens):
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def step_of_objects(model, optimizer, tokens):
    loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
    optimizer.update(model, grads)
    return loss


def functional_step(tx, graphdef):
    def step(params, rest, opt_state, tokens):
        def loss_of(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            loss = loss_fn(model, tokens)
            return loss, nnx.state(model, nnx.Not(nnx.Param))

        (loss, rest_after), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest_after, opt_state, loss

    return step


def batches(sharding: NamedSharding) -> list[jax.Array]:
    random = np.random.default_rng(0)
    steps = random.integers(1, 4, size=(args.steps, args.batch, LENGTH + 1))
    return [jax.device_put(jnp.asarray(x, jnp.int32), sharding) for x in np.cumsum(steps, axis=2) % VOCABULARY]


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    data = batches(NamedSharding(mesh, P("data")))
    model = nnx.jit(lambda: Decoder(nnx.Rngs(params=0, dropout=1)))()
    replicated = NamedSharding(mesh, P())
    nnx.update(model, jax.device_put(nnx.state(model), replicated))
    schedule = optax.linear_schedule(1.0, 0.5, args.steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.prodigy(schedule, estim_lr0=1e-3, weight_decay=0.01))

    if args.style == "objects":
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step_fn = nnx.jit(step_of_objects)
        for step, tokens in enumerate(data):
            print(f"step {step} loss {step_fn(model, optimizer, tokens):.9g}")
        return nnx.state(model, nnx.Param)

    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    opt_state = jax.device_put(tx.init(params), replicated)
    opt_state = jax.tree.map(jnp.copy, opt_state)  # Prodigy keeps the first parameters, which are donated too
    step_fn = jax.jit(functional_step(tx, graphdef), donate_argnums=(0, 2) if args.donate else ())
    for step, tokens in enumerate(data):
        params, rest_after, opt_state, loss = step_fn(params, rest, opt_state, tokens)
        if not args.mistake:
            rest = rest_after
        print(f"step {step} loss {loss:.9g}")
    return params


if __name__ == "__main__":
    main()

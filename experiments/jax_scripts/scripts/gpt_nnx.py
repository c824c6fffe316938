"""A small GPT in nnx: nnx.jit, an optimizer that accumulates over two batches, metrics, evaluation in between."""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCAB, WIDTH, LENGTH = 27, 16, 10


class TransformerBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.mha = nnx.MultiHeadAttention(num_heads=2, in_features=WIDTH, decode=False, rngs=rngs)
        self.dropout1 = nnx.Dropout(0.1, rngs=rngs)
        self.layer_norm1 = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)
        self.linear1 = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.linear2 = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.layer_norm2 = nnx.LayerNorm(WIDTH, epsilon=1e-6, rngs=rngs)

    def __call__(self, inputs):
        mask = nnx.make_causal_mask(jnp.ones(inputs.shape[:2]))
        out1 = self.layer_norm1(inputs + self.dropout1(self.mha(inputs, mask=mask)))
        return self.layer_norm2(out1 + self.linear2(nnx.relu(self.linear1(out1))))


class MiniGPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.token_emb = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.pos_emb = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([TransformerBlock(rngs) for _ in range(2)])
        self.output_layer = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, inputs):
        x = self.token_emb(inputs) + self.pos_emb(jnp.arange(inputs.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return self.output_layer(x)


def loss_fn(model, batch):
    logits = model(batch[0])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits=logits, labels=batch[1]).mean()
    return loss, logits


@nnx.jit
def train_step(model: MiniGPT, optimizer: nnx.Optimizer, metrics: nnx.MultiMetric, batch):
    grad_fn = nnx.value_and_grad(loss_fn, has_aux=True)
    (loss, logits), grads = grad_fn(model, batch)
    metrics.update(loss=loss, logits=logits, lables=batch[1])
    optimizer.update(model, grads)
    return loss


@nnx.jit
def eval_step(model, batch):
    return loss_fn(model, batch)[0]


def main():
    model = MiniGPT(rngs=nnx.Rngs(0))
    tx = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), every_k_schedule=2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    rng = np.random.default_rng(0)
    text = rng.integers(VOCAB, size=(10, 4, LENGTH + 1)).astype(np.int32)
    for step in range(8):
        batch = (jnp.array(text[step, :, :-1]), jnp.array(text[step, :, 1:]))
        loss = train_step(model, optimizer, metrics, batch)
        print(f"step {step} loss {float(loss)}")
        if (step + 1) % 4 == 0:
            model.eval()
            print(
                "test",
                float(eval_step(model, (text[8, :, :-1], text[8, :, 1:]))),
                "mean",
                float(metrics.compute()["loss"]),
            )
            metrics.reset()
            model.train()


if __name__ == "__main__":
    main()

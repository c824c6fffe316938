"""Classifies padded texts with a Transformer on Keras' JAX backend: fit, train_on_batch, or the loop of its guide.

python train.py [--loop fit|batches|guide] [--eager] [--batch 8] [--accumulate 2] [--dropout 0] [--average]
    [--schedule constant] [--mistake]
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from keras import layers, ops

parser = argparse.ArgumentParser()
parser.add_argument("--loop", choices=["fit", "batches", "guide"], default="fit")
parser.add_argument("--eager", action="store_true", help="Run steps without jax.jit.")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1, help="Batches per optimizer step.")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--schedule", choices=["cosine", "constant"], default="cosine")
parser.add_argument("--average", action="store_true", help="Evaluate an exponential moving average of the weights.")
parser.add_argument(
    "--mistake",
    action="store_true",
    help="Start each epoch of the guide's loop with the optimizer's initial variables.",
)
args = parser.parse_args()

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS, CLASSES = 40, 12, 16, 2, 2, 5
TEXTS = 24


class TokenAndPositionEmbedding(layers.Layer):
    """Embeds tokens and positions. Token 0 is padding."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.tokens = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True)
        self.positions = layers.Embedding(LENGTH, WIDTH)

    def compute_mask(self, inputs, mask=None):
        return self.tokens.compute_mask(inputs)

    def call(self, inputs):
        return self.tokens(inputs) + self.positions(ops.arange(LENGTH))


class TransformerBlock(layers.Layer):
    """Self-attention and two dense layers, each with a residual connection and a norm before it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.attention_norm = layers.LayerNormalization(epsilon=1e-6)
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, kernel_initializer="orthogonal")
        self.dense_norm = layers.LayerNormalization(epsilon=1e-6)
        self.feed_forward = keras.Sequential([layers.Dense(2 * WIDTH, activation="gelu"), layers.Dense(WIDTH)])

    def build(self, input_shape):
        self.attention_norm.build(input_shape)
        self.attention.build(input_shape, input_shape)
        self.dense_norm.build(input_shape)
        self.feed_forward.build(input_shape)

    def call(self, inputs, mask=None):
        # A key that is padding gets no attention.
        attention_mask = None if mask is None else mask[:, None, :]
        x = self.attention_norm(inputs)
        inputs = inputs + self.attention(x, x, attention_mask=attention_mask)
        return inputs + self.feed_forward(self.dense_norm(inputs))


class Classifier(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.embedding = TokenAndPositionEmbedding()
        self.blocks = [TransformerBlock() for _ in range(BLOCKS)]
        self.norm = layers.LayerNormalization(epsilon=1e-6)
        self.pooling = layers.GlobalAveragePooling1D()
        self.dropout = layers.Dropout(args.dropout)
        self.head = layers.Dense(CLASSES)

    def call(self, inputs, training=None):
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(self.pooling(self.norm(x)), training=training))


def texts(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    tokens = random.integers(1, VOCABULARY, size=(size, LENGTH))
    lengths = random.integers(4, LENGTH + 1, size=(size, 1))
    return np.where(np.arange(LENGTH) < lengths, tokens, 0).astype("int32"), random.integers(CLASSES, size=size)


def batches(x: np.ndarray, y: np.ndarray):
    for first in range(0, len(x), args.batch):
        yield x[first : first + args.batch], y[first : first + args.batch]


def make_optimizer() -> keras.optimizers.Optimizer:
    steps = args.epochs * TEXTS // (args.batch * args.accumulate)
    schedule = keras.optimizers.schedules.CosineDecay(1e-3, steps, alpha=0.1, warmup_target=5e-3, warmup_steps=2)
    return keras.optimizers.AdamW(
        schedule if args.schedule == "cosine" else 3e-3,
        weight_decay=0.01,
        global_clipnorm=1.0,
        use_ema=args.average,
        ema_momentum=0.9,
        gradient_accumulation_steps=args.accumulate if args.accumulate > 1 else None,
    )


def train_as_in_guide(model: keras.Model, optimizer, loss_fn, x: np.ndarray, y: np.ndarray) -> None:
    """Trains with stateless calls of the model and of the optimizer, and assigns the results to their variables."""

    def loss_and_updates(trainable, non_trainable, tokens, labels):
        logits, non_trainable = model.stateless_call(trainable, non_trainable, tokens, training=True)
        return loss_fn(labels, logits), non_trainable

    grad_fn = jax.value_and_grad(loss_and_updates, has_aux=True)

    def train_step(state, tokens, labels):
        trainable, non_trainable, optimizer_variables = state
        (loss, non_trainable), grads = grad_fn(trainable, non_trainable, tokens, labels)
        trainable, optimizer_variables = optimizer.stateless_apply(optimizer_variables, grads, trainable)
        return loss, (trainable, non_trainable, optimizer_variables)

    if not args.eager:
        train_step = jax.jit(train_step)

    optimizer.build(model.trainable_variables)
    variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    state = tuple([variable.value for variable in group] for group in variables)
    for epoch in range(args.epochs):
        if args.mistake:
            state = (*state[:2], [variable.value for variable in optimizer.variables])
        for tokens, labels in batches(x, y):
            loss, state = train_step(state, tokens, labels)
            print(f"epoch {epoch} loss {float(loss):.7f}")
    for group, values in zip(variables, state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)


def main() -> None:
    keras.utils.set_random_seed(0)
    x, y = texts(TEXTS, seed=1)
    model = Classifier(name="classifier")
    model(x[: args.batch])
    optimizer = make_optimizer()
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss_fn, metrics=["accuracy"], run_eagerly=args.eager)

    if args.loop == "fit":
        model.fit(x, y, batch_size=args.batch, epochs=args.epochs, shuffle=False, verbose=2)
    elif args.loop == "batches":
        for epoch in range(args.epochs):
            model.reset_metrics()
            for tokens, labels in batches(x, y):
                loss, accuracy = model.train_on_batch(tokens, labels)
            print(f"epoch {epoch} loss {loss:.5f} accuracy {accuracy:.3f}")
    else:
        train_as_in_guide(model, optimizer, loss_fn, x, y)
    if args.loop != "fit":  # fit does this itself
        optimizer.finalize_variable_values(model.trainable_variables)

    loss, accuracy = model.evaluate(*texts(16, seed=2), batch_size=8, verbose=0)
    print(f"evaluation: loss {loss:.5f} accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

"""Trains a GAN on random images with Keras' JAX backend: stateless calls of two models and of two optimizers.

python train.py [--separate] [--eager] [--penalty 1.0] [--dropout 0] [--mistake]
"""

import argparse
import os
from typing import NamedTuple

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras
import numpy as np
from keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--separate", action="store_true", help="Compile one step for each model instead of one for both.")
parser.add_argument("--eager", action="store_true", help="Run steps without jax.jit.")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--dropout", type=float, default=0.3)
parser.add_argument("--penalty", type=float, default=0.0, help="Weight of the gradient penalty at real images.")
parser.add_argument(
    "--mistake", action="store_true", help="Do not return the discriminator's non-trainable variables from its step."
)
args = parser.parse_args()

SIZE, LATENT = 8, 6


class Discriminator(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.convolutions = [
            keras.Sequential(
                [
                    layers.Conv2D(filters, 3, strides=2, padding="same", kernel_initializer="orthogonal"),
                    layers.LeakyReLU(0.2),
                ]
            )
            for filters in (8, 16)
        ]
        self.flatten = layers.Flatten()
        self.dropout = layers.Dropout(args.dropout, name="dropout")
        self.head = layers.Dense(1, name="head")

    def call(self, inputs, training=None):
        x = inputs
        for convolution in self.convolutions:
            x = convolution(x, training=training)
        return self.head(self.dropout(self.flatten(x), training=training))


class Upsampling(layers.Layer):
    """Doubles the size of images: nearest neighbours, a convolution, and batch norm."""

    def __init__(self, filters: int, **kwargs):
        super().__init__(**kwargs)
        self.resize = layers.UpSampling2D(2)
        self.convolution = layers.Conv2D(filters, 3, padding="same", use_bias=False, kernel_initializer="orthogonal")
        self.norm = layers.BatchNormalization(momentum=0.8)

    def build(self, input_shape):
        resized = self.resize.compute_output_shape(input_shape)
        self.convolution.build(resized)
        self.norm.build(self.convolution.compute_output_shape(resized))

    def call(self, inputs, training=None):
        return keras.ops.relu(self.norm(self.convolution(self.resize(inputs)), training=training))


class Generator(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(2 * 2 * 16)
        self.reshape = layers.Reshape((2, 2, 16))
        self.upsamplings = [Upsampling(16), Upsampling(8)]
        self.image = layers.Conv2D(1, 3, padding="same", activation="tanh", kernel_initializer="orthogonal")

    def call(self, inputs, training=None):
        x = self.reshape(self.dense(inputs))
        for upsampling in self.upsamplings:
            x = upsampling(x, training=training)
        return self.image(x)


class State(NamedTuple):
    """Values of the variables of a model and of its optimizer."""

    trainable: list[jax.Array]
    non_trainable: list[jax.Array]
    optimizer: list[jax.Array]


def samples(step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, and latent vectors for the discriminator's step and for the generator's."""
    random = np.random.default_rng(step)
    images = np.tanh(random.standard_normal((args.batch, SIZE, SIZE, 1), dtype="float32"))
    latents = random.standard_normal((2, args.batch, LATENT), dtype="float32")
    return images, latents[0], latents[1]


def variables_of(model: keras.Model, optimizer: keras.optimizers.Optimizer):
    return model.trainable_variables, model.non_trainable_variables, optimizer.variables


def state_of(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> State:
    optimizer.build(model.trainable_variables)
    return State(*([variable.value for variable in group] for group in variables_of(model, optimizer)))


def assign(model: keras.Model, optimizer: keras.optimizers.Optimizer, state: State) -> None:
    for group, values in zip(variables_of(model, optimizer), state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)


def main() -> None:
    keras.utils.set_random_seed(0)
    discriminator, generator = Discriminator(name="discriminator"), Generator(name="generator")
    discriminator(generator(samples(0)[1]))
    d_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5, clipnorm=1.0)
    schedule = keras.optimizers.schedules.ExponentialDecay(4e-3, decay_steps=4, decay_rate=0.5)
    g_optimizer = keras.optimizers.AdamW(schedule, beta_1=0.5, weight_decay=1e-3, use_ema=True, ema_momentum=0.9)
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def discriminator_loss(trainable, non_trainable, generated, images):
        """Label 1 is a real image."""
        logits, updated = discriminator.stateless_call(
            trainable, non_trainable, jnp.concatenate([images, generated]), training=True
        )
        labels = jnp.concatenate([jnp.ones((len(images), 1)), jnp.zeros((len(generated), 1))])
        loss = loss_fn(labels, logits)
        if args.penalty:

            def sum_of_logits(images):
                return discriminator.stateless_call(trainable, non_trainable, images, training=True)[0].sum()

            slopes = jax.grad(sum_of_logits)(images)
            loss += args.penalty * jnp.mean(jnp.sum(slopes**2, axis=(1, 2, 3)))
        return loss, updated

    def generator_loss(trainable, non_trainable, d, latents):
        images, updated = generator.stateless_call(trainable, non_trainable, latents, training=True)
        logits, d_updated = discriminator.stateless_call(d.trainable, d.non_trainable, images, training=True)
        return loss_fn(jnp.ones((len(images), 1)), logits), (updated, d_updated)

    def discriminator_step(d, g, images, latents):
        generated, g_non_trainable = generator.stateless_call(g.trainable, g.non_trainable, latents, training=True)
        (loss, non_trainable), grads = jax.value_and_grad(discriminator_loss, has_aux=True)(
            d.trainable, d.non_trainable, generated, images
        )
        if args.mistake:
            non_trainable = d.non_trainable
        trainable, optimizer = d_optimizer.stateless_apply(d.optimizer, grads, d.trainable)
        return loss, State(trainable, non_trainable, optimizer), g._replace(non_trainable=g_non_trainable)

    def generator_step(d, g, latents):
        (loss, (non_trainable, d_non_trainable)), grads = jax.value_and_grad(generator_loss, has_aux=True)(
            g.trainable, g.non_trainable, d, latents
        )
        trainable, optimizer = g_optimizer.stateless_apply(g.optimizer, grads, g.trainable)
        return loss, d._replace(non_trainable=d_non_trainable), State(trainable, non_trainable, optimizer)

    if args.separate and not args.eager:
        discriminator_step, generator_step = jax.jit(discriminator_step), jax.jit(generator_step)

    def train_step(d, g, images, d_latents, g_latents):
        d_loss, d, g = discriminator_step(d, g, images, d_latents)
        g_loss, d, g = generator_step(d, g, g_latents)
        return d_loss, g_loss, d, g

    if not args.separate and not args.eager:
        train_step = jax.jit(train_step)

    d, g = state_of(discriminator, d_optimizer), state_of(generator, g_optimizer)
    for step in range(args.steps):
        d_loss, g_loss, d, g = train_step(d, g, *samples(step))
        print(f"step {step} d_loss {float(d_loss):.7f} g_loss {float(g_loss):.7f}")

    assign(discriminator, d_optimizer, d)
    assign(generator, g_optimizer, g)
    g_optimizer.finalize_variable_values(generator.trainable_variables)  # those of the moving average
    generated = generator.predict(samples(1000)[1], verbose=0)
    print(f"generated: mean {generated.mean():.5f} deviation {generated.std():.5f}")


if __name__ == "__main__":
    main()

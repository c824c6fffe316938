"""Trains a DCGAN with Keras on its torch backend: a Model with two optimizers, or the loop of Keras' guide.

python train.py [--loop fit|guide] [--accumulate 2] [--dropout 0] [--optimizer adamw] [--mistake]
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from keras import layers, ops

parser = argparse.ArgumentParser()
parser.add_argument("--loop", choices=["fit", "guide"], default="fit")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1, help="Parts of a batch, accumulated.")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--optimizer", choices=["adam", "adamw"], default="adam", help="Discriminator's optimizer.")
parser.add_argument("--mistake", action="store_true", help="Do not zero gradients before the generator's backward.")
args = parser.parse_args()

SIZE, LATENT = 8, 6


class Discriminator(keras.Model):
    """Returns a logit for each image: positive if it is generated."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.convolutions = [layers.Conv2D(filters, 3, strides=2, padding="same") for filters in (8, 16)]
        self.activation = layers.LeakyReLU(negative_slope=0.2)
        self.flatten = layers.Flatten()
        self.dropout = layers.Dropout(args.dropout)
        self.head = layers.Dense(1)

    def call(self, inputs, training=None):
        x = inputs
        for convolution in self.convolutions:
            x = self.activation(convolution(x))
        return self.head(self.dropout(self.flatten(x), training=training))


class Generator(keras.Model):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.stem = keras.Sequential([layers.Dense(2 * 2 * 16), layers.Reshape((2, 2, 16))])
        self.norm = layers.GroupNormalization(4)
        self.upsamplings = [layers.Conv2DTranspose(filters, 4, strides=2, padding="same") for filters in (16, 8)]
        self.activation = layers.LeakyReLU(negative_slope=0.2)
        self.image = layers.Conv2D(1, 3, padding="same", activation="tanh")

    def call(self, inputs):
        x = self.norm(self.stem(inputs))
        for upsampling in self.upsamplings:
            x = self.activation(upsampling(x))
        return self.image(x)


class GAN(keras.Model):
    """A discriminator and a generator, each with an optimizer, that take turns in each step."""

    def __init__(self, discriminator: keras.Model, generator: keras.Model, **kwargs):
        super().__init__(**kwargs)
        self.discriminator = discriminator
        self.generator = generator
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.built = True

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def train_step(self, data):
        for images, latents in parts(data):
            generated = self.generator(latents[:, 0])
            logits = self.discriminator(ops.concatenate([generated, images]), training=True)
            self.zero_grad()
            d_loss = self.loss_fn(labels_for(generated, images), logits)
            d_loss.backward()
            weights = self.discriminator.trainable_weights
            grads = [weight.value.grad for weight in weights]
            with torch.no_grad():
                self.d_optimizer.apply(grads, weights)
            self.d_loss_tracker.update_state(d_loss)

        for images, latents in parts(data):
            logits = self.discriminator(self.generator(latents[:, 1]), training=True)
            if not args.mistake:
                self.zero_grad()
            # The generator descends where its images are taken for real ones.
            g_loss = self.loss_fn(ops.zeros((len(images), 1)), logits)
            g_loss.backward()
            weights = self.generator.trainable_weights
            grads = [weight.value.grad for weight in weights]
            with torch.no_grad():
                self.g_optimizer.apply(grads, weights)
            self.g_loss_tracker.update_state(g_loss)

        return {metric.name: metric.result() for metric in self.metrics}


def parts(data):
    return zip(*(torch.chunk(each, args.accumulate) for each in data), strict=True)


def labels_for(generated: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
    return ops.concatenate([ops.ones((len(generated), 1)), ops.zeros((len(images), 1))])


def samples(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images, and two latent vectors for each: one for the discriminator's step and one for the generator's."""
    random = np.random.default_rng(seed)
    images = np.tanh(random.standard_normal((size, SIZE, SIZE, 1), dtype="float32"))
    return images, random.standard_normal((size, 2, LATENT), dtype="float32")


def train_as_in_guide(discriminator, generator, d_optimizer, g_optimizer, loss_fn, images, latents) -> None:
    def train_step(data):
        for real, noise in parts(data):
            generated = generator(noise[:, 0])
            logits = discriminator(ops.concatenate([generated, real]), training=True)
            discriminator.zero_grad()
            d_loss = loss_fn(labels_for(generated, real), logits)
            d_loss.backward()
            grads = [weight.value.grad for weight in discriminator.trainable_weights]
            with torch.no_grad():
                d_optimizer.apply(grads, discriminator.trainable_weights)

        for real, noise in parts(data):
            logits = discriminator(generator(noise[:, 1]), training=True)
            if not args.mistake:
                generator.zero_grad()
            g_loss = loss_fn(ops.zeros((len(real), 1)), logits)
            g_loss.backward()
            grads = [weight.value.grad for weight in generator.trainable_weights]
            with torch.no_grad():
                g_optimizer.apply(grads, generator.trainable_weights)
        return d_loss, g_loss

    dataset = torch.utils.data.TensorDataset(torch.from_numpy(images), torch.from_numpy(latents))
    for epoch in range(args.epochs):
        for data in torch.utils.data.DataLoader(dataset, batch_size=args.batch):
            d_loss, g_loss = train_step(data)
        print(f"epoch {epoch} d_loss {d_loss.item():.5f} g_loss {g_loss.item():.5f}")


def main() -> None:
    keras.utils.set_random_seed(0)
    images, latents = samples(24, seed=1)
    discriminator, generator = Discriminator(name="discriminator"), Generator(name="generator")
    discriminator(generator(latents[:1, 0]))

    accumulate = args.accumulate if args.accumulate > 1 else None
    optimizer_class = keras.optimizers.AdamW if args.optimizer == "adamw" else keras.optimizers.Adam
    d_optimizer = optimizer_class(
        2e-3, beta_1=0.5, weight_decay=0.01, clipnorm=0.5, gradient_accumulation_steps=accumulate
    )
    g_optimizer = keras.optimizers.Adam(2e-3, beta_1=0.5, gradient_accumulation_steps=accumulate)
    loss_fn = keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1)

    if args.loop == "fit":
        gan = GAN(discriminator, generator)
        gan.compile(d_optimizer, g_optimizer, loss_fn)
        gan.fit(images, latents, batch_size=args.batch, epochs=args.epochs, shuffle=False, verbose=2)
    else:
        train_as_in_guide(discriminator, generator, d_optimizer, g_optimizer, loss_fn, images, latents)

    generated = generator.predict(samples(16, seed=2)[1][:, 0], verbose=0)
    print(f"generated: mean {generated.mean():.5f} deviation {generated.std():.5f}")


if __name__ == "__main__":
    main()

"""Classifies random images with Keras on its torch backend: fit, train_on_batch, or the loop of Keras' guide.

python train.py [--loop fit|batches|guide] [--batch 8] [--accumulate 2] [--dropout 0] [--mistake]
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--loop", choices=["fit", "batches", "guide"], default="fit")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--dropout", type=float, default=0.2)
parser.add_argument("--mistake", action="store_true", help="Take the probabilities of the last layer for logits.")
args = parser.parse_args()

CLASSES = 6


def images(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((size, 12, 12, 3), dtype="float32"), random.integers(CLASSES, size=size)


def make_model() -> keras.Model:
    inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    x = layers.MaxPooling2D(2)(x)
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(x)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.LayerNormalization()(x)
    x = layers.Dropout(args.dropout)(x)
    outputs = layers.Dense(CLASSES, activation="softmax")(x)
    return keras.Model(inputs, outputs)


def batches(x: np.ndarray, y: np.ndarray):
    for first in range(0, len(x), args.batch):
        yield x[first : first + args.batch], y[first : first + args.batch]


def main() -> None:
    keras.utils.set_random_seed(0)
    x, y = images(24, seed=1)
    model = make_model()
    accumulate = args.accumulate if args.accumulate > 1 else None
    optimizer = keras.optimizers.AdamW(3e-3, weight_decay=0.01, clipnorm=1.0, gradient_accumulation_steps=accumulate)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=args.mistake)
    model.compile(optimizer, loss_fn, metrics=["accuracy"])

    if args.loop == "fit":
        model.fit(x, y, batch_size=args.batch, epochs=args.epochs, shuffle=False, verbose=2)
    elif args.loop == "batches":
        for epoch in range(args.epochs):
            for images_of_batch, labels in batches(x, y):
                loss, _ = model.train_on_batch(images_of_batch, labels)
            print(f"epoch {epoch} loss {loss:.5f}")
    else:
        for epoch in range(args.epochs):
            for images_of_batch, labels in batches(x, y):
                loss = loss_fn(torch.from_numpy(labels), model(torch.from_numpy(images_of_batch), training=True))
                model.zero_grad()
                loss.backward()
                weights = list(model.trainable_weights)
                gradients = [weight.value.grad for weight in weights]
                with torch.no_grad():
                    optimizer.apply(gradients, weights)
            print(f"epoch {epoch} loss {loss.item():.5f}")

    loss, accuracy = model.evaluate(*images(16, seed=2), batch_size=8, verbose=0)
    print(f"evaluation: loss {loss:.5f} accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

"""Computes the gradient of the first step of train.py by plain JAX in float64, without levanter's trainer and loss function: of
the whole batch, and as the mean over its microbatches. It prints by how much they differ, and how far the gradients of recordings
are from each.

python microbatches.py [RECORDING ...]
"""

import sys

RECORDINGS, sys.argv[1:] = sys.argv[1:], []

import equinox as eqx  # noqa: E402
import haliax as hax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from levanter.models.gpt2 import Gpt2Config  # noqa: E402
from train import LENGTH, VOCABULARY, options, texts  # noqa: E402

from crossframe.recording import Recording  # noqa: E402
from crossframe.recording.event_format import REDUCE  # noqa: E402
from jax_backend.tree import path_name  # noqa: E402

config = Gpt2Config(max_seq_len=LENGTH, hidden_dim=32, num_layers=2, num_heads=4)
examples = texts(config.max_Pos)[: options.batch]
model = config.build(hax.Axis("vocab", VOCABULARY), key=jax.random.split(jax.random.PRNGKey(0))[0])
jax.config.update("jax_enable_x64", True)
params, rest = eqx.partition(model, eqx.is_inexact_array)
params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)


def sum_of(params, example):
    """The sum of the losses of an example's targets."""
    model = eqx.combine(params, rest)
    logits = hax.dot(model.activations(example.tokens, example.attn_mask), model.get_lm_head(), axis="embed")
    logits = logits.rearrange(("position", "vocab")).array[:-1]
    targets, weights = example.tokens.array[1:], example.loss_weight.array[:-1]
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], -1)[:, 0]
    return (losses * weights).sum()


sums = [jax.grad(sum_of)(params, example) for example in examples]
numbers = np.array([float(example.loss_weight.array[:-1].sum()) for example in examples])


def mean_of(rows):
    """The gradient of the mean loss over the targets of some examples."""
    return jax.tree.map(lambda *leaves: sum(leaves) / numbers[rows].sum(), *(sums[row] for row in rows))


def distance(a, b):
    """The relative distance between two lists of arrays."""
    norms = [np.sqrt(sum(float(np.square(each).sum()) for each in arrays)) for arrays in (map(np.subtract, a, b), a)]
    return norms[0] / norms[1]


parts = np.arange(options.batch).reshape(2, -1)
paths = jax.tree_util.tree_flatten_with_path(mean_of(parts.ravel()))[0]
names = [path_name(path) for path, _ in paths]
whole = [np.asarray(leaf) for _, leaf in paths]
of_parts = [jax.tree.leaves(mean_of(rows)) for rows in parts]
halves = [np.asarray((first + second) / 2) for first, second in zip(*of_parts, strict=True)]
print("targets of the microbatches:", *(int(numbers[rows].sum()) for rows in parts))
print(f"gradient of the whole batch and mean over microbatches: {distance(whole, halves):.1e} apart")
for path in RECORDINGS:
    recording = Recording.open(path)
    recorded = [recording.full(REDUCE, 0, name) for name in names]
    print(
        f"{path}: {distance(whole, recorded):.1e} from the whole batch, {distance(halves, recorded):.1e} from the mean"
    )

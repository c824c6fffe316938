"""Mamba of mambapy in torch, by a parallel scan. Fault: the convolution of the second layer reads one token ahead."""

import sys
from types import ModuleType

from experiments.foreign.shared import cross_entropy, load_converted, options, tokens_of, train_torch

kernels = ModuleType("mambapy.mamba2")  # imports kernels for CUDA
kernels.Mamba2 = kernels.Mamba2Config = type("Mamba2", (), {})
sys.modules["mambapy.mamba2"] = kernels
from mambapy.lm import LM  # noqa: E402
from mambapy.mamba import MambaConfig  # noqa: E402

given = options()
model = LM(MambaConfig(d_model=24, n_layers=2, dt_rank=3, d_state=6, rms_norm_eps=1e-5), vocab_size=48)
if given.fault:
    model.mamba.layers[1].mixer.conv1d.register_forward_hook(lambda module, inputs, output: output.roll(-1, 2))


def convert(arrays):
    """By hand; only the names differ."""
    renamed = {"backbone.embeddings": "embedding", "backbone.layers": "mamba.layers", "backbone.norm_f": "norm_f"}
    found = {}
    for name, value in arrays.items():
        for a, b in renamed.items():
            name = name.replace(a, b)
        found[name] = value
    return found


load_converted(given, model, convert)
train_torch(
    model,
    lambda step: {"tokens": tokens_of(step, 4, 13, vocabulary=48)},
    lambda model, batch: cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]),
)

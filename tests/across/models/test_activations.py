"""The activations that the core recognises are those of torch."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from crossframe.alignment.elementwise import ACTIVATIONS, activation_between

OF_TORCH = {
    "ReLU": F.relu,
    "GELU": F.gelu,
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "SiLU": F.silu,
    "ReLU6": F.relu6,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hard swish": F.hardswish,
    "hard sigmoid": F.hardsigmoid,
    "ELU": F.elu,
    "softplus": F.softplus,
    "mish": F.mish,
    "squared ReLU": lambda x: F.relu(x) ** 2,
    "leaky ReLU of slope 0.01": F.leaky_relu,
    "leaky ReLU of slope 0.1": lambda x: F.leaky_relu(x, 0.1),
    "leaky ReLU of slope 0.2": lambda x: F.leaky_relu(x, 0.2),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_torch(name):
    x = np.linspace(-8.0, 8.0, 257)
    y = OF_TORCH[name](torch.from_numpy(x)).numpy()
    # 1 + erf and 1 + tanh round at 1 where they are next to 0, times x of at most 8.
    np.testing.assert_allclose(ACTIVATIONS[name](x), y, rtol=1e-14, atol=4e-15)
    assert activation_between(x, y, 1e-12) == name

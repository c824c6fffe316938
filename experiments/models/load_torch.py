"""Loads initial values into a torch module."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from crossframe.errors import UsageError


def load_initial(module: nn.Module, params: Mapping[str, np.ndarray]) -> None:
    """Copy initial values into a module's parameters.

    Raises:
        UsageError: the names, or their order, are not the module's.
    """
    names = [name for name, _ in module.named_parameters()]
    if names != list(params):
        raise UsageError(f"the model's definition and its torch module disagree: {set(names) ^ set(params) or 'order'}")
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(torch.from_numpy(params[name]))

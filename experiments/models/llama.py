"""Llama 3: RMS norms, rotary positions, SwiGLU and grouped queries.

Of the sizes that people train there are parameter lists alone, for layouts and plans; `llama-tiny` is trained."""

import numpy as np

from crossframe.param_map import MapEntry, embedding, from_heads, linear, norm, to_heads
from crossframe.shapes.published import LlamaConfig
from experiments.models.definition import MakeFlax, MakeTorch, ModelDefinition, define


def rotary(config: LlamaConfig, time: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of the angles at each place, float64, of shape (time, head_width / 2): made once, for both frameworks.

    Source: RoFormer, Su et al. 2021, section 3.2.2; as Hugging Face's Llama, dim i is turned together with i + head_width / 2.
    """
    half = np.arange(config.head_width // 2)
    angles = np.outer(np.arange(time), config.rotary_base ** (-2.0 * half / config.head_width))
    return np.cos(angles), np.sin(angles)


def _entry(name: str, config: LlamaConfig) -> MapEntry:
    """flax keeps heads apart, and calls modules as torch does."""
    module = name.removesuffix(".weight")
    if module.endswith("embed_tokens"):
        return embedding(module, module)[0]
    if module.endswith("norm"):
        return norm(module, module, bias=False)[0]
    if module.endswith(("q_proj", "k_proj", "v_proj")):
        return to_heads(module, module, config.head_width, bias=False)[0]
    if module.endswith("o_proj"):
        return from_heads(module, module, config.head_width, bias=False)[0]
    return linear(module, module, bias=False)[0]


def describe(name: str, config: LlamaConfig, make_torch: MakeTorch, make_flax: MakeFlax) -> ModelDefinition:
    """A Llama of these sizes, which both functions build."""
    table = ((_entry(parameter, config), shape) for parameter, shape in config.shapes.items())
    return define(name, config, table, config.units, make_torch, make_flax, config.context, config.context)

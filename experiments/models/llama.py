"""Llama 3: RMS norms, rotary positions, SwiGLU and grouped queries.

Of the sizes that people train there are parameter lists alone, for layouts and plans; `llama-tiny` is trained."""

from dataclasses import dataclass

import numpy as np

from crossframe.names import MapEntry, embedding, from_heads, linear, norm, to_heads
from experiments.models.definition import MakeFlax, MakeTorch, ModelDefinition, define


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama 3. Source: The Llama 3 Herd of Models, 2024, table 3, and the vocabulary of section 3.2.

    Attributes:
        num_blocks: transformer blocks.
        width: of the residual stream.
        mlp_width: inside a block's feed-forward part.
        num_heads: of queries.
        num_kv_heads: of keys and values, which groups of query heads share.
        head_width: of one head.
        vocabulary: tokens; the embedding and the head are not tied.
        context: tokens of a sample.
        rotary_base: of the angles by which queries and keys are turned (section 3.2).

    >>> LLAMA_3_8B.numel, LLAMA_3_405B.numel
    (8030261248, 405853388800)
    """

    num_blocks: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int = 8
    head_width: int = 128
    vocabulary: int = 128256
    context: int = 8192
    rotary_base: float = 500_000.0
    norm_epsilon: float = 1e-5

    @property
    def units(self) -> tuple[str, ...]:
        """Each block is a unit; the embedding, the last norm and the head are left to the root."""
        return tuple(f"model.layers.{i}" for i in range(self.num_blocks))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes in order of registration, as Hugging Face's `LlamaForCausalLM` has them; weights are (out, in)."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.width)}
        for block in self.units:
            shapes |= {f"{block}.{name}": shape for name, shape in self._block_shapes().items()}
        return shapes | {"model.norm.weight": (self.width,), "lm_head.weight": (self.vocabulary, self.width)}

    def _block_shapes(self) -> dict[str, tuple[int, ...]]:
        queries, keys = self.num_heads * self.head_width, self.num_kv_heads * self.head_width
        return {
            "self_attn.q_proj.weight": (queries, self.width),
            "self_attn.k_proj.weight": (keys, self.width),
            "self_attn.v_proj.weight": (keys, self.width),
            "self_attn.o_proj.weight": (self.width, queries),
            "mlp.gate_proj.weight": (self.mlp_width, self.width),
            "mlp.up_proj.weight": (self.mlp_width, self.width),
            "mlp.down_proj.weight": (self.width, self.mlp_width),
            "input_layernorm.weight": (self.width,),
            "post_attention_layernorm.weight": (self.width,),
        }

    @property
    def numel(self) -> int:
        """Number of parameters, counted in elements: in closed form, not from `shapes`."""
        attention = 2 * self.width * self.head_width * (self.num_heads + self.num_kv_heads)
        block = attention + 3 * self.width * self.mlp_width + 2 * self.width
        return self.num_blocks * block + 2 * self.vocabulary * self.width + self.width


LLAMA_3_8B = LlamaConfig(num_blocks=32, width=4096, mlp_width=14336, num_heads=32)
LLAMA_3_405B = LlamaConfig(num_blocks=126, width=16384, mlp_width=53248, num_heads=128)


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

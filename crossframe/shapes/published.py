"""Models whose shapes are known by name: Llama 3, and the GPTs that are trained here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        tied: whether the weight of the head is that of the embedding of tokens: one parameter, with two uses.
    """

    vocabulary: int = 256
    context: int = 64
    width: int = 128
    num_heads: int = 4
    num_blocks: int = 5
    norm_epsilon: float = 1e-5
    tied: bool = False

    @property
    def units(self) -> tuple[str, ...]:
        """Each block is a unit; the embeddings, the last norm and the head belong to the root."""
        return tuple(f"blocks.{i}" for i in range(self.num_blocks))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes in order of registration; weights are (out, in)."""
        width = self.width
        shapes: dict[str, tuple[int, ...]] = {
            "token_embedding.weight": (self.vocabulary, width),
            "position_embedding.weight": (self.context, width),
        }
        for i in range(self.num_blocks):
            block = f"blocks.{i}"
            shapes |= {f"{block}.attention_norm.weight": (width,), f"{block}.attention_norm.bias": (width,)}
            for part in ("query", "key", "value", "out"):
                shapes |= {
                    f"{block}.attention.{part}.weight": (width, width),
                    f"{block}.attention.{part}.bias": (width,),
                }
            shapes |= {f"{block}.mlp_norm.weight": (width,), f"{block}.mlp_norm.bias": (width,)}
            shapes |= {f"{block}.mlp.up.weight": (4 * width, width), f"{block}.mlp.up.bias": (4 * width,)}
            shapes |= {f"{block}.mlp.down.weight": (width, 4 * width), f"{block}.mlp.down.bias": (width,)}
        shapes |= {"norm.weight": (width,), "norm.bias": (width,)}
        return shapes if self.tied else shapes | {"head.weight": (self.vocabulary, width)}


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

    >>> LLAMA_3_8B.numel, LLAMA_3_70B.numel, LLAMA_3_405B.numel
    (8030261248, 70553706496, 405853388800)
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


GPT = GPTConfig()
GPT_TINY = GPTConfig(context=8, width=10, num_heads=2, num_blocks=2)
LLAMA_3_8B = LlamaConfig(num_blocks=32, width=4096, mlp_width=14336, num_heads=32)
LLAMA_3_70B = LlamaConfig(num_blocks=80, width=8192, mlp_width=28672, num_heads=64)
LLAMA_3_405B = LlamaConfig(num_blocks=126, width=16384, mlp_width=53248, num_heads=128)
PUBLISHED: dict[str, GPTConfig | LlamaConfig] = {
    "gpt": GPT,
    "gpt-tiny": GPT_TINY,
    "llama-3-8b": LLAMA_3_8B,
    "llama-3-70b": LLAMA_3_70B,
    "llama-3-405b": LLAMA_3_405B,
}

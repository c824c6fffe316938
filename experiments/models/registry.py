"""The models by name: each one's definition joined with its torch module and its flax module.

A definition, in `gpt.py`, imports neither framework; `gpt_torch.py` and `gpt_flax.py` import its configuration. A framework is
imported when a module of it is made.
"""

from dataclasses import replace
from typing import Any

from crossframe.errors import UsageError
from crossframe.shapes.published import GPT, GPT_TINY
from experiments.models import conv, gpt, llama, mlp, moe, vit
from experiments.models.definition import ModelDefinition


def define_conv(name: str, config: conv.ConvConfig) -> ModelDefinition:
    """A convolutional net of these sizes, in both frameworks."""

    def make_torch() -> tuple[Any, set[type]]:
        from experiments.models.conv_torch import Block, ConvNet

        return ConvNet(config), {Block}

    def make_flax(dtype: str) -> Any:
        from experiments.models.conv_flax import ConvNet

        return ConvNet(config, dtype)

    return conv.describe(name, config, make_torch, make_flax)


def define_gpt(name: str, config: gpt.GPTConfig) -> ModelDefinition:
    """A GPT of these sizes, in both frameworks."""

    def make_torch() -> tuple[Any, set[type]]:
        from experiments.models.gpt_torch import GPT, Block

        return GPT(config), {Block}

    def make_flax(dtype: str) -> Any:
        from experiments.models.gpt_flax import GPT

        return GPT(config, dtype)

    return gpt.describe(name, config, make_torch, make_flax)


def define_llama(name: str, config: llama.LlamaConfig) -> ModelDefinition:
    """A Llama of these sizes, in both frameworks."""

    def make_torch() -> tuple[Any, set[type]]:
        from experiments.models.llama_torch import Block, Llama

        return Llama(config), {Block}

    def make_flax(dtype: str) -> Any:
        from experiments.models.llama_flax import Llama

        return Llama(config, dtype)

    return llama.describe(name, config, make_torch, make_flax)


def define_mlp(name: str, config: mlp.MLPConfig) -> ModelDefinition:
    """An MLP of these sizes, in both frameworks."""

    def make_torch() -> tuple[Any, set[type]]:
        from experiments.models.mlp_torch import MLP, Layer

        return MLP(config), {Layer}

    def make_flax(_: str) -> Any:
        from experiments.models.mlp_flax import MLP

        return MLP(config)

    return mlp.describe(name, config, make_torch, make_flax)


def define_moe(name: str, config: moe.MoEConfig) -> ModelDefinition:
    """A mixture of experts of these sizes, in both frameworks."""

    def make_torch() -> tuple[Any, set[type]]:
        from experiments.models.moe_torch import Block, MoE

        return MoE(config), {Block}

    def make_flax(_: str) -> Any:
        from experiments.models.moe_flax import MoE

        return MoE(config)

    return moe.describe(name, config, make_torch, make_flax)


def define_vit(name: str, config: vit.ViTConfig) -> ModelDefinition:
    """A ViT of these sizes, in both frameworks."""

    def make_torch() -> tuple[Any, set[type]]:
        from experiments.models.vit_torch import Block, ViT

        return ViT(config), {Block}

    def make_flax(_: str) -> Any:
        from experiments.models.vit_flax import ViT

        return ViT(config)

    return vit.describe(name, config, make_torch, make_flax)


_LLAMA_TINY = llama.LlamaConfig(
    2, width=10, mlp_width=13, num_heads=4, num_kv_heads=2, head_width=4, vocabulary=256, context=8
)
MODELS: dict[str, ModelDefinition] = {
    model.name: model
    for model in (
        define_gpt("gpt", GPT),
        define_gpt("gpt-tiny", GPT_TINY),
        define_gpt("gpt-tied", replace(GPT_TINY, tied=True)),
        define_llama("llama-tiny", _LLAMA_TINY),
        define_mlp("mlp", mlp.MLPConfig()),
        define_conv("conv", conv.ConvConfig()),
        define_vit("vit", vit.ViTConfig()),
        define_moe("moe", moe.MoEConfig()),
    )
}


def model_named(name: str) -> ModelDefinition:
    """The model of that name; UsageError, which lists them, if there is none."""
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}: expected one of {', '.join(MODELS)}")
    return MODELS[name]

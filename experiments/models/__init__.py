"""Each model once for torch and once for flax, with what both must agree on: parameters, units, initial values."""

from crossframe.errors import UsageError
from experiments.models.conv import CONV
from experiments.models.definition import ModelDefinition
from experiments.models.gpt import GPT, GPT_TIED, GPT_TINY
from experiments.models.llama import LLAMA_TINY
from experiments.models.mlp import MLP
from experiments.models.moe import MOE
from experiments.models.vit import VIT

MODELS: dict[str, ModelDefinition] = {
    model.name: model for model in (GPT, GPT_TINY, GPT_TIED, LLAMA_TINY, MLP, CONV, VIT, MOE)
}


def model_named(name: str) -> ModelDefinition:
    """The model of that name; UsageError, which lists them, if there is none."""
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}: expected one of {', '.join(MODELS)}")
    return MODELS[name]

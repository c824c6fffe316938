"""Each model once for torch and once for flax, with what both must agree on: parameters, units, initial values."""

from crossframe.errors import UsageError
from experiments.models.definition import ModelDefinition
from experiments.models.gpt import GPT, GPT_TINY

MODELS: dict[str, ModelDefinition] = {model.name: model for model in (GPT, GPT_TINY)}


def model_named(name: str) -> ModelDefinition:
    """The model of that name; UsageError, which lists them, if there is none."""
    if name not in MODELS:
        raise UsageError(f"unknown model {name!r}: expected one of {', '.join(sorted(MODELS))}")
    return MODELS[name]

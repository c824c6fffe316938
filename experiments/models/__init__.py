"""Each model once for torch and once for flax, with what both must agree on: parameters, units, initial values."""

from experiments.models.definition import ModelDefinition
from experiments.models.registry import MODELS, define_gpt, model_named

__all__ = ["MODELS", "ModelDefinition", "define_gpt", "model_named"]

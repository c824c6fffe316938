"""A catalogue of faults: small wrong changes to put in on purpose, to see that they are found and what is said of them."""

from contextlib import AbstractContextManager, nullcontext

from experiments.faults.catalogue import (
    checkpoints,
    core,
    data,
    fault,
    held_out,
    held_out_models,
    jax_engine,
    models_jax,
    models_torch,
    optimizers,
    torch_engine,
)
from experiments.faults.catalogue.fault import Answer, Fault

FAMILIES = (
    core.CORE,
    torch_engine.TORCH_ENGINE,
    jax_engine.JAX_ENGINE,
    models_torch.MODELS,
    models_jax.MODELS,
    optimizers.OPTIMIZERS,
    data.DATA,
    checkpoints.CHECKPOINTS,
    held_out.HELD_OUT,
    held_out_models.HELD_OUT,
)
FAULTS: dict[str, Fault] = {each.name: each for family in FAMILIES for each in family.faults}

__all__ = ["FAMILIES", "FAULTS", "Answer", "Fault", "check_fault", "fault_in_effect"]


def check_fault(name: str, framework: str = "") -> None:
    """Raise UsageError unless this is a fault's name or empty; one that a run in that framework can have, where it is named."""
    fault.check_fault(FAULTS, name, framework)


def fault_in_effect(name: str) -> AbstractContextManager[None]:
    """A context with that fault in effect; with an empty name, nothing."""
    return FAULTS[name].active() if name else nullcontext()

"""Collects the environment of this process: the configuration of JAX and its platform."""

from collections.abc import Mapping

import jax

from crossframe.environment import Environment, Fact, collect
from jax_backend.recorder._manifest import program

# Facts of the program that are stated in another section, or under the full name of the setting.
_STATED_ELSEWHERE = ("processor", "python", "flags", "matmul")
_CONFIGURED = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_dtype_bits",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_enable_custom_prng",
    "jax_disable_jit",
    "jax_debug_nans",
    "jax_softmax_custom_jvp",
    "jax_use_shardy_partitioner",
)


def environment_of(
    *, compiled: bool = True, modules: Mapping[str, str] | None = None, constants: Mapping[str, str] | None = None
) -> Environment:
    """The environment of this process.

    Args:
        compiled: whether steps are jitted.
        modules: class and options of the model's modules by canonical name.
        constants: digests of arrays that the step gets beside the batch, such as frozen weights, by path.
    """
    facts: dict[str, Fact] = {
        name: fact for name, fact in program(compiled=compiled).items() if name not in _STATED_ELSEWHERE
    }
    for name in _CONFIGURED:
        if hasattr(jax.config, name):
            value = getattr(jax.config, name)
            facts[name] = value if isinstance(value, bool | int | float | None) else str(value)
    facts["platform"] = " ".join(str(jax.devices()[0].client.platform_version).split())
    facts |= {f"the constant {name}": value for name, value in (constants or {}).items()}
    return collect(facts, modules=modules)

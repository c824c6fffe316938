"""Modules of flax's nnx: their parameters to shard, and the rest of their state for each rank.

graphdef, params, state = split(model)
sharded, state = shard(params, mesh, units=..., param_map=...), per_rank(state, mesh)

def loss_fn(params, batch, state):
    model = with_params(graphdef, params, state)
    ...
    return LossOutput(loss, state=state_of(model))

`ShardedModule` does all of this.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from crossframe.errors import UsageError
from jax_backend.activations import INPUT, OUTPUT, is_anyone_listening, module_scope, tell
from jax_backend.engine._loss_function import LossOutput
from jax_backend.mesh._device_mesh import per_rank
from jax_backend.shards._sharded_params import shard
from jax_backend.shards._summon import Holder


def split(module: nnx.Module) -> tuple[nnx.GraphDef, dict, dict]:
    """A module as (graphdef, params, state).

    Returns:
        The static graphdef; `params_of(module)`; `state_of(module)`.
    """
    graphdef, params, state = nnx.split(module, nnx.Param, ...)
    return graphdef, nnx.to_pure_dict(params), nnx.to_pure_dict(state)


def params_of(module: nnx.Module) -> dict:
    """The arrays of every nnx.Param, as nested dicts whose paths, joined by ".", are those of a ParamMap."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def state_of(module: nnx.Module) -> dict:
    """The arrays of every other variable: running statistics, rng keys and counters."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param)))


def with_params(graphdef: nnx.GraphDef, params: dict, state: dict | None = None) -> nnx.Module:
    """The module of a graphdef with parameters and state as `split` returns them."""
    return nnx.merge(graphdef, nnx.State(params), nnx.State(state or {}))


def watch(module: nnx.Module, paths: Mapping[str, str] | None = None) -> None:
    """Make modules inside a module tell their inputs and outputs (`jax_backend.activations`) while `jax_backend.Recorder`
    listens.

    Args:
        paths: for the canonical name of each module, its path in flax, the parts joined by "."; "" is the module itself.
            `jax_backend.recorder.module_paths` reads them from a ParamMap. None: all modules, under their paths.

    Raises:
        UsageError: a path of no module.
    """
    if paths is None:
        names = (".".join(map(str, path)) for path, part in nnx.iter_modules(module) if callable(part))
        paths = {name: name for name in names}
    for name, path in paths.items():
        part: Any = module
        for key in filter(None, path.split(".")):
            try:
                part = part[int(key)] if key.isdecimal() else getattr(part, key)
            except (AttributeError, IndexError, KeyError, TypeError):
                raise UsageError(
                    f"{path!r}: expected the path of a module, but there is no {key!r}; see nnx.iter_modules"
                ) from None
        if not isinstance(part, nnx.Module):
            raise UsageError(f"{path!r}: expected the path of a module, got {type(part).__name__}")
        if is_anyone_listening():
            _make_tell(part, name)


def _make_tell(module: nnx.Module, name: str) -> None:
    """Replace the module's class, since Python looks up `__call__` on the class."""
    given = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tell(name, INPUT, (args, tuple(kwargs.values())))
        with module_scope(name):
            output = given.__call__(self, *args, **kwargs)
        tell(name, OUTPUT, output)
        return output

    module.__class__ = type(given.__name__, (given,), {"__call__": call})


class ShardedModule(Holder):
    """A module with sharded parameters; `summon_full_params` shows it with full ones.

    Attributes:
        graphdef: its static part.
        sharded: the shards of its parameters. After a step set it to the new ones.
        state: all other variables, with a leading rank axis; likewise.
    """

    def __init__(self, module: nnx.Module, mesh: Mesh, **sharding: Any) -> None:
        """Shard the parameters of a module, which does not change.

        Args:
            mesh: from `jax_backend.make_mesh`.
            sharding: units, param_map, layout and other options of `jax_backend.shard`.
        """
        self.graphdef, params, state = split(module)
        self.sharded = shard(params, mesh, **sharding)
        self.state = per_rank(state, mesh)

    def loss(self, fn: Callable[[nnx.Module, PyTree], jax.Array | LossOutput]) -> Callable[..., LossOutput]:
        """The loss function of `value_and_grad` for `fn(module, batch)`, which returns the loss or a LossOutput without state."""

        def loss_fn(params: dict, batch: Any, state: dict) -> LossOutput:
            module = with_params(self.graphdef, params, state)
            output = fn(module, batch)
            output = output if isinstance(output, LossOutput) else LossOutput(output)
            return output._replace(state=state_of(module))

        return loss_fn

    def show(self, params: dict) -> nnx.Module:
        """The module with these parameters and rank 0's state; changes of its state are lost."""
        return with_params(self.graphdef, params, jax.tree.map(lambda leaf: leaf[0], self.state))

    def read(self, module: nnx.Module) -> dict:
        """The parameters of a module that `show` returned."""
        return params_of(module)

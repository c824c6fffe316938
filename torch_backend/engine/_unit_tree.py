"""The units of a module tree, each once, and the names of their modules and parameters.

The root's first use, optimizer state dicts, checkpoints, recordings and deferred initialization all use these functions.

[Note: names] A unit does not know its path in a model, because it was sharded before the modules around it and may have several
modules in any order. It knows where its parameters are registered. So the name of a parameter is the path of the module that
registers it, and the attribute. A shared parameter is named by its first registration in the tree; the others are aliases (R01).
Names do not depend on the order of a unit's modules, or on whether the root has run.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn

from crossframe.api import Api
from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.params import ParamSpec
from crossframe.state import state_key
from torch_backend.engine._bucket import Bucket
from torch_backend.engine._unit import UNIT, Unit

# All paths of each module with their positions in the walk.
_Paths = Mapping[nn.Module, list[tuple[int, str]]]


@dataclass(frozen=True, eq=False)
class NamedBucket:
    """A bucket in a model.

    Attributes:
        params: its parameters with their names in the model, in the layout's order.
    """

    bucket: Bucket
    params: tuple[ParamSpec, ...]

    @property
    def layout(self) -> Layout:
        """The bucket's layout with the parameters' names in the model."""
        return replace(self.bucket.layout, params=self.params)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class NamedUnit:
    """A unit in a model.

    Attributes:
        modules: the unit's modules that are in the model, in tree order.
        paths: the first path of each module.
        buckets: all buckets of the unit.
    """

    unit: Unit
    modules: tuple[nn.Module, ...]
    paths: tuple[str, ...]
    buckets: tuple[NamedBucket, ...]

    @property
    def name(self) -> str:
        """The unit's name: "" for the root, "blocks.0", or "norm, head" for a unit of two modules."""
        return ", ".join(self.paths)

    def check_whole(self) -> None:
        """Raise UsageError unless all of the unit's modules are in the model."""
        if missing := self.unit.num_modules - len(self.modules):
            raise UsageError(
                f"unit {self.name!r}: {missing} of its {self.unit.num_modules} modules are not in this model; pass a model "
                "that contains all modules that were sharded together"
            )


def units_in(model: nn.Module, api: Api | None = None) -> list[Unit]:
    """The units of a model, each once, outer ones first.

    Args:
        api: the API of the units; None for both.
    """
    return list(dict.fromkeys(unit for module in model.modules() if (unit := _unit_at(module, api)) is not None))


def named_units(
    model: nn.Module, api: Api | None = None, *, rename: Callable[[str], str] = state_key
) -> list[NamedUnit]:
    """The named units of a model, each once, outer ones first; see [Note: names].

    Args:
        api: the API of the units; None for both.
        rename: maps paths of the tree to names, for example without wrappers.
    """
    paths: dict[nn.Module, list[tuple[int, str]]] = {}
    for at, (path, module) in enumerate(model.named_modules(remove_duplicate=False)):
        paths.setdefault(module, []).append((at, rename(path)))
    modules: dict[Unit, list[nn.Module]] = {}
    for module in paths:
        if (unit := _unit_at(module, api)) is not None:
            modules.setdefault(unit, []).append(module)
    found = []
    for unit, own in modules.items():
        first = tuple(paths[module][0][1] for module in own)
        buckets = tuple(NamedBucket(bucket, tuple(_named(unit, bucket, first, paths))) for bucket in unit.buckets)
        found.append(NamedUnit(unit, tuple(own), first, buckets))
    return found


def _unit_at(module: nn.Module, api: Api | None) -> Unit | None:
    unit: Unit | None = module.__dict__.get(UNIT)
    return unit if unit is None or api is None or unit.options.api is api else None


def _named(unit: Unit, bucket: Bucket, at: tuple[str, ...], paths: _Paths) -> Iterator[ParamSpec]:
    """A bucket's parameters with their names in a model.

    Args:
        at: the paths of the unit's modules.
    """
    found: list[list[tuple[int, str]]] = [[] for _ in bucket.layout.params]
    for i, module, attribute in bucket.registrar.registered:
        found[i] += [(place, f"{path}.{attribute}" if path else attribute) for place, path in paths.get(module, ())]
    for spec, registrations in zip(bucket.layout.params, found, strict=True):
        if registrations:
            # The sort is stable and keeps the registration order of one module's attributes.
            name, *aliases = dict.fromkeys(name for _, name in sorted(registrations, key=lambda each: each[0]))
            yield replace(spec, name=name, aliases=tuple(aliases))
        elif unit.executor is not None:  # its module was removed from the model after it was named
            yield spec
        else:
            yield replace(spec, name=f"{', '.join(at)}.{spec.name}".lstrip("."), aliases=())

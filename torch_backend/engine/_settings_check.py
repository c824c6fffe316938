"""Checks, before the first collective, that all ranks have the same units and settings."""

from collections.abc import Sequence

from crossframe.layout import Layout, PerParamLayout, RaggedLayout
from torch_backend.engine._unit_tree import NamedUnit
from torch_backend.ranks._consensus import agree

FIRST_USE = "first use of the root"


def describe_units(named_units: Sequence[NamedUnit], api: str) -> list[tuple[str, dict[str, str]]]:
    """What must be the same everywhere: one subject a unit, then one a parameter.

    Args:
        named_units: every unit of the model. What its user chose in `settings` is described with it.
        api: the interface in use.
    """
    description: list[tuple[str, dict[str, str]]] = []
    for named in named_units:
        options = named.unit.options
        settings = {
            "interface": api,
            **options.settings,
            "reshard_after_forward": str(named.unit.step.settings.reshard_after_forward),
        }
        description.append((f"unit {named.name!r}", settings))
    for named in named_units:
        for each in named.buckets:
            bucket = each.bucket
            bucket.registrar.sync_requires_grad()  # what a user froze since the unit was made counts
            cuts = _cuts(bucket.layout)
            for i, (spec, leaf) in enumerate(zip(each.params, bucket.buffer.leaves, strict=True)):
                settings = {
                    "unit": repr(named.name),
                    "layout": bucket.layout.kind,
                    **cuts[i],
                    "shape": str(list(spec.shape)),
                    "dtype": spec.dtype,
                    "requires_grad": str(leaf.requires_grad),
                    "sharing": str(list(spec.aliases)),
                }
                description.append((f"parameter {spec.name!r}", settings))
    return description


def _cuts(layout: Layout) -> list[dict[str, str]]:
    """How each parameter is cut, as far as the user has a say in it."""
    if isinstance(layout, PerParamLayout):
        return [{"sharded dim": str(dim)} for dim in layout.shard_dims]
    if isinstance(layout, RaggedLayout):
        return [{"block": str(numel)} for numel in layout.block_numels]
    return [{} for _ in layout.params]


def check_agreement(named_units: Sequence[NamedUnit], api: str) -> None:
    """Raise AgreementError on every rank of the root's mesh unless all of them have the same units."""
    mesh = named_units[0].unit.mesh
    groups = [communicator.group for communicator in (mesh.shards, mesh.replicas) if communicator.size > 1]
    agree(groups, FIRST_USE, describe_units(named_units, api))

"""Whether all ranks were given the same units and settings: what is asked of them before their first collective."""

from collections.abc import Sequence
from typing import Any

from torch_backend.rounds import agree
from torch_backend.unit import Unit, named_below

FIRST_USE = "first use of the root"


def describe_units(named_units: Sequence[tuple[str, Unit]], face: str) -> list[tuple[str, dict[str, str]]]:
    """What must be the same everywhere: one subject a unit, then one a parameter.

    Args:
        named_units: every unit with its path. A unit's own `settings`, names and values in words, are described with it.
        face: the interface in use.
    """
    said: list[tuple[str, dict[str, str]]] = []
    for name, unit in named_units:
        choices: Any = getattr(unit, "choices", unit)
        settings = {
            "interface": face,
            "reshard_after_forward": str(choices.reshard_after_forward),
            **getattr(choices, "settings", {}),
        }
        said.append((f"unit {name!r}", settings))
    for name, unit in named_units:
        for bucket in unit.buckets:
            for spec in named_below(name, bucket.layout.params):
                settings = {
                    "unit": repr(name),
                    "layout": bucket.layout.kind,
                    "shape": str(list(spec.shape)),
                    "dtype": spec.dtype,
                    "requires_grad": str(spec.requires_grad),
                    "other names": str(list(spec.aliases)),
                }
                said.append((f"parameter {spec.name!r}", settings))
    return said


def check_agreement(named_units: Sequence[tuple[str, Unit]], face: str) -> None:
    """Raise AgreementError on every rank of the root's group unless all of them have the same units."""
    root = named_units[0][1]
    mesh: Any = getattr(root, "mesh", None)
    groups = [mesh.shards.group, mesh.replicas.group] if mesh else [root.communicator.group]  # type: ignore[attr-defined]
    agree([group for group in groups if group is not None], FIRST_USE, describe_units(named_units, face))

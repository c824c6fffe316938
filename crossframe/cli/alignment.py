"""`crossframe map FIRST SECOND`: prints which parameter of one model is which of another."""

from pathlib import Path

from rich.console import Console

from crossframe.alignment import GRADIENTS, MODULES, SAMPLES, VALUES, Alignment, unlike_other_layers

_MOST = 20
_EVIDENCE = {
    VALUES: "their values",
    SAMPLES: "a signature of all their values and the places of a sample",
    GRADIENTS: "the gradients of the first step",
    MODULES: "the module that they belong to",
}


def print_alignment(console: Console, found: Alignment, output: Path | None) -> None:
    """Print the map, or its file, and what is undecided."""
    entries = found.param_map.entries
    if output is None:
        for entry in entries:
            pattern = f"  {entry.pattern}" if entry.pattern else ""
            console.print(
                f"{entry.name} = {' + '.join(entry.paths)}{pattern}", soft_wrap=True, highlight=False, markup=False
            )
    for evidence, text in _EVIDENCE.items():
        if count := list(found.evidence.values()).count(evidence):
            console.print(f"{count:,} parameter{'s' * (count > 1)} aligned by {text}", highlight=False)
    if output is not None:
        console.print(f"map: {output}", soft_wrap=True, highlight=False, markup=False)
    for name in unlike_other_layers(found.param_map)[:_MOST]:
        paths = " + ".join(found.param_map.by_name[name].paths)
        console.print(
            f"unlike in other layers: {name} has the values of {paths}; were they exchanged?",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
    for each in found.undecided[:_MOST]:
        sides = " and ".join(", ".join(some) for some in (each.names, each.paths) if some)
        console.print(f"undecided: {sides}: {each.why}", soft_wrap=True, highlight=False, markup=False)
    if len(found.undecided) > _MOST:
        console.print(f"undecided: and {len(found.undecided) - _MOST} more; --json prints all", highlight=False)

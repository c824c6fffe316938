"""The stages of a pipeline: which stage has which units and which parameters of the root (R39)."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from crossframe.errors import UnitError, UsageError
from crossframe.quoting import quote
from crossframe.shapes import ModelShapes
from crossframe.unit_assignment import enclosing_unit

StageRules = Sequence[tuple[str, int]]
"""(pattern of names of units or of the root's parameters, stage) in order; the last pattern that matches decides."""


def stages_of(shapes: ModelShapes, num_stages: int, rules: StageRules = ()) -> Mapping[str, int]:
    """The stage of each parameter by name.

    Units are divided in the order of forward into stages whose numbers of units differ by at most one, the larger ones first. A
    unit inside another one is on its stage. Parameters of the root that are registered before those of all units are on the first
    stage, and those after the first unit on the last stage.

    Raises:
        UsageError: more stages than units, a rule that matches nothing or names no stage, a stage without parameters, or an order
            of registration that is unknown.
        UnitError: a parameter of the root with other names, which may be on two stages.

    >>> from crossframe.params import ParamSpec
    >>> names = ("embed.weight", "h.0.w", "h.1.w", "head.weight")
    >>> shapes = ModelShapes("m", tuple(ParamSpec(name, (2, 2)) for name in names), units=("h.0", "h.1"))
    >>> dict(stages_of(shapes, 2))
    {'embed.weight': 0, 'h.0.w': 0, 'h.1.w': 1, 'head.weight': 1}
    """
    known = frozenset(("", *shapes.units))
    outer = [unit for unit in shapes.units if enclosing_unit(unit.rpartition(".")[0], known) == ""]
    if num_stages == 1 and not rules:
        return {param.name: 0 for param in shapes.params}
    if num_stages > len(outer):
        raise UsageError(
            f"axis 'pp' of size {num_stages}: model {shapes.name!r} has {len(outer)} units, expected at least one for each stage"
        )
    size, larger = divmod(len(outer), num_stages)
    stage_of_unit = {
        unit: min(at // (size + 1), larger) + max(0, at - larger * (size + 1)) // size for at, unit in enumerate(outer)
    }
    stage_of_root: dict[str, int] = {}
    behind = False
    for param in shapes.params:
        if shapes.unit_of(param.name):
            behind = True
            continue
        if param.aliases:
            raise UnitError(
                f"parameter {param.name!r} of the root is shared with {quote(param.aliases)}, which may be on another stage of "
                "the pipeline; describe it as two parameters if each stage has a copy"
            )
        stage_of_root[param.name] = num_stages - 1 if behind else 0
    stated = _apply(rules, stage_of_unit, stage_of_root, num_stages)
    if not shapes.is_ordered and (unknown := [name for name in stage_of_root if name not in stated]):
        raise UsageError(
            f"parameters {quote(unknown)} of the root: the file does not state the order of registration, from which their stage "
            f"follows; pass the stage of each, for instance {quote(unknown[0])} = {num_stages - 1}"
        )

    def stage(name: str) -> int:
        unit = shapes.unit_of(name)
        while unit and unit not in stage_of_unit:
            unit = enclosing_unit(unit.rpartition(".")[0], known)
        return stage_of_unit[unit] if unit else stage_of_root[name]

    found = {param.name: stage(param.name) for param in shapes.params}
    if empty := sorted(set(range(num_stages)) - set(found.values())):
        raise UsageError(
            f"stage {empty[0]} of {num_stages} has no parameters; change the rules or the size of axis 'pp'"
        )
    return found


def _apply(rules: StageRules, units: dict[str, int], root: dict[str, int], num_stages: int) -> set[str]:
    """Change the stages of units and of parameters of the root by rules. Returns the names that a rule concerns."""
    stated: set[str] = set()
    for pattern, stage in rules:
        if type(stage) is not int or not -num_stages <= stage < num_stages:
            raise UsageError(
                f"stage of {quote(pattern)}: expected a stage from 0 to {num_stages - 1}, or -1 for the last, got {quote(stage)}"
            )
        matching = [(known, name) for known in (units, root) for name in known if fnmatchcase(name, pattern)]
        if not matching:
            example = next(iter((*root, *units)))
            raise UsageError(
                f"stage of {quote(pattern)}: no unit and no parameter of the root matches: expected names like {quote(example)}"
            )
        for known, name in matching:
            known[name] = stage % num_stages
            stated.add(name)
    return stated

"""Which parameter belongs to which unit and in which order (R01), beside a recursive walk of a tree."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import CrossframeError, UnitError
from crossframe.params import ParamSpec
from crossframe.unit_assignment import Order, Slot, UnitSpec, assign_units, enclosing_unit, post_order
from tests.core.helpers.random_layouts import QUICK


@dataclass
class Module:
    """A module of a made-up model: parameters by attribute, as numbers that shared ones have in common, and children."""

    params: dict[str, int]
    children: dict[str, "Module"] = field(default_factory=dict)


def module_names(module: Module, name: str = "") -> list[str]:
    """Names in pre-order."""
    names = [name]
    for child, inner in module.children.items():
        names += module_names(inner, f"{name}.{child}" if name else child)
    return names


def module_slots(module: Module, name: str = "") -> list[Slot]:
    """Registrations in pre-order."""
    slots = [Slot(name, attribute, number, (number + 1,), "float32") for attribute, number in module.params.items()]
    for child, inner in module.children.items():
        slots += module_slots(inner, f"{name}.{child}" if name else child)
    return slots


def walk(module: Module, units: set[str], order: Order, name: str = "", unit: str = "") -> list[tuple[str, str, int]]:
    """(unit, name, number) of every registration; a module's own come before or after those of its children."""
    unit = name if name in units else unit
    own = [(unit, f"{name}.{attr}" if name else attr, number) for attr, number in module.params.items()]
    inner = []
    for child, below in module.children.items():
        inner += walk(below, units, order, f"{name}.{child}" if name else child, unit)
    return own + inner if order is Order.PRE_ORDER else inner + own


# Names of which one begins with another: a dot decides what lies inside what, not the letters.
CHILDREN = st.permutations(["a", "ab", "b"])


@st.composite
def modules(draw: st.DrawFn, depth: int = 3) -> Module:
    """A tree. Numbers are from a small pool, so that some are shared."""
    made = Module({attr: draw(st.integers(0, 9)) for attr in draw(st.sampled_from(["", "w", "wb", "bw"]))})
    if depth:
        for child in draw(CHILDREN)[: draw(st.integers(0, 3))]:
            made.children[child] = draw(modules(depth - 1))
    return made


@QUICK
@given(modules(), st.data(), st.sampled_from(Order))
def test_R01_every_parameter_is_in_the_nearest_enclosing_unit_in_order(model, data, order):
    names = module_names(model)
    units = set(data.draw(st.lists(st.sampled_from(names), unique=True)))
    expected: dict[str, list[str]] = {}
    for unit, name, _ in walk(model, units, order):
        expected.setdefault(unit, []).append(name)
    unshared = [slot._replace(identity=slot.name) for slot in module_slots(model)]
    assigned = assign_units(names, unshared, units, order)
    assert {unit.name: [param.name for param in unit.params] for unit in assigned} == expected
    assert [unit.name for unit in assigned] == [name for name in names if name in expected]


@QUICK
@given(modules(), st.data(), st.sampled_from(Order))
def test_R01_a_shared_parameter_stands_at_its_first_occurrence_or_is_refused_across_units(model, data, order):
    names = module_names(model)
    units = set(data.draw(st.lists(st.sampled_from(names), unique=True, max_size=2)))
    uses: dict[int, list[tuple[str, str]]] = {}
    for unit, name, number in walk(model, units, order):
        uses.setdefault(number, []).append((unit, name))
    if any(len({unit for unit, _ in places}) > 1 for places in uses.values()):
        with pytest.raises(UnitError, match="is shared with"):
            assign_units(names, module_slots(model), units, order)
        return
    # The order gives the place; the names are in pre-order in either.
    named: dict[int, list[str]] = {}
    for _, name, number in walk(model, units, Order.PRE_ORDER):
        named.setdefault(number, []).append(name)
    expected: dict[str, list[ParamSpec]] = {}
    for number, [(unit, _), *_] in uses.items():
        first, *others = named[number]
        expected.setdefault(unit, []).append(ParamSpec(first, (number + 1,), aliases=tuple(others)))
    assigned = assign_units(names, module_slots(model), units, order)
    assert {unit.name: list(unit.params) for unit in assigned} == expected


@QUICK
@given(modules())
def test_R01_post_order_is_children_before_their_parent(model):
    def after_children(module: Module, name: str) -> list[str]:
        done = []
        for child, inner in module.children.items():
            done += after_children(inner, f"{name}.{child}" if name else child)
        return [*done, name]

    assert post_order(module_names(model)) == after_children(model, "")


def test_post_order_of_nothing():
    assert post_order([]) == []


def test_R01_orders_of_a_small_model():
    names = ["", "embed", "block", "block.fc", "head"]
    slots = [
        Slot("", "scale", "scale", (), "float32"),
        Slot("embed", "weight", "tied", (5, 3), "bfloat16", requires_grad=False),
        Slot("block", "gain", "gain", (3,), "float32"),
        Slot("block.fc", "weight", "fc", (3, 3), "float32"),
        Slot("head", "weight", "tied", (5, 3), "bfloat16", requires_grad=False),
    ]
    scale, gain, fc = ParamSpec("scale", ()), ParamSpec("block.gain", (3,)), ParamSpec("block.fc.weight", (3, 3))
    tied = ParamSpec("embed.weight", (5, 3), "bfloat16", ("head.weight",), requires_grad=False)
    assert assign_units(names, slots, ["block"]) == (UnitSpec("", (scale, tied)), UnitSpec("block", (gain, fc)))
    assert assign_units(names, slots, ["", "block"], Order.POST_ORDER) == (
        UnitSpec("", (tied, scale)),
        UnitSpec("block", (fc, gain)),
    )


def test_R01_the_slots_may_come_in_any_order_of_modules():
    names = ["", "a", "b"]
    slots = [Slot(module, attr, module + attr, (1,), "float32") for module in "ba" for attr in "yx"]
    (unit,) = assign_units(names, slots, [])
    assert [param.name for param in unit.params] == ["a.y", "a.x", "b.y", "b.x"]


@pytest.mark.parametrize("order", Order)
def test_R01_a_parameter_shared_between_units_is_refused_by_both_names_and_both_units(order):
    slots = [Slot(module, "w", 0, (1,), "float32") for module in ("one", "two")]
    with pytest.raises(UnitError, match=r"'one.w' of unit 'one' is shared with 'two.w' of unit 'two'"):
        assign_units(["", "one", "two"], slots, ["one", "two"], order)
    with pytest.raises(UnitError, match=r"'one.w' of unit '' is shared with 'two.w' of unit 'two'"):
        assign_units(["", "one", "two"], slots, ["two"], order)


def test_R01_a_unit_that_owns_nothing_is_left_out():
    assert assign_units(["", "a", "a.b"], [Slot("a.b", "w", 0, (1,), "float32")], ["a", "a.b"]) == (
        UnitSpec("a.b", (ParamSpec("a.b.w", (1,)),)),
    )
    assert assign_units([""], [], []) == ()


def test_units_that_are_no_modules_are_refused_by_name():
    with pytest.raises(UnitError, match=r"units \['a.x', 'c'\] are not modules") as error:
        assign_units(["", "a"], [], ["c", "a", "a.x"])
    assert isinstance(error.value, CrossframeError) and "'a'" in str(error.value)
    names = [f"m{i}" for i in range(8)]
    with pytest.raises(UnitError) as error:
        assign_units([""], [], names[::-1])
    assert str(names) in str(error.value)


@pytest.mark.parametrize(
    ("module", "units", "owner"),
    [
        ("a.b.c", {""}, ""),
        ("a.b.c", {"", "a"}, "a"),
        ("a.b.c", {"", "a", "a.b"}, "a.b"),
        ("a.b.c", {"", "a", "a.b.c"}, "a.b.c"),
        ("a.b.c", {"", "a.b.c.d", "b", "c"}, ""),
        ("ab", {"", "a"}, ""),
        ("", {""}, ""),
    ],
)
def test_R01_the_nearest_enclosing_unit(module, units, owner):
    assert enclosing_unit(module, frozenset(units)) == owner


def test_a_slot_of_the_root_has_the_bare_name():
    assert Slot("", "w", 0, (), "float32").name == "w"
    assert Slot("a.b", "w", 0, (), "float32").name == "a.b.w"


def test_R01_the_root_is_a_unit_even_where_it_is_not_named():
    assert enclosing_unit("a.b", frozenset()) == enclosing_unit("", frozenset()) == ""
    assert enclosing_unit("a.b", frozenset({"a.b"})) == "a.b"
    assert enclosing_unit("a.bc", frozenset({"a.b"})) == ""

"""Deferred initialisation (R38): every rank's shards are those of the model built in full, bit for bit."""

# pyright: reportArgumentType=false

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import InitialisationError
from crossframe.initialise import Kept, init_plan, initialise
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout, Sharding, views
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.unit_assignment import Order, Slot, UnitSpec, assign_units, enclosing_unit
from tests.core.helpers.random_layouts import QUICK, same_bits


class Model:
    """A random module tree: what each module registers, which names are tied to which, which modules are units."""

    def __init__(self, rng):
        self.children = {"": []}
        for i in range(int(rng.integers(1, 9))):
            parent = str(rng.choice(list(self.children)))
            name = f"{parent}.m{i}" if parent else f"m{i}"
            self.children[parent].append(name)
            self.children[name] = []
        self.modules = list(self.pre_order(""))
        self.units = {module for module in self.modules if rng.random() < 0.4} | {""}
        self.shapes = {
            module: {
                f"p{j}": tuple(map(int, rng.integers(0, 5, rng.integers(1, 3)))) for j in range(rng.integers(0, 4))
            }
            for module in self.modules
        }
        self.shapes[""].setdefault("p0", (3,))
        self.buffers = {module: ["running"] if rng.random() < 0.3 else [] for module in self.modules}
        self.tied_to = {}  # name of a replaced parameter to the name whose values both have
        names = [(module, attribute) for module in self.modules for attribute in self.shapes[module]]
        for _ in range(int(rng.integers(0, 3))):
            a, b = (names[int(i)] for i in rng.integers(0, len(names), 2))
            taken = {*self.tied_to, *self.tied_to.values()}
            same_unit = enclosing_unit(a[0], frozenset(self.units)) == enclosing_unit(b[0], frozenset(self.units))
            if a[0] != b[0] and same_unit and not taken & {self.name(*a), self.name(*b)}:
                self.shapes[b[0]][b[1]] = self.shapes[a[0]][a[1]]
                self.tied_to[self.name(*b)] = self.name(*a)

    @staticmethod
    def name(module, attribute):
        return f"{module}.{attribute}" if module else attribute

    def pre_order(self, module):
        yield module
        for child in self.children[module]:
            yield from self.pre_order(child)

    def constructed(self, module):
        """Modules as constructors end that build what is inside first and draw then."""
        for child in self.children[module]:
            yield from self.constructed(child)
        yield module

    def draw(self, module, rng):
        """What the initialiser of one module draws: one stream, parameters and buffers, of different distributions."""
        values = {}
        for i, (attribute, shape) in enumerate(self.shapes[module].items()):
            values[attribute] = (rng.standard_normal(shape) if i % 2 else rng.uniform(-1, 1, shape)).astype(np.float32)
        for buffer in self.buffers[module]:
            values[buffer] = rng.standard_normal(2)
        return values

    def build(self, rng):
        """The model built in full: all values by name, the tied ones tied."""
        values = {}
        for module in self.constructed(""):
            values |= {self.name(module, attribute): value for attribute, value in self.draw(module, rng).items()}
        for name, kept in self.tied_to.items():
            values[name] = values[kept]
        return values

    def slots(self):
        return [
            Slot(
                module,
                attribute,
                self.tied_to.get(self.name(module, attribute), self.name(module, attribute)),
                shape,
                "float32",
            )
            for module in self.modules
            for attribute, shape in self.shapes[module].items()
        ]

    def buffer_slots(self):
        return [
            Slot(module, buffer, self.name(module, buffer), (2,), "float64")
            for module in self.modules
            for buffer in self.buffers[module]
        ]

    def unit_specs(self, order=Order.PRE_ORDER):
        return assign_units(self.modules, self.slots(), self.units, order)

    def plan(self, **changed):
        everything = {slot.identity for slot in self.slots() + self.buffer_slots()}
        arguments = {
            "meta": everything,
            "initialisers": self.modules,
            "buffers": self.buffer_slots(),
            "tied_to": self.tied_to,
        }
        return init_plan(self.modules, self.slots(), self.unit_specs(), **(arguments | changed))


def shardings(units, rng):
    mesh = MeshSpec(shard=int(rng.integers(1, 6)), replicate=int(rng.integers(1, 3)))
    kinds = [
        lambda params: FlatLayout(params, mesh.shard, keep_original=True),
        lambda params: FlatLayout(params, mesh.shard, keep_original=False),
        lambda params: PerParamLayout(params, mesh.shard),
        lambda params: RaggedLayout(params, mesh.shard),
    ]
    return Sharding(tuple((unit.name, kinds[rng.integers(4)](unit.params)) for unit in units), mesh)


@QUICK
@given(st.integers(0, 10**6))
def test_R38_every_rank_holds_its_slices_of_the_model_built_in_full(seed):
    rng = np.random.default_rng(seed)
    model = Model(rng)
    sharding = shardings(model.unit_specs(), rng)
    plan = model.plan()
    full = model.build(np.random.default_rng(seed))
    streams = [np.random.default_rng(seed) for _ in range(sharding.mesh.world_size)]
    shards = [
        initialise(plan, sharding, rank, lambda module, stream=stream: model.draw(module, stream))
        for rank, stream in enumerate(streams)
    ]
    for replica in range(sharding.mesh.replicate):
        ranks = range(replica * sharding.mesh.shard, (replica + 1) * sharding.mesh.shard)
        for bucket, (_, layout) in enumerate(sharding.units):
            found = views(layout, np.concatenate([shards[rank][bucket] for rank in ranks]))
            for spec in layout.params:
                for name in (spec.name, *spec.aliases):
                    assert same_bits(found[spec.name], full[name]), (seed, name)
            for rank in ranks:
                for run in layout.padding(sharding.mesh.coordinate(rank)[1]):
                    assert not shards[rank][bucket][run.start : run.stop].any()
    used_up = np.random.default_rng(seed)
    model.build(used_up)
    assert {stream.bit_generator.state["state"]["state"] for stream in streams} == {
        used_up.bit_generator.state["state"]["state"]
    }


@QUICK
@given(st.integers(0, 10**6))
def test_R38_a_plan_draws_each_module_once_in_full_and_keeps_each_parameter_once(seed):
    model = Model(np.random.default_rng(seed))
    plan = model.plan()
    with_tensors = [m for m in model.constructed("") if model.shapes[m] or model.buffers[m]]
    assert [step.module for step in plan] == with_tensors
    for step in plan:
        assert step.draws == tuple(model.shapes[step.module])
        assert step.buffers == tuple(model.buffers[step.module])
    kept = [keep for step in plan for keep in step.keeps]
    units = model.unit_specs()
    assert sorted((keep.unit, keep.name) for keep in kept) == sorted((u.name, p.name) for u in units for p in u.params)


@QUICK
@given(st.integers(0, 10**6), st.data())
def test_R38_modules_that_have_values_keep_them_and_are_not_called(seed, data):
    model = Model(np.random.default_rng(seed))
    model.tied_to = {}
    real = data.draw(st.sets(st.sampled_from(model.modules)))
    meta = {slot.identity for slot in model.slots() + model.buffer_slots() if slot.module not in real}
    plan = model.plan(meta=meta, initialisers=[m for m in model.modules if m not in real])
    with_tensors = [m for m in model.constructed("") if (model.shapes[m] or model.buffers[m]) and m not in real]
    assert [step.module for step in plan] == with_tensors


def small(*, tied=False, **changed):
    """Two modules inside the root; `head.w` may be `wte.w`."""
    slots = [
        Slot("wte", "w", "wte.w", (2,), "float32"),
        Slot("head", "w", "wte.w" if tied else "head.w", (2,), "float32"),
        Slot("head", "b", "head.b", (2,), "float32"),
    ]
    modules = ["", "wte", "head"]
    arguments = {"meta": {slot.identity for slot in slots}, "initialisers": modules}
    return init_plan(modules, slots, assign_units(modules, slots, []), **(arguments | changed))


@pytest.mark.parametrize(("keeps", "first", "second"), [("wte.w", ["w"], ["b"]), ("head.w", [], ["w", "b"])])
def test_R38_of_two_modules_that_draw_one_parameter_the_one_that_was_tied_to_keeps_its_values(keeps, first, second):
    for asked in ({"wte.w": keeps}, {"head.w": keeps}):
        one, two = small(tied=True, tied_to=asked)
        assert (one.draws, two.draws) == (("w",), ("w", "b"))  # both streams are consumed
        assert [keep.attribute for keep in one.keeps] == first
        assert [keep.attribute for keep in two.keeps] == second
        assert Kept("w", "wte.w", "") in (*one.keeps, *two.keeps)


def test_R38_a_parameter_that_two_modules_draw_is_refused_unless_told_which_is_kept():
    with pytest.raises(
        InitialisationError, match=r"drawn as wte\.w, head\.w.*tied_to\. Still on meta: head\.b, head\.w, wte\.w"
    ):
        small(tied=True)
    with pytest.raises(InitialisationError, match=r"tied_to, not \['head\.b'\]"):
        small(tied=True, tied_to={"head.w": "head.b"})


def test_R38_a_module_without_initialiser_is_no_matter_where_another_draws_what_it_shares():
    slots = [Slot("wte", "w", "w", (2,), "float32"), Slot("head", "w", "w", (2,), "float32")]
    modules = ["", "wte", "head"]
    (step,) = init_plan(modules, slots, assign_units(modules, slots, []), meta={"w"}, initialisers=["wte"])
    assert (step.module, step.keeps) == ("wte", (Kept("w", "wte.w", ""),))


def test_R38_the_second_module_may_be_the_one_that_draws():
    slots = [Slot("wte", "w", "w", (2,), "float32"), Slot("head", "w", "w", (2,), "float32")]
    modules = ["", "wte", "head"]
    (step,) = init_plan(modules, slots, assign_units(modules, slots, []), meta={"w"}, initialisers=["head"])
    assert (step.module, step.keeps) == ("head", (Kept("w", "wte.w", ""),))


def test_R38_what_no_initialiser_reaches_is_refused_with_all_names_at_once():
    with pytest.raises(InitialisationError) as caught:
        small(initialisers=["wte"])
    said = str(caught.value)
    assert "head.w has no initialiser" in said and "head.b has no initialiser" in said and "wte.w has" not in said
    assert said.endswith("Still on meta: head.b, head.w, wte.w")
    buffer = Slot("wte", "table", "table", (2,), "float32")
    with pytest.raises(InitialisationError, match=r"wte\.table has no initialiser"):
        small(initialisers=["head"], meta={"head.w", "head.b", "table"}, buffers=[buffer])


def test_R38_a_module_that_is_on_meta_in_part_is_refused_since_drawing_overwrites_the_rest():
    with pytest.raises(
        InitialisationError, match=r"head\.b has values, and would be drawn again with the rest of 'head'"
    ):
        small(meta={"wte.w", "head.w"})
    buffer = Slot("wte", "table", "table", (2,), "float32")
    with pytest.raises(InitialisationError, match=r"wte\.table has values"):
        small(buffers=[buffer])


def test_R38_a_parameter_of_no_unit_is_refused():
    slots = [Slot("a", "w", "w", (2,), "float32")]
    with pytest.raises(InitialisationError, match=r"a\.w is a parameter of no unit"):
        init_plan(["", "a"], slots, [UnitSpec("", (ParamSpec("v", (2,)),))], meta={"w"}, initialisers=["a"])


def test_R38_what_is_on_meta_nowhere_needs_no_plan():
    assert small(meta=set()) == ()


def test_R38_a_parents_draws_come_behind_or_before_those_inside_it():
    slots = [Slot("", "scale", 0, (2,), "float32"), Slot("a", "w", 1, (2,), "float32")]
    units = assign_units(["", "a"], slots, [])
    for order, expected in ((Order.POST_ORDER, ["a", ""]), (Order.PRE_ORDER, ["", "a"])):
        plan = init_plan(["", "a"], slots, units, meta={0, 1}, initialisers=["", "a"], order=order)
        assert [step.module for step in plan] == expected


def test_R38_modules_of_one_unit_need_not_stand_together():
    slots = [Slot(module, "w", module, (2,), "float32") for module in ("first", "block", "last")]
    modules = ["", "first", "block", "last"]
    units = assign_units(modules, slots, ["block"])
    plan = init_plan(modules, slots, units, meta=set(modules), initialisers=modules)
    assert [(step.module, step.keeps[0].unit) for step in plan] == [("first", ""), ("block", "block"), ("last", "")]


@pytest.mark.parametrize("wrong", [3, ["a"], {"head.w": "tail.w"}, {"tail.w": "head.w"}, {1: "head.w"}])
def test_R38_ties_are_told_by_names_of_parameters(wrong):
    with pytest.raises(InitialisationError, match="tied_to: expected names"):
        small(tied_to=wrong)


def test_R38_slots_and_units_that_are_none_are_refused():
    slot = Slot("elsewhere", "w", 0, (2,), "float32")
    for slots, units in (([slot], []), ([3], []), ([], ["u"])):
        with pytest.raises(InitialisationError, match="expected"):
            init_plan([""], slots, units, meta=set(), initialisers=[])


@pytest.mark.parametrize(("drawn", "said"), [({}, "nothing"), ({"w": np.zeros(3, np.float32)}, r"shape \(3,\)")])
def test_R38_an_initialiser_that_draws_something_else_is_refused(drawn, said):
    plan = small()
    units = (("", FlatLayout(tuple(ParamSpec(name, (2,)) for name in ("wte.w", "head.w", "head.b")), 1, True)),)
    with pytest.raises(
        InitialisationError, match=rf"'wte\.w': expected .* 'wte' to draw shape \(2,\) as 'w', got {said}"
    ):
        initialise(plan, Sharding(units, MeshSpec(1)), 0, lambda _: drawn)
    other = Sharding((("", FlatLayout((ParamSpec("x", (2,)),), 1, True)),), MeshSpec(1))
    with pytest.raises(InitialisationError, match=r"'wte' draws 'wte\.w', and no unit"):
        initialise(plan, other, 0, lambda _: drawn)

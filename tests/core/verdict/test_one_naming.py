"""Recordings with different names: compared by a map, or by one that is derived from their values."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.errors import MappingError, RecordingError
from crossframe.param_map import MapEntry, ParamMap, identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Recording, RecordingWriter
from crossframe.recording.event_format import encode, perturbed_run_folder, place
from crossframe.recording.mapped_recording import mapped
from crossframe.recording.sketch import WHOLE
from crossframe.recording.unused_params import unused_params
from crossframe.verdict import Verdict, compare, one_naming
from crossframe.verdict.one_naming import OneNaming, in_one_naming
from tests.core.helpers import synthetic
from tests.core.helpers.translated import translate

PATHS = {"embed": "tok.table", "bias": "tok.shift", "block.w": "layer.kernel", "block.k_bias": "layer.shift"}
MODULES = {"": "", "block": "layer"}
MAP = ParamMap(
    tuple(MapEntry(name, path, "a b -> b a" if name in ("embed", "block.w") else None) for name, path in PATHS.items())
)


def transposed(name, array):
    return array.T if array.ndim == 2 else array


def pair(folder, *, world_size=2, other=None, **options):
    """A recording, and another one with other names; `other` changes what the second one recorded."""
    made = synthetic.manifest(world_size)
    first = synthetic.record(folder / "a", made)
    source = first if other is None else synthetic.record(folder / "source", made, tamper=other)
    options = {"params": transposed, "modules": MODULES} | options
    return first, translate(source, folder / "b", PATHS, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("given", [MAP, None], ids=["map", "values"])
def test_other_names_and_dims_compare_as_equal(tmp_path, given, world_size):
    a, b = pair(tmp_path, world_size=world_size)
    found = compare(a, b, param_map=given)
    assert found.verdict is Verdict.EQUAL, found.reason
    assert (
        "by the given map" if given else "4 parameters with other names were matched by their values"
    ) in found.notes[0]
    assert any(each.name == "output of block" for each in found.judged)
    assert {each.name for each in found.judged if each.phase == "backward"} == set(PATHS)
    # In the other order the names are still those of torch.
    assert {each.name for each in compare(b, a, param_map=given).judged if each.phase == "update"} == set(PATHS)


@pytest.mark.parametrize("given", [MAP, None], ids=["map", "values"])
def test_each_recording_keeps_its_side(tmp_path, given):
    a, b = pair(tmp_path)
    for first, second in ((a, b), (b, a)):
        found = in_one_naming(first, second, given)
        assert (found.a.directory, found.b.directory) == (first.directory, second.directory)
        assert set(found.a.manifest.params) == set(found.b.manifest.params) == set(PATHS)
        assert "the names are those of torch" in found.note


def test_recordings_are_not_mapped_if_one_has_all_names_of_the_other(tmp_path):
    class Named:
        def __init__(self, *names):
            params = {name: ParamSpec(name, (2,), "float32") for name in names}
            self.manifest = SimpleNamespace(params=params, settings={}, framework="torch")

        def recorded_steps(self):
            return ()

    few, many = Named("a"), Named("a", "b")
    assert in_one_naming(few, many) == OneNaming(few, many) and in_one_naming(many, few) == OneNaming(many, few)


def test_names_are_those_of_the_other_recording_if_only_these_can_be_mapped(tmp_path, monkeypatch):
    a, b = pair(tmp_path)
    derived = one_naming._derived

    def only_of_b(first, second, *names):
        if first.manifest.framework == "torch":
            raise MappingError("undecided")
        return derived(first, second, *names)

    monkeypatch.setattr(one_naming, "_derived", only_of_b)
    for order in ((a, b), (b, a)):
        found = compare(*order)
        assert found.verdict is Verdict.EQUAL and "the names are those of jax" in found.notes[0]
        assert {each.name for each in found.judged if each.phase == "backward"} == set(PATHS.values())


def test_a_few_other_names_are_matched_among_themselves(tmp_path):
    a = synthetic.record(tmp_path / "a", synthetic.manifest(2))
    few = {name: name for name in synthetic.SHAPES} | {"block.w": "layer.kernel"}
    b = translate(a, tmp_path / "b", few, params=lambda name, array: array.T if name == "block.w" else array)
    found = compare(a, b)
    assert (
        found.verdict is Verdict.EQUAL and "1 parameter with another name was matched by its values" in found.notes[0]
    )
    assert any(each.name == "output of block" for each in found.judged)
    # If its values differ too, it is another parameter.
    source = synthetic.record(
        tmp_path / "c", synthetic.manifest(2), tamper=lambda *args: args[-1] + (args[3] == "block.w")
    )
    found = compare(a, translate(source, tmp_path / "d", few))
    assert found.verdict is Verdict.INCOMPARABLE and "'block.w' is only in torch" in found.reason


SAME = {name: name for name in PATHS}


def with_ones(name, array):
    return array.reshape(1, 5, 1, 3) if name == "block.w" else array


@pytest.mark.parametrize("world_size", [1, 3])
def test_shapes_that_differ_in_dims_of_size_one_are_compared(tmp_path, world_size):
    a = synthetic.record(tmp_path / "a", synthetic.manifest(world_size))
    b = translate(a, tmp_path / "b", SAME, params=with_ones)
    for order in ((a, b), (b, a)):
        found = compare(*order)
        assert found.verdict is Verdict.EQUAL, found.reason
        assert "block.w: the shapes differ in dims of size 1 alone, and those of torch" in found.notes[0]
        assert {each.name for each in found.judged if each.phase == "update"} == set(SAME)
    views = in_one_naming(a, b)
    assert all(np.array_equal(*(view.full("update", 1, name) for view in (views.a, views.b))) for name in SAME)
    fault = synthetic.only("reduce", "block.w", lambda array: array * 1.5, rank=0)
    source = synthetic.record(tmp_path / "source", synthetic.manifest(world_size), tamper=fault)
    where = compare(a, translate(source, tmp_path / "wrong", SAME, params=with_ones)).first_divergence
    assert where is not None and (where.phase, where.parameter) == ("reduce", "block.w")


def test_dims_of_size_one_do_not_prevent_a_comparison_by_values(tmp_path):
    a = synthetic.record(tmp_path / "a", synthetic.manifest(2))
    b = translate(a, tmp_path / "b", SAME | {"embed": "table"}, params=with_ones)
    found = compare(a, b)
    assert found.verdict is Verdict.EQUAL, found.reason
    assert "1 parameter with another name was matched" in found.notes[0] and "block.w: the shapes" in found.notes[0]


@pytest.fixture
def square(monkeypatch):
    """A manifest with a square matrix in each of two blocks."""
    units = {
        "": {"embed": (4, 3), "bias": (3,)},
        **{f"h.{i}": {f"h.{i}.w": (5, 3), f"h.{i}.s": (4, 4), f"h.{i}.b": (4,)} for i in range(2)},
    }
    monkeypatch.setattr(synthetic, "UNITS", units)
    monkeypatch.setattr(synthetic, "SHAPES", {name: shape for unit in units.values() for name, shape in unit.items()})
    return synthetic.manifest(1, param_map=identity_map(synthetic.SHAPES))


def transposed_under_equal_names(folder, made, tamper=None):
    """A recording, and one with equal names and transposed matrices, but for `embed`."""
    names = {name: name for name in synthetic.SHAPES}
    a = synthetic.record(folder / "a", made)
    source = a if tamper is None else synthetic.record(folder / "source", made, tamper=tamper)
    change = lambda name, array: array.T if name[-1] in "ws" else array  # noqa: E731
    return a, translate(source, folder / "b", names, params=change)


def test_equal_names_with_transposed_matrices_are_matched_by_values(tmp_path, square):
    a, b = transposed_under_equal_names(tmp_path, square)
    for order in ((a, b), (b, a)):
        found = compare(*order)
        assert found.verdict is Verdict.EQUAL, found.reason
        assert "4 parameters with other names or shapes were matched by their values" in found.notes[0]
        assert {each.name for each in found.judged if each.phase == "update"} == set(synthetic.SHAPES)


@pytest.mark.parametrize("name", ["h.0.w", "h.1.s", "embed"])
def test_a_wrong_value_under_an_equal_name_is_located(tmp_path, square, name):
    wrong = synthetic.only("parameters", name, lambda array: array + 1)
    found = compare(*transposed_under_equal_names(tmp_path, square, wrong))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and (where.phase, where.parameter) == ("parameters", name), found.reason
    assert f"1 by their place since their values differ or are equal ({name})" in found.notes[0]


def test_exchanged_parameters_with_equal_names_are_a_bug(tmp_path, square):
    def exchanged(phase, step, rank, name, array):
        other = {"h.0.w": "h.1.w", "h.1.w": "h.0.w"}.get(name)
        return synthetic.initial(other, "float64") if other and phase == "parameters" else array

    found = compare(*transposed_under_equal_names(tmp_path, square, exchanged))
    assert found.verdict is Verdict.BUG and found.first_divergence.parameter == "h.0.w", found.reason


def test_square_matrices_whose_dims_nothing_orders_are_incomparable(tmp_path, square):
    wrong = lambda phase, step, rank, name, array: array + (phase == "parameters" and name[-1] == "s")  # noqa: E731
    found = compare(*transposed_under_equal_names(tmp_path, square, wrong))
    assert found.verdict is Verdict.INCOMPARABLE and "'h.0.w' has shape (5, 3) in torch" in found.reason


def test_equal_names_with_other_values_and_shapes_are_incomparable(tmp_path, square):
    found = compare(*transposed_under_equal_names(tmp_path, square, lambda *args: args[-1] + 1))
    assert found.verdict is Verdict.INCOMPARABLE
    assert "parameter 'h.0.w' has shape (5, 3) in torch, (3, 5) in jax" in found.reason


def test_gates_in_another_order_are_compared(tmp_path, monkeypatch):
    units = {"": {"embed": (4, 3), "bias": (3,)}, "block": {"block.w": (8, 3), "block.k_bias": (8,)}}
    monkeypatch.setattr(synthetic, "UNITS", units)
    monkeypatch.setattr(synthetic, "SHAPES", {name: shape for unit in units.values() for name, shape in unit.items()})

    def with_gates(name, array):
        array = np.concatenate([np.split(array, 4)[i] for i in (2, 0, 1, 3)]) if "block" in name else array
        return array.T

    made = synthetic.manifest(1, param_map=identity_map(synthetic.SHAPES))
    a = synthetic.record(tmp_path / "a", made)
    b = translate(a, tmp_path / "b", PATHS, params=with_gates, modules=MODULES)
    for order in ((a, b), (b, a)):
        found = compare(*order)
        assert found.verdict is Verdict.EQUAL, found.reason
        assert "blocks of block.w; block.k_bias come in another order" in found.notes[0]
        for phase in ("parameters", "backward", "reduce", "state", "update"):
            names = " ".join(each.name for each in found.judged if each.phase == phase)
            assert "block.w" in names and "block.k_bias" in names, phase
    fault = synthetic.only("update", "block.w", lambda array: array * 1.5, rank=0)
    source = synthetic.record(tmp_path / "source", made, tamper=fault)
    where = compare(a, translate(source, tmp_path / "wrong", PATHS, params=with_gates)).first_divergence
    assert where is not None and (where.phase, where.parameter) == ("update", "block.w")


def test_a_fault_is_located_by_the_names_of_torch(tmp_path):
    fault = synthetic.only("reduce", "block.w", lambda array: array * 1.5, rank=1)
    found = compare(*pair(tmp_path, other=fault))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and where is not None
    assert (where.phase, where.parameter, where.unit) == ("reduce", "block.w", "block")

    def wrong(phase, step, rank, name, array):
        return array + 1 if phase == "output" and step == 0 else array  # of the block, and so of the model

    (tmp_path / "other").mkdir()
    where = compare(*pair(tmp_path / "other", other=synthetic.both(wrong, synthetic.OTHER_LOSS))).first_divergence
    assert where is not None and (where.event, where.module) == ("output", "block")


def test_an_activation_in_another_order_of_dims_is_compared(tmp_path):
    found = compare(*pair(tmp_path, activations=lambda name, array: array.T[:, :, None]))
    assert found.verdict is Verdict.EQUAL and not any("shape" in note for note in found.notes)
    assert any(each.name == "output of block" for each in found.judged)


def test_perturbed_runs_have_the_names_too(tmp_path):
    made, sides = synthetic.manifest(1, dtype="float32"), []
    for i, side in enumerate("ab"):
        for number in range(7):
            place = perturbed_run_folder(number) if number else "."
            options = {"tamper": synthetic.jitter(10 * i + number, 1e-6)}
            if side == "a":
                run = synthetic.record(tmp_path / "a" / place, made, **options)
            else:
                source = synthetic.record(tmp_path / f"source{number}", made, **options)
                run = translate(source, tmp_path / "b" / place, PATHS, params=transposed, modules=MODULES)
            sides += [run] if number == 0 else []
    found = compare(*sides)
    assert found.verdict is Verdict.ROUNDING and found.limit_used is not None, found.reason
    view = in_one_naming(*sides).b
    assert [each.full("update", 1, "block.w").shape for each in view.perturbed_runs()] == [(5, 3)] * 6
    assert view.first(1).num_steps == 1 and view.first(1).recorded_steps() == (0,)


def test_other_initial_values_need_a_map(tmp_path):
    a, b = pair(tmp_path, other=lambda *args: args[-1] + 1 if args[0] == "parameters" else args[-1])
    found = compare(a, b)
    assert found.verdict is Verdict.INCOMPARABLE and "crossframe map" in found.reason and "--map" in found.reason
    assert compare(a, b, param_map=MAP).first_divergence.phase == "parameters"


def test_a_wrong_initial_value_is_located(tmp_path):
    found = compare(*pair(tmp_path, other=synthetic.only("parameters", "block.w", lambda array: array[::-1])))
    where = found.first_divergence
    assert found.verdict is Verdict.BUG and (where.phase, where.parameter) == ("parameters", "block.w")
    assert "3 parameters with other names" in found.notes[0] and "1 by their place" in found.notes[0]
    assert "block.w" in found.notes[0]


@pytest.mark.parametrize("side", [0, 1], ids=["a padded", "b padded"])
def test_padding_is_not_compared(tmp_path, side):
    def padded(name, array):
        return np.pad(array, ((0, 2), (0, 0)), constant_values=3.0) if name == "embed" else array

    a, b = pair(tmp_path, params=padded, framework="torch")
    found = compare(*((b, a) if side == 0 else (a, b)))
    assert found.verdict is Verdict.EQUAL, found.reason
    assert ("padding of" in found.notes[0]) == (side == 0)
    assert any(each.name == "output of block" or each.name == "output of layer" for each in found.judged)


def test_a_map_that_does_not_fit_is_refused(tmp_path):
    a, b = pair(tmp_path)
    for first, second in ((a, b), (b, a)):
        wrong = ParamMap(tuple(MapEntry(name, path) for name, path in zip("zywx", PATHS.values(), strict=True)))
        lacking = rf"the map has names \['w', 'x', 'y'.*\], which \S*/{first.directory.name} lacks"
        with pytest.raises(MappingError, match=lacking):
            compare(first, second, param_map=wrong)
    with pytest.raises(MappingError, match=r"the map has paths \['p', 'q'\], which \S*/b lacks"):
        compare(a, b, param_map=ParamMap((MapEntry("embed", "q"), MapEntry("bias", "p"))))
    with pytest.raises(MappingError, match="does not fit shape"):
        compare(a, b, param_map=ParamMap((MapEntry("embed", "tok.table", "a b=2 -> (a b)"),)))
    # Of a map without some parameters these are named.
    found = compare(a, b, param_map=ParamMap(MAP.entries[1:]))
    assert found.verdict is Verdict.INCOMPARABLE and "'embed' is only in torch" in found.reason


def test_a_view_states_units_settings_and_operators_in_the_other_names(tmp_path):
    groups = [{"params": ["layer.kernel", "tok.table"], "lr": 0.5}, {"params": ["layer.shift"], "lr": 0.25}]
    source = synthetic.record(tmp_path / "a", synthetic.manifest(2))
    settings = {"param_groups": groups, "per_rank_statistics": ["layer", "elsewhere"]}
    synthetic.edit_events(
        translate(source, tmp_path / "b", PATHS, params=transposed, modules=MODULES, settings=settings).directory,
        '"use": "output"',
        '"use": "output", "operator": "dot_general"',
    )
    view = in_one_naming(source, Recording.open(tmp_path / "b"), MAP).b
    assert view.units_in_source == {"": "", "block": ""}
    assert view.manifest.settings == {
        "param_groups": [{"params": ["embed", "block.w"], "lr": 0.5}, {"params": ["block.k_bias"], "lr": 0.25}],
        "per_rank_statistics": ["block", "elsewhere"],
    }
    assert view.activations(0) == [(0, "block", "input"), (0, "block", "output"), (0, "", "output")]
    operators = [view.activation_operator(0, rank, 0, "block", "output") for rank in (0, 1)]
    assert operators == ["dot_general", ""]
    assert view.count(1, "block.w") == 2.0 and view.state_slots(1, "block.w") == ("exp_avg",)
    assert [view.is_sketched("reduce", 0, name) for name in PATHS] == [False] * 4
    assert not view.has("reduce", 0, "embed", use="none") and view.first(2).num_steps == 2
    # Of rearranged parameters a rank has the rows that a layout of the core assigns to it.
    rows = {name: [(each.rank, each.start, each.stop) for each in view.ranges("update", 0, name)] for name in PATHS}
    assert rows["embed"] == [(0, 0, 6), (1, 6, 12)] and rows["block.w"] == [(0, 0, 9), (1, 9, 15)]
    assert [(each.rank, each.start, each.stop) for each in view.ranges("backward", 0, "embed")] == [
        (0, 0, 12),
        (1, 0, 12),
    ]


def test_a_view_has_the_disagreements_of_model_ranks_in_the_other_names(tmp_path):
    a, b = pair(tmp_path)
    places = [
        ("reduce", "layer", "layer.kernel", "reduced_grad"),
        ("forward", "layer", "layer", "output"),
        ("forward", "dropped", "dropped", "output"),
    ]
    lines = "".join(
        encode(
            "disagreement",
            place(0, 0, phase, use, unit="", name=name) | {"difference": 0.5, "axis": "tp", "ranks": [1]},
        )
        for phase, _, name, use in places
    )
    step = '{"event": "step", "step": 0'
    synthetic.edit_events(b.directory, step, lines + step)
    found = in_one_naming(a, Recording.open(b.directory), MAP).b.disagreements(3)
    assert [(each.phase, each.unit, each.name, each.use) for each in found] == [
        ("forward", "", "block", "output"),
        ("forward", "", "dropped", "output"),
        ("reduce", "block", "block.w", "reduced_grad"),
    ]


def test_a_joined_parameter_without_some_gradients_has_zeros_there(tmp_path):
    """As a gradient of None is."""
    source = synthetic.record(tmp_path / "a", synthetic.manifest(2))
    joined = ParamMap((MapEntry("both", ("bias", "block.k_bias")),))
    for rank, phases in enumerate((["backward"], ["backward", "reduce"])):  # rank 0 has no piece of it
        lines = (source.directory / f"rank{rank:05d}" / "events.jsonl").read_text().splitlines(keepends=True)
        for phase in phases:
            line = next(each for each in lines if f'"{phase}"' in each and "k_bias" in each)
            synthetic.edit_events(source.directory, line, "", rank=rank)
    view = mapped(Recording.open(source.directory), joined, source.manifest, {})
    for step, expected in ((0, np.zeros(3)), (1, source.full("reduce", 1, "block.k_bias"))):
        found = view.full("reduce", step, "both")
        np.testing.assert_array_equal(found, [*source.full("reduce", step, "bias"), *expected])
    for rank in (0, 1):
        np.testing.assert_array_equal(view.local(0, rank, "both"), [*source.local(0, rank, "bias"), 0, 0, 0])
    assert view.full("reduce", 0, "both").dtype == np.float64


def test_a_view_refuses_unknown_paths_and_sketches_in_another_order(tmp_path, large):
    source = synthetic.record(tmp_path / "a", replace(large, detail="sketch"))
    unknown = ParamMap(tuple(MapEntry(f"x.{i}", f"y.{i}") for i in range(5)))
    with pytest.raises(MappingError) as caught:
        mapped(source, unknown, large, {})
    assert str(caught.value) == (
        f"{source.directory}: the map has paths that are no parameters of this recording: ['y.0', 'y.1', 'y.2', 'y.3']; expected "
        "names such as ['embed', 'bias', 'block.w', 'block.k_bias']"
    )
    view = mapped(source, ParamMap((MapEntry("embed", "embed", "a b -> b a"), MapEntry("shift", "bias"))), large, {})
    assert view.recorded_steps() == ()
    with pytest.raises(
        RecordingError, match=r"a: 'embed' was recorded as a sketch, .*; record again in full \(--detail full"
    ):
        view.sketch("reduce", 0, "embed")
    with pytest.raises(RecordingError, match="a: 'embed' was recorded as a sketch"):
        view.sketch_of(0, "embed", source.ranges("reduce", 0, "embed")[0])


@pytest.fixture
def large(monkeypatch):
    """A manifest whose parameter "embed" is large enough for sketches."""
    units = {"": {"embed": (40, 30), "bias": (3,)}, "block": {"block.w": (5, 3), "block.k_bias": (3,)}}
    monkeypatch.setattr(synthetic, "UNITS", units)
    monkeypatch.setattr(synthetic, "SHAPES", {name: shape for unit in units.values() for name, shape in unit.items()})
    return synthetic.manifest(2, param_map=identity_map(synthetic.SHAPES))


def sketched(folder, made, *, params=lambda name, array: array, tamper=None):
    """A recording in sketches, under other names, of the run that `synthetic.record` writes."""
    source = synthetic.record(folder / "source", made, tamper=tamper)
    return translate(source, folder / "b", PATHS, params=params, modules=MODULES, detail="sketch")


def test_sketches_of_other_names_are_compared(tmp_path, large):
    a = synthetic.record(tmp_path / "a", replace(large, detail="sketch"))
    found = compare(a, sketched(tmp_path, large))
    assert found.verdict is Verdict.EQUAL, found.reason
    assert "4 parameters with other names were matched by their values" in found.notes[0]
    assert {each.name for each in found.judged if each.phase == "update"} == set(PATHS)
    assert any(each.name == "output of block" for each in found.judged)
    (tmp_path / "fault").mkdir()
    wrong = sketched(
        tmp_path / "fault", large, tamper=synthetic.only("reduce", "embed", lambda array: array * 1.5, rank=1)
    )
    found = compare(a, wrong)
    assert found.verdict is Verdict.BUG and found.first_divergence.parameter == "embed"
    assert found.first_divergence.phase == "reduce"


@pytest.mark.parametrize("sides", [("sketch", "sketch"), ("full", "sketch")], ids=["both", "one"])
def test_sketches_are_compared_if_dims_of_size_one_differ(tmp_path, large, sides):
    a = synthetic.record(tmp_path / "a", replace(large, detail=sides[0]))
    for wrong in (False, True):
        fault = synthetic.only("reduce", "embed", lambda array: array * 1.5, rank=1) if wrong else None
        source = synthetic.record(tmp_path / f"source{wrong}", large, tamper=fault)
        reshaped = lambda name, array: array[:, None] if name == "embed" else array  # noqa: E731
        found = compare(a, translate(source, tmp_path / f"b{wrong}", SAME, params=reshaped, detail="sketch"))
        assert found.verdict is (Verdict.BUG if wrong else Verdict.EQUAL), found.reason
        assert not wrong or found.first_divergence.parameter == "embed"


def test_sketches_of_activations_of_other_modules_are_compared(tmp_path, large):
    def wide(factor):
        return lambda phase, step, rank, name, array: (
            np.linspace(1, factor, WHOLE + 1) if (phase, name) == ("output", "block") else array
        )

    a = synthetic.record(tmp_path / "a", replace(large, detail="sketch"), tamper=wide(2))
    same = in_one_naming(a, sketched(tmp_path, large, tamper=wide(2))).b
    sketches = [each.activation_sketch(0, 0, 0, "block", "output") for each in (a, same)]
    assert sketches[0] is not None and sketches[0].equals(sketches[1])
    (tmp_path / "other").mkdir()
    other = sketched(tmp_path / "other", large, tamper=synthetic.both(wide(3), synthetic.OTHER_LOSS))
    where = compare(a, other).first_divergence
    assert where is not None and (where.event, where.module) == ("output", "block")


def test_sketches_in_another_order_are_compared_with_elements_alone(tmp_path, large):
    b = sketched(tmp_path, large, params=transposed)
    found = compare(synthetic.record(tmp_path / "a", large), b)
    assert found.verdict is Verdict.EQUAL and "the names are those of jax" in found.notes[0]
    a = synthetic.record(tmp_path / "sketched", replace(large, detail="sketch"))
    found = compare(a, b)
    assert found.verdict is Verdict.INCOMPARABLE, found.reason
    assert "parameters are rearranged (such as 'embed': a b -> b a)" in found.reason and "--detail full" in found.reason
    with pytest.raises(RecordingError, match="was recorded as a sketch, which depends on the order of its elements"):
        compare(a, b, param_map=MAP)
    assert in_one_naming(a, b, MAP).b.recorded_steps() == ()


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("given", [True, False], ids=["map", "values"])
@pytest.mark.parametrize("num_unused", [2, 1, 0])
def test_parameters_of_one_recording_are_left_out_if_unused(tmp_path, num_unused, given, world_size):
    gone = ("block.k_bias", "bias")

    def unused(phase, step, rank, name, array):
        return array * 0 if phase in ("backward", "reduce") and name in gone[:num_unused] else array

    a = synthetic.record(tmp_path / "a", synthetic.manifest(world_size), tamper=unused)
    paths = {name: path for name, path in PATHS.items() if name not in gone}
    b = translate(a, tmp_path / "b", paths, params=transposed, modules=MODULES)
    param_map = ParamMap(tuple(entry for entry in MAP.entries if entry.name in paths)) if given else None
    for order in ((a, b), (b, a)):
        found = compare(*order, param_map=param_map)
        if num_unused == len(gone):
            assert found.verdict is Verdict.EQUAL, found.reason
            assert "bias; block.k_bias, which only one of them has and does not train" in found.notes[0]
            assert {each.name for each in found.judged if each.phase == "backward"} == paths.keys()
            assert any(each.name == "output of block" for each in found.judged)
        else:
            assert found.verdict is Verdict.INCOMPARABLE and "bias" in found.reason


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_that_one_side_did_not_record_are_not_compared(tmp_path, world_size):
    a = synthetic.record(tmp_path / "a", synthetic.manifest(world_size))
    paths = {name: name for name in PATHS if name != "block.w"}
    b = translate(a, tmp_path / "b", paths)
    assert compare(a, b).verdict is Verdict.INCOMPARABLE
    c = translate(a, tmp_path / "c", paths, settings={"not_recorded": ["block.w", "elsewhere"]})
    for order in ((a, c), (c, a)):
        found = compare(*order)
        assert found.verdict is Verdict.EQUAL, found.reason
        assert found.notes == ("block.w, which jax did not record, is not compared",)
        assert {each.name for each in found.judged if each.phase == "update"} == paths.keys()


def test_a_frozen_parameter_of_one_recording_alone_is_not_compared(tmp_path):
    """One program gives its optimizer all parameters and masks some, the other those that it trains."""

    def frozen(phase, step, rank, name, array):
        is_kept = (phase, name) == ("update", "block.w")
        return synthetic.initial(name, "float64").reshape(array.shape) if is_kept else array

    paths = {name: name for name in PATHS if name != "block.w"}
    whole = synthetic.record(tmp_path / "a", synthetic.manifest(1), tamper=frozen)
    trained = translate(whole, tmp_path / "b", paths)
    for order in ((whole, trained), (trained, whole)):
        found = compare(*order)
        assert found.verdict is Verdict.EQUAL, found.reason
        assert found.notes == ("block.w, which torch alone has and does not train, is not compared",)


def test_forward_alone_leaves_no_parameter_out(tmp_path):
    made = replace(synthetic.manifest(1), settings={"forward_only": True})
    recording = synthetic.record(tmp_path / "a", made, tamper=lambda *args: args[-1] * (args[0] != "reduce"))
    assert unused_params(recording, ["bias"]) == ()
    trained = synthetic.record(tmp_path / "b", tamper=lambda *args: args[-1] * (args[0] != "reduce"))
    assert unused_params(trained, ["bias"]) == ("bias",)


def test_a_parameter_without_a_recorded_gradient_is_unused(tmp_path, monkeypatch):
    own = RecordingWriter.reduced_grads

    def without_bias(writer, step, unit, pieces):
        own(writer, step, unit, {name: piece for name, piece in pieces.items() if name != "bias" or step == used})

    monkeypatch.setattr(RecordingWriter, "reduced_grads", without_bias)
    for used, expected in ((None, ("bias",)), (2, ())):
        recording = synthetic.record(tmp_path / f"{used}")
        assert unused_params(recording, ["bias", "embed"]) == expected

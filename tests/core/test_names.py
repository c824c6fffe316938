"""ParamMap: one to one, round trips of names, axes and JSON, and what does not fit (names.py)."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import MappingError
from crossframe.names import MapEntry, ParamMap, identity_map
from tests.core.random_layouts import QUICK

AXES = st.integers(0, 4).flatmap(lambda dims: st.permutations(range(dims))).map(tuple)
WORDS = st.text("abc.", min_size=1, max_size=4)


@st.composite
def maps(draw: st.DrawFn) -> ParamMap:
    names = draw(st.lists(WORDS, unique=True, max_size=5))
    paths = draw(st.lists(WORDS, unique=True, min_size=len(names), max_size=len(names)))
    return ParamMap(
        tuple(MapEntry(name, path, draw(st.none() | AXES)) for name, path in zip(names, paths, strict=True))
    )


@QUICK
@given(AXES)
def test_axes_there_and_back_are_the_identity(axes):
    entry = MapEntry("w", "k", axes)
    shape = tuple(range(2, 2 + len(axes)))
    flax = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    torch = entry.to_canonical(flax)
    assert torch.shape == entry.canonical_shape(shape) == tuple(shape[axis] for axis in axes)
    assert np.array_equal(entry.from_canonical(torch), flax)
    # numpy.transpose's own meaning, element by element: index i of torch's dim d is index i of flax's dim axes[d].
    for index in np.ndindex(torch.shape):
        at = [0] * len(axes)
        for dim, axis in enumerate(axes):
            at[axis] = index[dim]
        assert torch[index] == flax[tuple(at)]


def test_axes_that_are_not_their_own_inverse():
    entry = MapEntry("conv.weight", "conv.kernel", (3, 2, 0, 1))
    assert entry.inverse_axes == (2, 3, 1, 0)
    assert entry.canonical_shape((5, 6, 7, 8)) == (8, 7, 5, 6)
    assert entry.from_canonical(np.empty((8, 7, 5, 6))).shape == (5, 6, 7, 8)


def test_no_axes_leave_an_array_alone():
    entry, array = MapEntry("b", "b"), np.arange(6).reshape(2, 3)
    assert entry.to_canonical(array) is array and entry.from_canonical(array) is array
    assert entry.canonical_shape((2, 3)) == (2, 3) and entry.inverse_axes is None


def test_axes_that_do_not_fit_a_shape_are_refused():
    entry = MapEntry("fc.weight", "fc.kernel", (1, 0))
    for shape in ((2,), (2, 3, 4)):
        with pytest.raises(MappingError, match=r"'fc.weight'.*\(1, 0\).*'fc.kernel'"):
            entry.canonical_shape(shape)


@QUICK
@given(maps())
def test_names_and_json_round_trip(pmap):
    assert ParamMap.from_json(json.loads(json.dumps(pmap.to_json()))) == pmap
    for entry in pmap.entries:
        assert pmap.by_name[entry.name] is entry and pmap.by_path[entry.path] is entry
    assert list(pmap.by_name) == [entry.name for entry in pmap.entries]
    assert list(pmap.by_path) == [entry.path for entry in pmap.entries]
    pmap.check(pmap.by_name, pmap.by_path)


@QUICK
@given(maps(), st.sets(WORDS), st.sets(WORDS))
def test_a_map_fits_exactly_its_own_names_and_paths(pmap, names, paths):
    fits = names == set(pmap.by_name) and paths == set(pmap.by_path)
    if fits:
        pmap.check(names, paths)
    else:
        with pytest.raises(MappingError):
            pmap.check(names, paths)


def test_what_is_missing_and_what_is_there_for_nothing_is_listed():
    pmap = ParamMap((MapEntry("a.w", "a.k"), MapEntry("b.w", "b.k")))
    with pytest.raises(MappingError) as error:
        pmap.check(["c.w", "a.w", "C.w"], ["b.k"])
    assert str(error.value) == (
        "the map does not fit the models; not in the map, by name: ['C.w', 'c.w']; "
        "in the map but not in the model, by name: ['b.w']; in the map but not in the model, by path: ['a.k']"
    )
    with pytest.raises(MappingError, match=r"not in the map, by path: \['x'\]$"):
        pmap.check(["a.w", "b.w"], ["b.k", "a.k", "x"])


def test_a_map_is_one_to_one():
    with pytest.raises(MappingError, match=r"twice as name: \['a', 'c'\]"):
        ParamMap(tuple(MapEntry(name, f"{name}{i}") for i, name in enumerate("cacab")))
    with pytest.raises(MappingError, match=r"twice as path: \['k'\]"):
        ParamMap((MapEntry("a", "k"), MapEntry("b", "k")))


def test_the_identity_map():
    assert identity_map(["a", "b"]).entries == (MapEntry("a", "a"), MapEntry("b", "b"))
    with pytest.raises(MappingError, match="twice"):
        identity_map(["a", "a"])


@pytest.mark.parametrize(
    "axes", [(0, 0), (1, 2), (-1, 0), (0.0, 1.0), (False, True), [1, 0], 1, "10", ("0", 1), {0: 1}]
)
def test_axes_that_are_no_permutation_are_refused_by_name(axes):
    with pytest.raises(MappingError, match=r"'w': expected a permutation"):
        MapEntry("w", "k", axes)


@pytest.mark.parametrize(
    "rows", [None, 3, "abc", {"a": 1}, [["a", "b"]], [3], ["abc"], [["a", "b", 7]], [[1, "b", None]]]
)
def test_json_that_is_no_map_is_refused(rows):
    with pytest.raises(MappingError):
        ParamMap.from_json(rows)


@pytest.mark.parametrize("entries", [[MapEntry("a", "b")], (MapEntry("a", "b"), 3), (3, MapEntry("a", "b")), None, 3])
def test_a_map_is_a_tuple_of_entries(entries):
    with pytest.raises(MappingError, match="a tuple of MapEntry"):
        ParamMap(entries)


@pytest.mark.parametrize(
    ("name", "path", "missing"), [("", "p", "name"), ("n", "", "path"), (None, "p", "name"), ("n", 3, "path")]
)
def test_an_entry_needs_a_name_and_a_path(name, path, missing):
    with pytest.raises(MappingError, match=f"an entry needs a {missing}: expected a non-empty string"):
        MapEntry(name, path)


def test_what_does_not_fit_is_listed_in_order():
    names = [f"p{i}" for i in range(20)]
    with pytest.raises(MappingError) as caught:
        identity_map(names).check(["q", *"abcdefgh"], reversed(names))
    assert str(caught.value) == (
        f"the map does not fit the models; not in the map, by name: {[*'abcdefgh', 'q']}; "
        f"in the map but not in the model, by name: {sorted(names)}"
    )
    with pytest.raises(MappingError) as caught:
        ParamMap(tuple(MapEntry(name, f"{name}{i}") for i in range(2) for name in reversed(names)))
    assert str(caught.value) == f"a map is one to one, but these stand twice as name: {sorted(names)}"

"""ParamMap: one to one, round trips of names, axes and JSON, and what does not fit (names.py)."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.errors import MappingError
from crossframe.param_map import (
    MapEntry,
    ParamMap,
    attention,
    conv,
    embedding,
    from_heads,
    identity_map,
    linear,
    norm,
    to_heads,
)
from crossframe.rearrange import Rearrangement
from tests.core.helpers.random_layouts import QUICK

AXES = st.integers(1, 4).flatmap(lambda dims: st.permutations(range(dims))).map(tuple)


def transposing(axes):
    return Rearrangement.transposing(axes).text


WORDS = st.text("abc.", min_size=1, max_size=4)


@st.composite
def maps(draw: st.DrawFn) -> ParamMap:
    names = draw(st.lists(WORDS, unique=True, max_size=5))
    paths = draw(st.lists(WORDS, unique=True, min_size=len(names), max_size=len(names)))
    entries = []
    for name, path in zip(names, paths, strict=True):
        joined = draw(st.sampled_from((path, (path,), (path, f"{path}2"))))
        pattern = draw(st.none() | AXES.map(transposing) | st.sampled_from(("i h w=3 -> (h w) i", "w -> 1 1 w")))
        rows = draw(st.sampled_from((None, (2, 1)))) if len(joined) == 2 and isinstance(joined, tuple) else None
        entries.append(MapEntry(name, joined, pattern, rows))
    return ParamMap(tuple(entries))


@QUICK
@given(AXES)
def test_axes_there_and_back_are_the_identity(axes):
    entry = MapEntry("w", "k", transposing(axes))
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
    entry = MapEntry("conv.weight", "conv.kernel", "h w i o -> o i h w")
    assert entry.axes == (3, 2, 0, 1)
    assert entry.canonical_shape((5, 6, 7, 8)) == (8, 7, 5, 6)
    assert entry.from_canonical(np.empty((8, 7, 5, 6))).shape == (5, 6, 7, 8)


def test_no_axes_leave_an_array_alone():
    entry, array = MapEntry("b", "b"), np.arange(6).reshape(2, 3)
    assert entry.to_canonical(array) is array and entry.from_canonical(array) is array
    assert entry.canonical_shape((2, 3)) == (2, 3) and entry.axes == ()


@pytest.mark.parametrize(
    ("entry", "joined", "leaf"),
    [
        (MapEntry("w", "k"), None, (6, 2)),
        (MapEntry("w", "k", "i o -> o i"), None, (2, 6)),
        (MapEntry("w", "k", "i h w=3 -> (h w) i"), 0, (2, 2, 3)),
        (MapEntry("w", "k", "(h w=3) i -> (h w) i"), 0, (6, 2)),
        (MapEntry("w", "k", "o h w=2 -> o (h w)"), 1, (6, 1, 2)),
    ],
)
def test_a_canonical_array_is_written_into_its_leaf(entry, joined, leaf):
    array = np.arange(12.0).reshape(6, 2)
    written = np.zeros(entry.leaf_shape(array.shape, "k"))
    entry.write(written, array, "k")
    assert written.shape == leaf and np.array_equal(entry.to_canonical(written), array)
    assert entry.joined_dim == joined


def test_axes_that_do_not_fit_a_shape_are_refused():
    entry = MapEntry("fc.weight", "fc.kernel", "i o -> o i")
    for shape in ((2,), (2, 3, 4)):
        with pytest.raises(MappingError, match=r"'fc.weight'.*'fc.kernel'.*expected 2 dims for 'i o -> o i'"):
            entry.canonical_shape(shape)


@QUICK
@given(maps())
def test_names_and_json_round_trip(pmap):
    assert ParamMap.from_json(json.loads(json.dumps(pmap.to_json()))) == pmap
    for entry in pmap.entries:
        assert pmap.by_name[entry.name] is entry and all(pmap.by_path[path] is entry for path in entry.paths)
    assert list(pmap.by_name) == [entry.name for entry in pmap.entries]
    assert list(pmap.by_path) == [path for entry in pmap.entries for path in entry.paths]
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
    with pytest.raises(MappingError, match=r"path 'k' occurs twice, for \['a', 'b'\]"):
        ParamMap((MapEntry("a", "k"), MapEntry("b", "k")))


def test_the_identity_map():
    assert identity_map(["a", "b"]).entries == (MapEntry("a", "a"), MapEntry("b", "b"))
    with pytest.raises(MappingError, match="twice"):
        identity_map(["a", "a"])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        pytest.param("i o", "expected a pattern such as", id="no arrow"),
        pytest.param(3, "expected a pattern such as", id="no text"),
        pytest.param("i o -> o", "each axis once on each side", id="lost axis"),
        pytest.param("i i -> i i", "each axis once on each side", id="repeated axis"),
        pytest.param("(h w) -> h w", "state the sizes of all but one of h w", id="unknown sizes"),
        pytest.param("h w=2 -> (h w=3)", "two sizes", id="two sizes"),
        pytest.param("(h w=2 -> h w", "not closed", id="not closed"),
        pytest.param("h) -> h", r"unexpected '\)'", id="not opened"),
        pytest.param("((h) -> h", r"unexpected '\('", id="nested"),
        pytest.param("h w=0 -> w h", "unexpected '='", id="size 0"),
        pytest.param("2 h -> h 2", "unexpected '2'", id="number"),
        pytest.param("[2/2] h -> h", "expected indices inside the axis", id="index outside"),
        pytest.param("h -> [0/2] h", r"unexpected '\[0/2\]'", id="index after"),
        pytest.param("h[1:1/2] -> h", "expected indices inside the axis", id="empty range"),
        pytest.param("h -> (h[0:1/2] 1)", "padding only of a dim without parentheses", id="padding inside"),
        pytest.param("+ h -> h", r"unexpected '\+'", id="joint before"),
        pytest.param("h -> (+ h +)", r"unexpected '\+'", id="two joints"),
        pytest.param("h=3 w[0:2/4] -> (h w=3)", "axis 'w' has two sizes", id="size of a range"),
    ],
)
def test_invalid_patterns_are_refused_by_name(pattern, message):
    with pytest.raises(MappingError, match=f"'w': .*{message}"):
        MapEntry("w", "k", pattern)


def test_a_pattern_that_does_not_fit_names_shape_and_dim():
    entry = MapEntry("w", "k", "(h w=4) i -> h w i")
    with pytest.raises(
        MappingError, match=r"'w', 'k' of shape \(6, 2\): .* dim \('h', 'w'\) has size 6; correct the map"
    ):
        entry.canonical_shape((6, 2))
    with pytest.raises(MappingError, match=r"dim 1 has size 2"):
        MapEntry("w", "k", "1 i -> i").canonical_shape((2, 3))


def test_halves_and_pairs_of_a_rotary_embedding_are_a_pattern():
    entry = MapEntry("q", "q", "(h pair=3 two=2) i -> (h two pair) i")
    array = np.arange(24).reshape(12, 2)
    moved = entry.to_canonical(array)
    assert moved[:, 0].tolist() == [0, 4, 8, 2, 6, 10, 12, 16, 20, 14, 18, 22]
    assert np.array_equal(entry.from_canonical(moved), array) and entry.leaf_shape((12, 2), "q") == (12, 2)


PORTIONS = [
    pytest.param("[1/3] i o -> o i", (3, 4, 2), lambda x: x[1].T, id="stacked"),
    pytest.param("i [2/3] o -> i o", (4, 3, 2), lambda x: x[:, 2], id="stacked on dim 1"),
    pytest.param("[1/3] [0/3] i -> i", (3, 3, 4), lambda x: x[1, 0], id="stacked twice"),
    pytest.param("i o[4:6/12] -> o i", (5, 12), lambda x: x[:, 4:6].T, id="fused"),
    pytest.param("i h=2 [1/3] w=4 -> (h w) i", (5, 2, 3, 4), lambda x: x[:, :, 1].reshape(5, 8).T, id="interleaved"),
    pytest.param(
        "i (h [1/3] w=4) -> (h w) i",
        (5, 24),
        lambda x: x.reshape(5, 2, 3, 4)[:, :, 1].reshape(5, 8).T,
        id="interleaved in a dim",
    ),
    pytest.param("v[0:5/8] d -> v d", (8, 2), lambda x: x[:5], id="padded array"),
    pytest.param("d v -> v[0:5/8] d", (2, 5), lambda x: np.pad(x.T, ((0, 3), (0, 0))), id="padded parameter"),
]


@pytest.mark.parametrize(("pattern", "shape", "wanted"), PORTIONS)
def test_a_pattern_selects_a_portion(pattern, shape, wanted):
    array, entry = np.random.default_rng(0).normal(size=shape), MapEntry("w", "k", pattern)
    made = entry.to_canonical(array)
    assert np.array_equal(made, wanted(array)) and entry.canonical_shape(shape) == made.shape
    assert entry.leaf_shape(made.shape, "k") == shape
    back = array.copy()
    entry.write(back, made * 2, "k")
    assert np.array_equal(entry.to_canonical(back), made * 2)
    assert (back == array).sum() == array.size - np.count_nonzero(made)
    if entry.selects:
        with pytest.raises(MappingError, match="'w' is a portion of"):
            entry.from_canonical(made)
    with pytest.raises(MappingError, match=r"does not fit shape|expected . dims"):
        entry.canonical_shape((*shape, 7))


@pytest.mark.parametrize(
    ("pattern", "shapes", "rows", "wanted"),
    [
        pytest.param(
            "i h w=4 -> (h + w) i",
            [(5, 3, 4)] * 3,
            None,
            lambda *x: np.stack(x, 2).reshape(5, 36).T,
            id="each head",
        ),
        pytest.param(
            "i (g=2 r) w=4 -> (g + r w) i",
            [(5, 6, 4), (5, 2, 4), (5, 2, 4)],
            (24, 8, 8),
            lambda *x: np.concatenate([each.reshape(5, 2, -1) for each in x], 2).reshape(5, 40).T,
            id="each group of heads",
        ),
        pytest.param("i o -> i (+ o)", [(5, 2), (5, 3)], (2, 3), lambda *x: np.concatenate(x, 1), id="on dim 1"),
        pytest.param("f i -> (f +) i", [(3, 5)] * 2, None, lambda *x: np.stack(x, 1).reshape(6, 5), id="alternating"),
    ],
)
def test_several_arrays_are_joined_inside_a_dim(pattern, shapes, rows, wanted):
    arrays = [np.random.default_rng(i).normal(size=shape) for i, shape in enumerate(shapes)]
    paths = tuple(f"k{i}" for i in range(len(arrays)))
    entry = MapEntry("w", paths, pattern, rows)
    made = entry.to_canonical(*arrays)
    assert np.array_equal(made, wanted(*arrays)) and entry.canonical_shape(*shapes) == made.shape
    for path, array in zip(paths, arrays, strict=True):
        assert np.array_equal(entry.from_canonical(made, path), array)
        assert entry.leaf_shape(made.shape, path) == array.shape


def test_parameters_that_share_a_path_are_written_into_one_array():
    layers = [np.full((2, 3), i + 1.0) for i in range(3)]
    names = {f"h.{i}.w": array for i, array in enumerate(layers)}
    entries = [MapEntry(name, "h.w", f"[{i}/3] i o -> o i") for i, name in enumerate(names)]
    made = ParamMap((*entries, MapEntry("v", "v", "v[0:2/4] -> v"))).from_canonical(names | {"v": np.ones(2)})
    assert np.array_equal(made["h.w"], np.stack([array.T for array in layers])) and made["v"].tolist() == [1, 1, 0, 0]
    assert ParamMap(tuple(entries)).of_path["h.w"] == tuple(entries)
    with pytest.raises(MappingError, match=r"path 'h.w': the portions of .* overlap"):
        ParamMap((entries[0], MapEntry("h.1.w", "h.w", "[0/3] i o -> o i"))).from_canonical(names)
    with pytest.raises(MappingError, match=r"path 'h.w': expected portions of one shape"):
        ParamMap((entries[0], MapEntry("h.1.w", "h.w", "[1/4] i o -> o i"))).from_canonical(names)


@pytest.mark.parametrize(
    ("row", "pattern"),
    [
        (["w", "k", [1, 0]], "a b -> b a"),
        (["w", ["q", "k"], [1, 2, 0], [0, 4], [8, 4]], "a b c -> (b c=4) a"),
        (["w", ["q", "k"], None, [0, 4], None], "a b -> (a b=4)"),
        (["w", "k", [2, 0, 1], [1, 4], None], "a b c -> c (a b=4)"),
        (["w", ["q", "k"], None, None, [8, 4]], None),
        (["w", "k", None], None),
    ],
)
def test_maps_that_state_axes_are_read(row, pattern):
    (entry,) = ParamMap.from_json([row]).entries
    assert entry.pattern == pattern and entry.rows == ((8, 4) if row[-1] == [8, 4] else None)


@pytest.mark.parametrize(
    "row", [["w", "k", [0, 0]], ["w", "k", [1, 0], [0, 0], None], ["w", "k", [1, 0], [1, 2], None]]
)
def test_maps_that_state_invalid_axes_are_refused(row):
    with pytest.raises(MappingError, match="'w': expected"):
        ParamMap.from_json([row])


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
    assert (
        str(caught.value) == f"a map has one entry for each parameter, but these occur twice as name: {sorted(names)}"
    )


# Heads apart, and several arrays as one


@st.composite
def entries(draw: st.DrawFn) -> tuple[MapEntry, list[tuple[int, ...]]]:
    """An entry, and shapes of flax arrays that it fits."""
    num_dims, num_paths = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    axes = draw(st.permutations(range(num_dims)).map(tuple))
    join = draw(st.integers(0, num_dims - 2)) if num_dims > 1 and draw(st.booleans()) else None
    ordered = [draw(st.integers(1, 4)) for _ in range(num_dims)]
    firsts = [draw(st.integers(1, 4)) for _ in range(num_paths)]
    if not draw(st.booleans()):
        firsts = firsts[:1] * num_paths
    per_row = ordered[1] if join == 0 else 1
    rows = tuple(first * per_row for first in firsts) if num_paths > 1 and len(set(firsts)) > 1 else None
    left, _, right = transposing(axes).partition(" -> ")
    names = right.split()
    if join is not None:
        names[join : join + 2] = [f"({names[join]} {names[join + 1]}={ordered[join + 1]})"]
    shapes = []
    for first in firsts:
        shape = [first, *ordered[1:]]
        shapes.append(tuple(shape[axes.index(i)] for i in range(num_dims)))
    return MapEntry("w", tuple(f"k{i}" for i in range(num_paths)), f"{left} -> {' '.join(names)}", rows), shapes


@QUICK
@given(entries())
def test_split_and_joined_there_and_back_are_the_identity(given_entry):
    entry, shapes = given_entry
    arrays = [np.random.default_rng(i).normal(size=shape) for i, shape in enumerate(shapes)]
    canonical = entry.to_canonical(*arrays)
    assert canonical.shape == entry.canonical_shape(*shapes)
    assert canonical.size == sum(array.size for array in arrays)
    for path, array in zip(entry.paths, arrays, strict=True):
        assert entry.leaf_shape(canonical.shape, path) == array.shape
        assert np.array_equal(entry.from_canonical(canonical, path), array)
    back = entry.to_canonical(*(entry.from_canonical(canonical, path) for path in entry.paths))
    assert np.array_equal(back, canonical)


def test_attention_with_heads_apart_computes_what_torchs_does():
    width, heads, head_width = 6, 3, 2
    rng = np.random.default_rng(0)
    x, kernel, bias = (
        rng.normal(size=(5, width)),
        rng.normal(size=(width, heads, head_width)),
        rng.normal(size=(heads, head_width)),
    )
    weight, b = (e.to_canonical(a) for e, a in zip(to_heads("q", "q", head_width), (kernel, bias), strict=True))
    found = (x @ weight.T + b).reshape(5, heads, head_width)
    np.testing.assert_allclose(found, np.einsum("bi,ihd->bhd", x, kernel) + bias, rtol=1e-14, atol=1e-14)
    out = rng.normal(size=(heads, head_width, width))
    weight = from_heads("o", "o", head_width, bias=False)[0].to_canonical(out)
    np.testing.assert_allclose(
        found.reshape(5, -1) @ weight.T, np.einsum("bhd,hdi->bi", found, out), rtol=1e-13, atol=1e-13
    )


def test_query_key_and_value_are_torchs_rows_in_that_order():
    entry = attention("a", "b", head_width=2)[0]
    assert entry.paths == ("b.query.kernel", "b.key.kernel", "b.value.kernel")
    parts = [np.random.default_rng(i).normal(size=(6, 3, 2)) for i in range(3)]
    weight = entry.to_canonical(*parts)
    assert weight.shape == (18, 6)
    for i, part in enumerate(parts):
        assert np.array_equal(weight[6 * i : 6 * i + 6], to_heads("q", "q", 2)[0].to_canonical(part))
    bias = attention("a", "b", head_width=2)[1].to_canonical(*(part[0] for part in parts))
    assert np.array_equal(bias, np.concatenate([part[0].reshape(-1) for part in parts]))


def test_the_tables_of_modules():
    pmap = ParamMap.of(
        embedding("e", "E"), conv("c", "C"), conv("d", "D", dims=1, bias=False), norm("n", "N"), linear("f", "F")
    )
    assert [(e.name, e.path, e.pattern) for e in pmap.entries] == [
        ("e.weight", "E.embedding", None),
        ("c.weight", "C.kernel", "h w i o -> o i h w"),
        ("c.bias", "C.bias", None),
        ("d.weight", "D.kernel", "w i o -> o i w"),
        ("n.weight", "N.scale", None),
        ("n.bias", "N.bias", None),
        ("f.weight", "F.kernel", "i o -> o i"),
        ("f.bias", "F.bias", None),
    ]
    assert len(norm("n", "N", bias=False)) == len(linear("f", "F", bias=False)) == 1


def test_joins_and_splits_that_do_not_fit_are_refused_by_name():
    joined = MapEntry("w", ("a", "b"))
    with pytest.raises(MappingError, match=r"'w': expected shapes that differ in dim 0 alone"):
        joined.canonical_shape((2, 3), (2, 4))
    with pytest.raises(MappingError, match=r"'w': expected shapes that differ in dim 0 alone"):
        joined.canonical_shape((), ())
    with pytest.raises(MappingError, match=r"'w': expected as many rows of \('a', 'b'\), got \(2, 4\)"):
        joined.canonical_shape((2, 3), (4, 3))
    with pytest.raises(MappingError, match=r"'w': expected \(4, 2\) rows"):
        MapEntry("w", ("a", "b"), rows=(4, 2)).canonical_shape((2, 3), (4, 3))
    with pytest.raises(MappingError, match=r"'w': expected one for each of \('a', 'b'\), got 1"):
        joined.canonical_shape((2, 3))
    with pytest.raises(MappingError, match=r"'w': expected one for each"):
        joined.to_canonical(np.ones(2))
    with pytest.raises(MappingError, match=r"'w': expected one of the paths \('a', 'b'\), got None"):
        joined.from_canonical(np.ones(4))


@pytest.mark.parametrize(
    ("path", "rows"), [("k", (2,)), (("a", "b"), (2,)), (("a", "b"), (2, 0)), (("a", "b"), [1, 2])]
)
def test_rows_that_are_none_are_refused(path, rows):
    with pytest.raises(MappingError, match=r"'w': expected as rows"):
        MapEntry("w", path, rows=rows)


def test_paths_that_are_none_are_refused():
    for path in ((), ("a", ""), ["a"]):
        with pytest.raises(MappingError, match=r"an entry needs a path: expected a non-empty string, or a tuple"):
            MapEntry("w", path)  # type: ignore[arg-type]
    with pytest.raises(MappingError, match="path 'b' occurs twice"):
        ParamMap((MapEntry("v", "b"), MapEntry("w", ("a", "b"))))


def test_from_canonical_gives_arrays_by_path():
    entries = (MapEntry("qkv", ("q", "k", "v")), MapEntry("fc.weight", "fc.kernel", "i o -> o i"))
    arrays = {"qkv": np.arange(6.0), "fc.weight": np.arange(6.0).reshape(3, 2), "buffer": np.zeros(1)}
    leaves = ParamMap(entries).from_canonical(arrays)
    assert list(leaves) == ["q", "k", "v", "fc.kernel"]
    np.testing.assert_array_equal(leaves["k"], [2, 3])
    np.testing.assert_array_equal(leaves["fc.kernel"], arrays["fc.weight"].T)
    with pytest.raises(MappingError, match=r"these are missing: \['qkv'\]"):
        ParamMap(entries).from_canonical({"fc.weight": arrays["fc.weight"]})

"""Patterns of rearrangements: against index arithmetic of their own, there and back, and what is refused."""

import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest

from crossframe.errors import MappingError
from crossframe.rearrange import Rearrangement

# A pattern, the shape before it, the shape after it, and which element (of axes by name) lies at which index before and after.
CASES = {
    "a b -> b a": ((2, 3), (3, 2), "ab", "ab", "ba"),
    "(a b=2) c -> b c a": ((6, 4), (2, 4, 3), "abc", "a*2+b,c", "b,c,a"),
    "a b=2 1 -> 1 (b a)": ((3, 2, 1), (1, 6), "ab", "a,b,0", "0,b*3+a"),
    "(a b=2 c=3) -> c (b a)": ((12,), (3, 4), "abc", "a*6+b*3+c", "c,b*2+a"),
}


def sizes_of(pattern):
    return {"a b -> b a": (2, 3), "(a b=2) c -> b c a": (3, 2, 4), "a b=2 1 -> 1 (b a)": (3, 2)}.get(pattern, (2, 2, 3))


@pytest.mark.parametrize("pattern", CASES)
def test_each_element_moves_to_its_place(pattern):
    before, after, names, place, other = CASES[pattern]
    form, array = Rearrangement(pattern), np.arange(math.prod(before)).reshape(before)
    assert form.shape(before) == after == form(array).shape
    for values in itertools.product(*map(range, sizes_of(pattern))):
        axes = dict(zip(names, values, strict=True))
        first, second = (
            tuple(eval(each, {}, axes) for each in (text.split(",") if "," in text or len(text) > 3 else text))
            for text in (place, other)
        )
        assert form(array)[second] == array[first]
    assert np.array_equal(form.back(form(array)), array) and form.back_shape(after) == before
    assert np.array_equal(form.inverse(form(array)), array)
    target = np.zeros_like(array)
    form.write(target, form(array))
    assert np.array_equal(target, array)


@pytest.mark.parametrize(
    ("pattern", "axes", "identity"),
    [
        ("a b c -> b c a", (1, 2, 0), False),
        ("a b -> a b", (0, 1), True),
        ("a -> a", (0,), True),
        ("(a b=2) -> a b", None, False),
        ("a 1 -> a", None, False),
        ("a[0:2/4] b -> a b", None, False),
        ("a b -> a[0:2/4] b", None, False),
        ("a b -> a + b", None, False),
    ],
)
def test_patterns_that_transpose(pattern, axes, identity):
    assert (Rearrangement(pattern).axes, Rearrangement(pattern).is_identity) == (axes, identity)


def test_a_portion_of_an_array():
    array = np.arange(4 * 6 * 2).reshape(4, 6, 2)
    form = Rearrangement("[1/4] b[2:5/6] c -> c b")
    assert form.selects and not form.pads and Rearrangement("[1/4] b -> b").selects
    assert np.array_equal(form(array), array[1, 2:5].T) and form.shape((4, 6, 2)) == (2, 3)
    assert form.sizes((4, 6, 2))["b"] == 3 and form.sizes((4, 6, 2))["c"] == 2
    assert np.array_equal(form.back(form(array)).reshape(3, 2), array[1, 2:5]) and form.back_shape((2, 3)) == (4, 6, 2)
    target = np.zeros_like(array)
    form.write(target, -form(array))
    expected = np.zeros_like(array)
    expected[1, 2:5] = -array[1, 2:5]
    assert np.array_equal(target, expected)
    form = Rearrangement("(a=3 b[1:3/4]) -> (a b)")
    assert form(np.arange(12)).tolist() == [1, 2, 5, 6, 9, 10] and form.shape((12,)) == (6,)


def test_blocks_in_another_order():
    array = np.arange(2 * 6).reshape(2, 6)
    form = Rearrangement("i (g{1,2,0} h) -> (g h) i")
    expected = array.T[[2, 3, 4, 5, 0, 1]]
    assert np.array_equal(form(array), expected) and form.shape((2, 6)) == (6, 2) and form.orders == {"g": (1, 2, 0)}
    assert np.array_equal(form.back(expected), array) and form.back_shape((6, 2)) == (2, 6)
    assert np.array_equal(form.inverse(expected), array) and np.array_equal(form.inverse.inverse(array), expected)
    assert np.array_equal(expected.reshape(-1)[form.places((2, 6), np.arange(12))], np.arange(12))
    assert form.axes is None and not form.is_reshape and not form.selects
    assert not Rearrangement("g{1,2,0} -> g").is_identity and not Rearrangement("g{1,2,0} -> g").is_reshape
    # Of one of several stacked arrays, as the two biases that keras has in one.
    portion, target = Rearrangement("[1/2] (g{1,2,0} h) -> (g h)"), np.zeros_like(array)
    assert portion(array).tolist() == [8, 9, 10, 11, 6, 7]
    portion.write(target, portion(array))
    assert np.array_equal(target[1], array[1]) and not target[0].any()


def test_a_parameter_with_padding():
    form, array = Rearrangement("a b -> b[1:3/6] a"), np.arange(1, 9).reshape(4, 2)
    assert form.pads and not form.selects
    whole = form.join([form(array)])
    assert whole.shape == form.join_shapes([(2, 4)]) == (6, 4) and whole.dtype == array.dtype
    assert np.array_equal(whole[1:3], array.T) and not whole[0].any() and not whole[3:].any()
    assert np.array_equal(form.unpadded(whole), array.T) and form.unpadded_shape((6, 4)) == (2, 4)
    assert form.without_padding == "a b -> b a"
    assert form.trimming((6, 4)) == "a[1:3/6] b -> a b"
    assert np.array_equal(Rearrangement(form.trimming((6, 4)))(whole), array.T)


def test_several_arrays_are_joined():
    form = Rearrangement("i h w=2 -> (h + w) i")
    arrays = [np.arange(start, start + 4 * 3 * 2).reshape(4, 3, 2) for start in (0, 100)]
    parts = [form(array) for array in arrays]
    whole = form.join(parts)
    assert whole.shape == form.join_shapes([part.shape for part in parts]) == (12, 4) and form.joint_dim == 0
    for head in range(3):
        for side, array in enumerate(arrays):
            assert np.array_equal(whole[4 * head + 2 * side : 4 * head + 2 * side + 2], array[:, head].T)
    for start, part in zip((0, 6), parts, strict=True):
        assert np.array_equal(form.split(whole, start, start + 6), part)
        assert form.split_shape((12, 4), start, start + 6) == (6, 4)
    plain = Rearrangement("a b -> b a")
    assert np.array_equal(plain.join([np.ones((2, 3)), np.zeros((1, 3))]), [[1] * 3, [1] * 3, [0] * 3])
    assert plain.join_shapes([(2, 3), (1, 3)]) == (3, 3) and plain.joint_dim == 0
    behind = Rearrangement("a b -> a + b")
    assert behind.joint_dim == 1 and behind.right == (("a",), (), ("b",))
    joined = behind.join([behind(np.ones((2, 3))), behind(np.zeros((2, 3)))])
    assert joined.tolist() == [[[1] * 3, [0] * 3]] * 2


class Foreign:
    """An array of another library, with what `Rearrangement.join` needs of the array API."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def reshape(self, shape):
        return Foreign(self.values.reshape(shape))

    def __array_namespace__(self):
        return SimpleNamespace(
            concat=lambda arrays, axis=0: Foreign(np.concatenate([each.values for each in arrays], axis)),
            zeros=lambda shape, dtype: Foreign(np.zeros(shape, dtype)),
        )


@pytest.mark.parametrize("pattern", ["a b c -> a[1:3/6] b c", "a b c -> a b + c"])
def test_arrays_of_other_libraries_are_joined_there(pattern):
    form = Rearrangement(pattern)
    parts = [form(np.arange(24, dtype=np.float32).reshape(2, 3, 4))] * (1 if form.pads else 2)
    joined = form.join([Foreign(part) for part in parts])
    np.testing.assert_array_equal(joined.values, form.join(parts), strict=True)


@pytest.mark.parametrize(
    ("pattern", "shapes"),
    [
        pytest.param("a b -> (a +) b", [(3, 5), (6, 5)], id="before the joint"),
        pytest.param("(a b=2) c -> (a + b) c", [(6, 5), (8, 5)], id="before the joint, in its dim"),
        pytest.param("a b -> a + b", [(3, 5), (3, 6)], id="after its dim"),
        pytest.param("a b -> a b", [(3, 5), (3, 6)], id="in another dim"),
    ],
)
def test_parts_with_other_shapes_beside_the_joint_raise(pattern, shapes):
    form = Rearrangement(pattern)
    parts = [form(np.ones(shape)) for shape in shapes]
    for join in (lambda: form.join(parts), lambda: form.join_shapes([part.shape for part in parts])):
        with pytest.raises(MappingError, match=f"{re.escape(pattern)}.* got shapes {re.escape(str(parts[0].shape))}, "):
            join()


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (7, "expected a pattern such as 'i o -> o i', got 7"),
        ("a b", "expected a pattern such as 'i o -> o i'"),
        ("a -> b -> a", "expected a pattern such as 'i o -> o i'"),
        ("a b -> a", "expected each axis once on each side"),
        ("a a -> a a", "expected each axis once on each side"),
        ("a -> a a", "expected each axis once on each side"),
        ("(a b) -> a b", "state the sizes of all but one of a b, as in w=4"),
        ("a b -> (a b)", "state the sizes of all but one of a b, as in w=4"),
        ("((a b=2)) -> a b", "unexpected '('"),
        ("a) -> a", "unexpected ')'"),
        ("(a -> a", "a parenthesis is not closed"),
        ("a + b -> a b", "unexpected '+'"),
        ("a b -> + a + b", "unexpected '+'"),
        ("a -> a [1/2]", "unexpected '[1/2]'"),
        ("(a 1) -> a", "unexpected '1'"),
        ("a ! -> a", "unexpected '!'"),
        ("a=2 -> a=3", "axis 'a' has two sizes"),
        ("a[2:2/4] -> a", "'a[2:2/4]': expected indices inside the axis"),
        ("a[2:5/4] -> a", "expected indices inside the axis"),
        ("[4/4] a -> a", "expected indices inside the axis"),
        ("a{0,2} -> a", "'a{0,2}': expected each index of the axis once"),
        ("a{1,1} -> a", "expected each index of the axis once"),
        ("a -> a{1,0}", "before the arrow"),
        ("a b=2 -> (a[0:2/4] b)", "padding only of a dim without parentheses"),
    ],
)
def test_invalid_patterns_are_refused(pattern, said):
    with pytest.raises(MappingError) as refused:
        Rearrangement(pattern)
    assert said in str(refused.value)


def test_the_ends_of_axes_are_inside():
    assert Rearrangement("a[3:4/4] -> a")(np.arange(4)).tolist() == [3]
    assert Rearrangement("[3/4] a -> a")(np.arange(8).reshape(4, 2)).tolist() == [6, 7]
    assert Rearrangement("[0/1] [1/2] a -> a")(np.arange(8).reshape(1, 2, 4)).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize(
    ("pattern", "shape", "said"),
    [
        ("a b -> b a", (2, 3, 4), "expected 2 dims for 'a b -> b a', got shape (2, 3, 4)"),
        ("(a b=4) -> a b", (6,), "does not fit shape (6,): dim ('a', 'b') has size 6"),
        ("a=3 -> a 1", (4,), "does not fit shape (4,)"),
        ("a 1 -> a", (4, 2), "dim 1 has size 2"),
        ("a[0:2/4] -> a", (5,), "does not fit shape (5,)"),
    ],
)
def test_arrays_of_other_shapes_are_refused(pattern, shape, said):
    form = Rearrangement(pattern)
    assert not form.fits(shape)
    with pytest.raises(MappingError) as refused:
        form(np.zeros(shape))
    assert said in str(refused.value)
    with pytest.raises(MappingError, match="expected 1 dims after"):
        Rearrangement("a b=2 -> (a b)").back(np.zeros((2, 2)))


def test_joins_are_those_of_sizes_and_positions():
    form = Rearrangement("i h w=4 -> (h w) i")
    assert form.fits((12, 3, 4)) and form.joins((12, 3, 4)) == {((3, 0), (4, 1))}
    assert Rearrangement("h w=4 -> (w h)").joins((3, 4)) == {((4, 1), (3, 0))}
    assert Rearrangement("a b -> b a").joins((3, 4)) == set()

"""The numpy reference: shards, gathers, writes back and reduces; padding takes no part (R05, R20, R26, R29, R32)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.dtypes import numpy_dtype
from crossframe.errors import MeshError, ParamError
from crossframe.layout import FlatLayout, Layout, PerParamLayout, views
from crossframe.params import ParamSpec
from crossframe.reduction import DivideFactors, divide_factors, mean_factors
from crossframe.reference import ReferenceUnit, all_gather, all_reduce, reduce_scatter
from tests.core.helpers.random_layouts import LAYOUTS, QUICK, elements, poison, random_arrays, same_bits, specs


def pair(world_size: int, dtype: str = "float64") -> list[Layout]:
    """Uneven layouts of both kinds."""
    params = specs([(5, 3), (4,)], dtype)
    return [
        FlatLayout(params, world_size, True),
        FlatLayout(params, world_size, False),
        PerParamLayout(params, world_size),
    ]


@QUICK
@given(LAYOUTS, st.integers(0, 9))
def test_R04_R07_shard_gather_and_view_give_every_bit_back_on_every_rank(layout, seed):
    arrays = random_arrays(layout, seed)
    unit = ReferenceUnit(layout, arrays)
    gathered = unit.gather()
    assert len(gathered) == layout.world_size
    for buffer, full in zip(gathered, unit.unshard(), strict=True):
        assert buffer.shape == (layout.gathered_numel,)
        assert list(full) == list(arrays)
        for name, array in arrays.items():
            assert same_bits(full[name], array)
            assert not np.shares_memory(full[name], buffer)


@QUICK
@given(LAYOUTS)
def test_R04_R06_every_element_of_a_shard_is_what_the_layout_says(layout):
    arrays = random_arrays(layout)
    dtype = numpy_dtype(layout.dtype)
    values = {"alignment": dtype.type(42), "divisibility": dtype.type(42), "shard": dtype.type(0)}
    unit, zeros = ReferenceUnit(layout, arrays), ReferenceUnit(layout, arrays, fill=False)
    for rank in range(layout.world_size):
        told = elements(layout, rank)
        for shard, fills in ((unit.shards[rank], values), (zeros.shards[rank], dict.fromkeys(values, dtype.type(0)))):
            expected = [fills[e] if isinstance(e, str) else arrays[e[0]].reshape(-1)[e[1]] for e in told]
            assert same_bits(shard, np.array(expected, dtype))
        pieces = unit.pieces(unit.shards[rank], rank)
        assert list(pieces) == list(dict.fromkeys(e[0] for e in told if not isinstance(e, str)))
        for name, piece in pieces.items():
            own = [arrays[name].reshape(-1)[e[1]] for e in told if not isinstance(e, str) and e[0] == name]
            assert same_bits(piece, np.array(own, dtype))


@QUICK
@given(LAYOUTS)
def test_R05_poisoned_padding_reaches_no_parameter_and_no_piece(layout):
    arrays = random_arrays(layout)
    unit = ReferenceUnit(layout, arrays)
    poison(layout, unit.shards)
    for full in unit.unshard():
        assert all(same_bits(full[name], array) for name, array in arrays.items())
    for rank, shard in enumerate(unit.shards):
        clean = ReferenceUnit(layout, arrays).shards[rank]
        for name, piece in unit.pieces(shard, rank).items():
            assert same_bits(piece, unit.pieces(clean, rank)[name])
        assert sum(map(len, unit.pieces(shard, rank).values())) == sum(p.numel for p in layout.pieces(rank))


@QUICK
@given(LAYOUTS)
def test_R05_R20_writeback_leaves_padding_as_it_is_and_what_the_user_does_to_buffers_persists_no_other_way(layout):
    arrays = random_arrays(layout)
    unit = ReferenceUnit(layout, arrays)
    poison(layout, unit.shards, 7.0)
    before = [shard.copy() for shard in unit.shards]
    for buffer in unit.gather():
        buffer[:] = 1
    for full in unit.unshard():
        for array in full.values():
            array[...] = 1
    assert all(map(same_bits, unit.shards, before))
    unit.writeback([arrays] * layout.world_size)
    assert all(map(same_bits, unit.shards, before))


@QUICK
@given(LAYOUTS)
def test_R20_ranks_that_wrote_different_values_merge_slice_by_slice(layout):
    unit = ReferenceUnit(layout, random_arrays(layout))
    dtype = numpy_dtype(layout.dtype)
    unit.writeback(
        [{p.name: np.full(p.shape, rank + 1, dtype) for p in layout.params} for rank in range(layout.world_size)]
    )
    owner = {e: rank + 1 for rank in range(layout.world_size) for e in elements(layout, rank) if not isinstance(e, str)}
    for full in unit.unshard():
        for param in layout.params:
            expected = [owner[param.name, i] for i in range(param.numel)]
            assert full[param.name].reshape(-1).astype(int).tolist() == expected


@QUICK
@given(LAYOUTS, st.data())
def test_R26_R29_reduce_is_the_mean_element_by_element_in_rank_order(layout, data):
    """Bit for bit beside plain loops: divide, add in rank order, divide; every step rounds to the dtype."""
    world, dtype = layout.world_size, numpy_dtype(layout.dtype)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    absent = data.draw(st.sets(st.tuples(st.integers(0, world - 1), st.sampled_from(layout.params)), max_size=3))
    grads = [
        {p.name: rng.standard_normal(p.shape).astype(dtype) for p in layout.params if (rank, p) not in absent}
        for rank in range(world)
    ]
    factors = divide_factors(world)

    def divided(value, factor):
        return dtype.type(np.promote_types(dtype, np.float32).type(value) / factor)

    def mean(name, i):
        parts = [g[name].reshape(-1)[i] if name in g else dtype.type(0) for g in grads]
        total = divided(parts[0], factors.before)
        for part in parts[1:]:
            total = dtype.type(total + divided(part, factors.before))
        return divided(total, factors.after)

    unit = ReferenceUnit(layout, random_arrays(layout))
    reduced = unit.reduce(grads, factors)
    assert len(reduced) == world
    for rank, shard in enumerate(reduced):
        expected = [dtype.type(0) if isinstance(e, str) else mean(*e) for e in elements(layout, rank)]
        assert same_bits(shard + dtype.type(0), np.array(expected, dtype) + dtype.type(0))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_R05_R26_the_mean_of_small_integers_is_exact_and_padding_adds_nothing_to_a_norm(world_size, dtype):
    for layout in pair(world_size, dtype):
        # Rank r has r + 1 times world_size in every element: the mean is (world_size + 1) * world_size / 2.
        grads = [
            {p.name: np.full(p.shape, (rank + 1) * world_size, numpy_dtype(dtype)) for p in layout.params}
            for rank in range(world_size)
        ]
        mean = (world_size + 1) * world_size / 2
        for factors in (mean_factors(world_size, "float32"), DivideFactors(1.0, float(world_size))):
            reduced = ReferenceUnit(layout, grads[0]).reduce(grads, factors)
            assert sum(float((shard.astype(np.float64) ** 2).sum()) for shard in reduced) == 19 * mean**2
            for array in views(layout, np.concatenate(reduced)).values():
                assert (array.astype(np.float64) == mean).all()


def test_R29_a_parameter_that_no_rank_uses_gets_zeros():
    layout = pair(3)[0]
    grads = [{"p0": np.ones((5, 3))}, {"p0": np.ones((5, 3)), "p1": None}, {}]
    reduced = views(
        layout, np.concatenate(ReferenceUnit(layout, random_arrays(layout)).reduce(grads, mean_factors(3, "float32")))
    )
    assert (reduced["p0"] == 2 / 3).all() and (reduced["p1"] == 0).all()


def test_low_precision_divides_in_float32_and_rounds_once():
    layout = FlatLayout((ParamSpec("w", (1,), "bfloat16"),), 1, keep_original=False)
    one = np.ones(1, numpy_dtype("bfloat16"))
    (reduced,) = ReferenceUnit(layout, {"w": one}).reduce([{"w": one}], DivideFactors(3.0, 1.0))
    assert reduced.dtype == numpy_dtype("bfloat16")
    assert reduced[0] == numpy_dtype("bfloat16").type(np.float32(1) / np.float32(3))


def test_R32_sums_are_taken_in_rank_order_in_the_arrays_own_dtype():
    arrays = [np.array([value] * 3, np.float32) for value in (1e8, 1.0, -1e8)]
    assert [total.tolist() for total in all_reduce(arrays)] == [[0.0] * 3] * 3  # 1 is lost in 1e8
    assert [total.tolist() for total in all_reduce([arrays[0], arrays[2], arrays[1]])] == [[1.0] * 3] * 3
    assert [part.tolist() for part in reduce_scatter(arrays)] == [[0.0]] * 3
    assert arrays[0].tolist() == [1e8] * 3


def test_collectives_give_every_rank_memory_of_its_own():
    arrays = [np.array([1.0, 2.0]), np.array([30.0, 40.0])]
    assert [part.tolist() for part in reduce_scatter(arrays)] == [[31.0], [42.0]]
    for collective, expected in ((all_gather, [1, 2, 30, 40]), (all_reduce, [31, 42])):
        first, second = collective(arrays)
        assert first.tolist() == second.tolist() == expected
        first[:] = -1
        assert second.tolist() == expected
        assert [array.tolist() for array in arrays] == [[1, 2], [30, 40]]


def test_wrong_arrays_are_refused_and_nothing_is_written():
    for layout in pair(2):
        arrays = random_arrays(layout)
        unit = ReferenceUnit(layout, arrays)
        before = [shard.copy() for shard in unit.shards]
        turned = {name: np.ones(array.shape[::-1]) for name, array in arrays.items()}
        ones = {name: np.ones(array.shape) for name, array in arrays.items()}
        for call in (unit.writeback, lambda grads, unit=unit: unit.reduce(grads, divide_factors(2))):
            with pytest.raises(ParamError, match=r"'p0': expected shape \(5, 3\), got \(3, 5\) on rank 1"):
                call([ones, turned])
            for number in (0, 1, 3):
                with pytest.raises(MeshError, match=f"arrays of 2 ranks, got those of {number}"):
                    call([ones] * number)
        with pytest.raises(ParamError, match=r"'p1': expected shape \(4,\), got nothing on rank 0"):
            unit.writeback([{"p0": ones["p0"]}, ones])
        with pytest.raises(ParamError, match="got nothing"):
            ReferenceUnit(layout, {})
        with pytest.raises(ParamError, match=r"\(3, 5\)"):
            ReferenceUnit(layout, turned)
        assert all(map(same_bits, unit.shards, before))
        with pytest.raises(MeshError, match="from 0 to 1"):
            unit.pieces(unit.shards[0], 2)

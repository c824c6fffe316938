"""The norm over all gradients and the clipping coefficient (R30): each element once, padding never, on any mesh."""

# pyright: reportArgumentType=false

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossframe.dtypes import unit_roundoff
from crossframe.errors import MeshError, ParamError, UsageError
from crossframe.grad_norm import check_max_norm, check_norm_type, norm_dtype
from crossframe.layout import FlatLayout, PerParamLayout
from crossframe.mesh import MeshSpec
from crossframe.reference import ReferenceUnit
from crossframe.reference.grad_norm import Op, clip_coefficient, combine, norm_reductions, partial
from tests.core.helpers.random_layouts import QUICK, params, poison

ORDERS = st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.5, math.inf])


@st.composite
def models(draw):
    """Units by name: mesh and layout, on one world size; a unit may be sharded, hybrid or replicated."""
    world_size = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    units = {}
    for i in range(draw(st.integers(1, 4))):
        shard = draw(st.sampled_from([size for size in range(1, world_size + 1) if world_size % size == 0]))
        owned = draw(params(min_dims=1))
        flat = FlatLayout(owned, shard, draw(st.booleans()))
        units[f"u{i}"] = (
            MeshSpec(shard=shard, replicate=world_size // shard),
            draw(st.sampled_from([flat, PerParamLayout(owned, shard)])),
        )
    return units


def sharded(units, values):
    """Each unit's gradients on the shards of one group, NaN in all padding."""
    references = {name: ReferenceUnit(layout, values[name]) for name, (_, layout) in units.items()}
    for name, reference in references.items():
        poison(units[name][1], reference.shards)
    return references


def norm_on(rank, units, references, order, dtype):
    """The norm as one rank computes it, and the reductions that it took."""
    reductions = norm_reductions({name: mesh for name, (mesh, _) in units.items()}, rank, order)
    totals = []
    for reduction in reductions:
        partials = []
        for other in reduction.group:
            held = []
            for name in reduction.units:
                shard_rank = units[name][0].coordinate(other)[1]
                held += references[name].pieces(references[name].shards[shard_rank], shard_rank).values()
            partials.append(partial(held, order, dtype))
        total = partials[0]
        for part in partials[1:]:
            total = {Op.SUM: np.add, Op.MAX: np.maximum}[reduction.op](total, part)
        totals.append(total)
    return combine(totals, order, dtype), reductions


def every_element(values):
    return np.concatenate([array.astype(np.float64).reshape(-1) for unit in values.values() for array in unit.values()])


def random_gradients(units, seed, *, whole):
    rng = np.random.default_rng(seed)
    return {
        name: {
            spec.name: (rng.integers(-8, 9, spec.shape) if whole else rng.standard_normal(spec.shape)).astype(
                ReferenceUnit(layout, {s.name: np.zeros(s.shape) for s in layout.params}).shards[0].dtype
            )
            for spec in layout.params
        }
        for name, (_, layout) in units.items()
    }


@QUICK
@given(models(), st.sampled_from([1.0, 2.0, math.inf]), st.integers(0, 99))
def test_R30_each_element_counts_once_on_every_rank_of_any_mesh_exactly(units, order, seed):
    values = random_gradients(units, seed, whole=True)  # sums of small integers are exact in float32
    dtype = norm_dtype(layout.dtype for _, layout in units.values())
    everything = every_element(values)
    powers = {
        1.0: np.abs(everything).sum(),
        2.0: np.sqrt((everything**2).sum()),
        math.inf: np.abs(everything).max(initial=0),
    }
    references = sharded(units, values)
    for rank in range(next(iter(units.values()))[0].world_size):
        norm, _ = norm_on(rank, units, references, order, dtype)
        assert norm.dtype == dtype
        assert norm == powers[order].astype(dtype) if order != 2 else abs(norm - powers[order]) <= np.spacing(norm)


@QUICK
@given(models(), ORDERS, st.integers(0, 99))
def test_R30_the_norm_of_any_order_is_that_of_the_whole_vector(units, order, seed):
    values = random_gradients(units, seed, whole=False)
    dtype = norm_dtype(layout.dtype for _, layout in units.values())
    everything = every_element(values)
    expected = (
        np.abs(everything).max(initial=0) if order == math.inf else (np.abs(everything) ** order).sum() ** (1 / order)
    )
    # Every power has a relative error of a few roundings, a sum of n of them at most n more; the root divides the error of
    # the sum by the order and adds a few of its own.
    roundings = (everything.size + 8) / min(order, 1e9) + 8
    for rank in range(next(iter(units.values()))[0].world_size):
        norm, _ = norm_on(rank, units, sharded(units, values), order, dtype)
        assert abs(float(norm) - expected) <= roundings * unit_roundoff(dtype) * expected


@QUICK
@given(models(), ORDERS)
def test_R30_ranks_take_the_same_reductions_in_one_order_and_agree_on_their_groups(units, order):
    meshes = {name: mesh for name, (mesh, _) in units.items()}
    world_size = next(iter(meshes.values())).world_size
    found = [norm_reductions(meshes, rank, order) for rank in range(world_size)]
    for rank, reductions in enumerate(found):
        assert [reduction.units for reduction in reductions] == [reduction.units for reduction in found[0]]
        assert sorted(name for reduction in reductions for name in reduction.units) == sorted(meshes)
        assert {reduction.op for reduction in reductions} == {Op.MAX if order == math.inf else Op.SUM}
        for i, reduction in enumerate(reductions):
            assert rank in reduction.group
            for other in reduction.group:  # a collective that two ranks see differently hangs
                assert found[other][i] == reduction


def test_R30_replicated_parameters_need_no_collective():
    (reduction,) = norm_reductions({"": MeshSpec(shard=1, replicate=4)}, rank=3)
    assert tuple(reduction.group) == (3,)


def test_R30_a_hybrid_unit_reduces_over_its_shard_group_alone():
    (reduction,) = norm_reductions({"": MeshSpec(shard=2, replicate=2)}, rank=3)
    assert tuple(reduction.group) == (2, 3)


def test_R30_computed_in_float32_at_least_and_in_float64_where_any_gradient_is():
    assert norm_dtype([]) == norm_dtype(["float16"]) == norm_dtype(["bfloat16", "float8_e4m3fn"]) == "float32"
    assert norm_dtype(["float32", "float64", "bfloat16"]) == "float64"
    low = np.full(300, 1.0, np.float16)  # in float16 a sum of 300 squares of 20 overflows
    assert float(combine([partial([low * 20], 2, "float32")], 2, "float32")) == pytest.approx(
        20 * math.sqrt(300), rel=1e-6
    )
    assert partial([], 2, "float64").dtype == np.float64  # a rank without gradients still speaks the others' dtype


@pytest.mark.parametrize("order", [0.5, 1, 2, math.inf, "inf"])
def test_R30_nothing_has_norm_0_and_is_not_scaled(order):
    for arrays in ([], [np.zeros((0, 3), np.float32)], [np.zeros(3, np.float32)]):
        norm = combine([partial(arrays, order, "float32")], order, "float32")
        assert norm == 0
        assert clip_coefficient(norm, 1.0) == 1
    assert combine([], order, "float32") == 0


@pytest.mark.parametrize("order", [1, 2, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_R30_what_is_not_finite_is_seen_wherever_it_lies(order, bad):
    for place in range(3):
        arrays = [np.ones(2, np.float32) for _ in range(3)]
        arrays[place][1] = bad
        norm = combine([partial(arrays[:1], order, "float32"), partial(arrays[1:], order, "float32")], order, "float32")
        assert not math.isfinite(norm)
        assert math.isnan(norm) == math.isnan(bad)


def test_R30_norms_out_of_range_do_not_warn():
    with np.errstate(all="raise"):
        large, small = (partial([np.full(2, size, np.float32)], 2, "float32") for size in (1e30, 1e-30))
        assert (large, small) == (math.inf, 0)
        assert combine([np.float32(3e38)] * 2, 2, "float32") == math.inf
        assert combine([np.float32(1e-30)], 0.5, "float32") == 0
        assert clip_coefficient(np.float32(3e38), 1e-30) == 0
        assert math.isnan(clip_coefficient(np.float32(math.inf), math.inf))


def test_R30_the_coefficient_is_at_most_1_and_in_the_norms_dtype():
    for dtype in (np.float32, np.float64):
        assert clip_coefficient(dtype(0.5), 1.0) == 1
        assert clip_coefficient(dtype(8), 2.0) == dtype(2.0) / (dtype(8) + dtype(1e-6)) < 0.25
        assert clip_coefficient(dtype(8), 2.0).dtype == dtype
        assert clip_coefficient(dtype(1), 1.0) < 1  # the 1e-6 is there
        assert clip_coefficient(dtype(3), 0) == 0
        assert clip_coefficient(dtype(3), math.inf) == 1
        assert clip_coefficient(dtype(3), 1e300) == 1
        assert clip_coefficient(dtype(math.inf), 1.0) == 0
        assert math.isnan(clip_coefficient(dtype(math.nan), 1.0))
        assert math.isnan(clip_coefficient(dtype(math.inf), math.inf))


def test_R30_clipped_gradients_have_the_norm_asked_for():
    arrays = [np.arange(5.0), np.arange(7.0)]
    norm = combine([partial(arrays, 2, "float64")], 2, "float64")
    scaled = [array * clip_coefficient(norm, 1.5) for array in arrays]
    after = combine([partial(scaled, 2, "float64")], 2, "float64")
    assert after == pytest.approx(1.5 * norm / (norm + 1e-6), rel=1e-12)


@pytest.mark.parametrize("order", [0, -1, -math.inf, math.nan, None, True, "2", "max", [2], 2j])
def test_R30_orders_without_meaning_are_refused(order):
    with pytest.raises(UsageError, match="norm_type"):
        check_norm_type(order)
    for use in (
        lambda: partial([], order, "float32"),
        lambda: combine([], order, "float32"),
        lambda: norm_reductions({}, 0, order),
    ):
        with pytest.raises(UsageError, match="norm_type"):
            use()


@pytest.mark.parametrize("bound", [-1, -1e-9, math.nan, None, True, "1", [1.0]])
def test_R30_bounds_without_meaning_are_refused(bound):
    with pytest.raises(UsageError, match="max_norm"):
        check_max_norm(bound)
    with pytest.raises(UsageError, match="max_norm"):
        clip_coefficient(np.float32(1), bound)


def test_R30_numbers_of_every_kind_are_taken():
    assert check_norm_type(np.float32(2)) == check_norm_type(np.int64(2)) == check_norm_type(2) == 2.0
    assert check_max_norm(0) == 0.0
    assert check_max_norm(10**400) == math.inf
    for check in (check_max_norm, check_norm_type):
        with pytest.raises(UsageError, match="an int that cannot be written out"):
            check(-(10**5000))


def test_R30_meshes_that_do_not_fit_are_refused():
    with pytest.raises(MeshError, match=r"4: 'a', 3: 'b'"):
        norm_reductions({"a": MeshSpec(4), "b": MeshSpec(3)}, 0)
    with pytest.raises(MeshError, match="rank"):
        norm_reductions({"a": MeshSpec(4)}, 4)
    for wrong in (None, [MeshSpec(2)], {"a": 2}):
        with pytest.raises(MeshError, match="MeshSpec"):
            norm_reductions(wrong, 0)  # type: ignore[arg-type]
    with pytest.raises(ParamError, match="int8"):
        norm_dtype(["int8"])

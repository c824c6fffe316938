"""Divide factors (R26, R27)."""

import math
from fractions import Fraction

import pytest

from crossframe.api import Api
from crossframe.errors import MeshError, PlanError
from crossframe.mesh import MeshSpec
from crossframe.reduction import (
    DivideFactors,
    Missing,
    custom_factors,
    divide_factors,
    factors_of,
    mean_factors,
    missing_grad,
    reduction_steps,
)

SIZES = range(1, 65)


def split(num_ranks: int) -> tuple[Fraction, Fraction]:
    """The first power of two that does not divide the number of ranks, or is no less than what it leaves."""
    before = next(f for f in (2**i for i in range(8)) if num_ranks % f or Fraction(num_ranks, f) <= f)
    return Fraction(before), Fraction(num_ranks, before)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_R26_the_factors_are_the_rules_and_their_product_is_the_number_of_ranks(num_ranks):
    factors = divide_factors(num_ranks)
    assert (factors.before, factors.after) == split(num_ranks)
    assert factors.before * factors.after == num_ranks
    assert type(factors.before) is type(factors.after) is float
    # The division is split: neither side takes more than the square root, but for the last doubling.
    assert factors.before < 2 * math.sqrt(num_ranks)
    assert factors.after < num_ranks or num_ranks == 1


@pytest.mark.parametrize(
    ("num_ranks", "before", "after"),
    [(1, 1, 1), (2, 2, 1), (3, 2, 1.5), (4, 2, 2), (5, 2, 2.5), (6, 4, 1.5), (7, 2, 3.5), (8, 4, 2), (9, 2, 4.5),
     (12, 4, 3), (16, 4, 4), (20, 8, 2.5), (24, 8, 3), (32, 8, 4), (36, 8, 4.5), (48, 8, 6), (64, 8, 8)],
)  # fmt: skip
def test_R26_the_values_that_torch_takes(num_ranks, before, after):
    assert divide_factors(num_ranks) == DivideFactors(before, after)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_R26_fsdp2_averages_in_the_collective_for_two_dtypes_and_splits_for_the_others(num_ranks):
    for dtype in ("float32", "bfloat16"):
        assert mean_factors(num_ranks, dtype) == DivideFactors(1.0, num_ranks, averaged=True)
    for dtype in ("float64", "float16"):
        assert mean_factors(num_ranks, dtype) == divide_factors(num_ranks)


def test_R27_a_custom_factor_divides_once_ahead_of_the_sum():
    assert custom_factors(3) == DivideFactors(3.0, 1.0)
    assert custom_factors(0.25) == DivideFactors(0.25, 1.0)
    assert type(custom_factors(3).before) is float


@pytest.mark.parametrize("factor", [0, -1.0, math.nan, math.inf, "2", None, True, [2.0]])
def test_R27_a_custom_factor_that_cannot_divide_is_refused(factor):
    with pytest.raises(PlanError, match="above 0"):
        custom_factors(factor)


@pytest.mark.parametrize("num_ranks", [0, -2, 2.0, True, None, "2"])
def test_a_number_of_ranks_that_is_none_is_refused(num_ranks):
    for factors in (divide_factors, lambda n: mean_factors(n, "float32")):
        with pytest.raises(MeshError, match="world size"):
            factors(num_ranks)


CAST, BEFORE, SCATTER, BETWEEN = "CAST_TO_REDUCED", "DIVIDE_BEFORE", "REDUCE_SCATTER", "DIVIDE_BETWEEN"
REST = ["DIVIDE_AFTER", "CAST_TO_STORED", "ACCUMULATE"]


@pytest.mark.parametrize(
    ("mesh", "api", "expected"),
    [
        (MeshSpec(1), Api.FSDP1, [CAST, BEFORE, BETWEEN, *REST]),
        (MeshSpec(4), Api.FSDP1, [CAST, BEFORE, SCATTER, BETWEEN, *REST]),
        (MeshSpec(4), Api.FSDP2, [CAST, BEFORE, SCATTER, BETWEEN, *REST]),
        (MeshSpec(1, 4), Api.FSDP1, [CAST, BEFORE, BETWEEN, "ALL_REDUCE", *REST]),
        (MeshSpec(2, 2), Api.FSDP1, [CAST, BEFORE, SCATTER, BETWEEN, "ALL_REDUCE", *REST]),
        (MeshSpec(2, 2), Api.FSDP2, [CAST, BEFORE, SCATTER, BETWEEN, "ADD_PARTIAL", "ALL_REDUCE", *REST]),
    ],
)
def test_R28_the_order_of_a_reduction(mesh, api, expected):
    assert [step.name for step in reduction_steps(mesh, api)] == expected


def test_R28_a_sum_over_replicas_that_is_put_off_ends_with_what_waits():
    steps = [step.name for step in reduction_steps(MeshSpec(2, 2), Api.FSDP2, all_reduce=False)]
    assert steps == [CAST, BEFORE, SCATTER, BETWEEN, "ADD_PARTIAL", "KEEP_PARTIAL"]
    with pytest.raises(PlanError, match="use no_sync"):
        reduction_steps(MeshSpec(2, 2), Api.FSDP1, all_reduce=False)
    with pytest.raises(PlanError, match="one replica of 2 shards"):
        reduction_steps(MeshSpec(2), Api.FSDP2, all_reduce=False)
    for wrong in ((4, Api.FSDP1), (MeshSpec(4), "fsdp1")):
        with pytest.raises(PlanError, match="expected a MeshSpec and an Api"):
            reduction_steps(*wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("api", Api)
@pytest.mark.parametrize(("shard", "replicate"), [(1, 1), (4, 1), (1, 4), (3, 2), (2, 3), (8, 8)])
def test_R26_the_factors_of_a_mesh_multiply_to_its_ranks(shard, replicate, api, dtype):
    mesh = MeshSpec(shard, replicate)
    factors = factors_of(mesh, api, dtype)
    assert factors.before * factors.between * factors.after == mesh.world_size
    if api is Api.FSDP2 and dtype in ("float32", "bfloat16") and replicate > 1:
        # Each collective averages over its own ranks.
        assert (factors.before, factors.between, factors.after) == (1, shard, replicate)
    elif api is Api.FSDP1 or dtype in ("float64", "float16"):
        assert (factors.before, factors.between) == (divide_factors(mesh.world_size).before, 1)


def test_R26_where_collectives_only_sum_the_ranks_divide_after_the_last_of_them():
    assert factors_of(MeshSpec(3, 2), Api.FSDP2, "float32", sum_only=True) == DivideFactors(1.0, 6.0)
    assert factors_of(MeshSpec(3, 2), Api.FSDP1, "float32", sum_only=True) == divide_factors(6)


def test_R27_a_custom_factor_takes_the_place_of_the_number_of_ranks_in_either_api():
    for api in Api:
        assert factors_of(MeshSpec(3, 2), api, "float32", 5.0) == DivideFactors(5.0, 1.0)
        # Where a sum may overflow it is split as the number of ranks is: by the power of two about its root.
        assert factors_of(MeshSpec(3, 2), api, "float16", 8.0) == DivideFactors(4.0, 2.0)
    with pytest.raises(PlanError, match="above 0"):
        factors_of(MeshSpec(2), Api.FSDP1, "float32", 0.0)


def test_a_number_of_replicas_that_does_not_divide_the_ranks_is_refused():
    with pytest.raises(PlanError, match="divides the 6 ranks, got 4"):
        mean_factors(6, "float32", replicate=4)
    with pytest.raises(MeshError):
        mean_factors(6, "float32", replicate=0)


def test_R29_what_an_unused_parameter_gets():
    found = {(api, used): missing_grad(api, unit_used=used) for api in Api for used in (True, False)}
    assert [key for key, missing in found.items() if missing is Missing.ZEROS] == [(Api.FSDP1, True)]
    assert set(found.values()) == {Missing.ZEROS, Missing.NONE}

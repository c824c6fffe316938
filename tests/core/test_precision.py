"""Which dtype is used where (R33, R34)."""

import pytest

from crossframe.errors import ParamError
from crossframe.precision import Precision, resolve_precision


@pytest.mark.parametrize(
    ("policy", "gathered", "reduced"),
    [
        ((None, None), "float32", "float32"),
        (("bfloat16", None), "bfloat16", "bfloat16"),
        ((None, "float64"), "float32", "float64"),
        (("bfloat16", "float32"), "bfloat16", "float32"),
    ],
)
def test_R33_shards_stay_in_full_precision_and_reduce_dtype_defaults_to_param_dtype(policy, gathered, reduced):
    assert resolve_precision("float32", *policy) == Precision("float32", gathered, reduced, "float32")


def test_R34_dtypes_that_change_nothing_are_as_if_not_given():
    plain = resolve_precision("float32")
    assert resolve_precision("float32", "float32") == plain
    assert resolve_precision("float32", None, "float32") == plain
    assert resolve_precision("float32", "bfloat16", "bfloat16") == resolve_precision("float32", "bfloat16")


@pytest.mark.parametrize("dtypes", [("int8",), ("float32", "int8"), ("float32", None, "int8")])
def test_unknown_dtypes_are_refused(dtypes):
    with pytest.raises(ParamError, match="unknown dtype 'int8'"):
        resolve_precision(*dtypes)

"""Which dtype is used where (R33, R34)."""

# pyright: reportArgumentType=false

import pytest

from crossframe.api import Api
from crossframe.errors import ParamError, PlanError
from crossframe.precision import Precision, PrecisionPolicy, resolve_precision


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


def test_R33_the_sharded_gradient_is_in_full_precision_unless_it_is_kept_low():
    assert resolve_precision("float32", "bfloat16", "float16").kept == "float32"
    assert resolve_precision("float32", "bfloat16", "float16", keep_low_precision_grads=True).kept == "bfloat16"
    assert [resolve_precision("float32", p).is_mixed for p in (None, "float32", "bfloat16")] == [False, False, True]


def test_R15_unreduced_gradients_wait_in_the_dtype_of_the_api():
    mixed = resolve_precision("float32", "bfloat16", "float64")
    assert [mixed.accumulated(api) for api in (Api.FSDP1, Api.FSDP2)] == ["bfloat16", "float64"]


@pytest.mark.parametrize("cast", [None, True, False])
@pytest.mark.parametrize("cast_root", [True, False])
def test_R35_inputs_are_cast_where_the_api_and_the_policy_say(cast, cast_root):
    policy = PrecisionPolicy("bfloat16", cast_forward_inputs=cast, cast_root_forward_inputs=cast_root)
    expected = {
        (Api.FSDP1, True): bool(cast) or cast_root,
        (Api.FSDP1, False): bool(cast),
        (Api.FSDP2, True): cast is not False,
        (Api.FSDP2, False): cast is not False,
    }
    for (api, is_root), casts in expected.items():
        assert policy.input_dtype("float32", api, is_root=is_root) == ("bfloat16" if casts else "float32")
        for kept in ("int64", "bool", "uint32"):
            assert policy.input_dtype(kept, api, is_root=is_root) == kept
        assert PrecisionPolicy().input_dtype("float32", api, is_root=is_root) == "float32"


def test_R33_R35_buffers_and_outputs_follow_their_own_dtypes():
    policy = PrecisionPolicy(buffer_dtype="float16", output_dtype="float64")
    assert [policy.buffer(dtype) for dtype in ("float32", "float8_e5m2", "int64")] == ["float16", "float16", "int64"]
    assert (policy.result_dtype("float32"), policy.result_dtype("int32")) == ("float64", "int32")
    assert (PrecisionPolicy().buffer("float32"), PrecisionPolicy().result_dtype("bfloat16")) == ("float32", "bfloat16")


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"])
def test_a_policy_of_an_unknown_dtype_is_refused(field):
    for wrong in ("int8", 16, ["float32"]):
        with pytest.raises(ParamError, match="unknown dtype"):
            PrecisionPolicy(**{field: wrong})


@pytest.mark.parametrize("field", ["keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"])
def test_a_policy_of_choices_that_are_no_bools_is_refused(field):
    for wrong in ("yes", 1, *([] if field == "cast_forward_inputs" else [None])):
        with pytest.raises(PlanError, match=field):
            PrecisionPolicy(**{field: wrong})


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype"])
def test_R33_a_policy_that_drops_imaginary_parts_raises(name):
    policy = PrecisionPolicy(**{name: "float32"})
    with pytest.raises(PlanError, match=f"{name}='float32': a parameter is complex64.*a policy without {name}"):
        policy.resolve("complex64")
    assert PrecisionPolicy().resolve("complex64").reduced == "complex64"

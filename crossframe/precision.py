"""The dtype of every tensor in each stage of a step (R33, R34), and the casts of inputs and outputs (R35).

Shards keep full precision. Gathered parameters, compute and reductions may have a lower one:

    shard (stored) -> cast -> gathered -> compute -> gradient (gathered) -> cast -> reduced -> cast -> sharded gradient (kept)
"""

from dataclasses import dataclass

from crossframe.api import Api
from crossframe.dtypes import COMPLEX, itemsize, numpy_dtype
from crossframe.errors import PlanError
from crossframe.quoting import quote


@dataclass(frozen=True)
class PrecisionPolicy:
    """The user's choice: the fields of torch's `MixedPrecision` (FSDP1) and `MixedPrecisionPolicy` (FSDP2).

    Attributes:
        param_dtype: dtype of gathered parameters and of compute; None: the stored dtype.
        reduce_dtype: dtype in which gradients are summed; None: `param_dtype`.
        buffer_dtype: dtype of floating buffers; None: unchanged. FSDP1 only.
        output_dtype: dtype of a unit's floating outputs; None: unchanged. FSDP2 only.
        keep_low_precision_grads: leave the sharded gradient in the dtype of compute. FSDP1 only.
        cast_forward_inputs: cast the floating inputs of each unit to `param_dtype`; None: False in FSDP1, True in FSDP2.
        cast_root_forward_inputs: cast the floating inputs of the root. FSDP1 only; in FSDP2 the root is like any other unit.

    Raises:
        ParamError: an unknown dtype.
        PlanError: an option that must be a bool is not.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    buffer_dtype: str | None = None
    output_dtype: str | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool | None = None
    cast_root_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for dtype in (self.param_dtype, self.reduce_dtype, self.buffer_dtype, self.output_dtype):
            if dtype is not None:
                numpy_dtype(dtype)
        for name in ("keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "cast_forward_inputs"):
                raise PlanError(f"{name}: expected a bool, got {quote(value)}")

    def resolve(self, stored: str) -> "Precision":
        """The dtypes of parameters that are stored in `stored`."""
        return resolve_precision(
            stored, self.param_dtype, self.reduce_dtype, keep_low_precision_grads=self.keep_low_precision_grads
        )

    def input_dtype(self, dtype: str, api: Api, *, is_root: bool) -> str:
        """The dtype to which an input is cast before a unit's forward (R35). Integers and keys are not cast.

        >>> policy = PrecisionPolicy("bfloat16")
        >>> [policy.input_dtype("float32", api, is_root=False) for api in Api]
        ['float32', 'bfloat16']
        >>> policy.input_dtype("int64", Api.FSDP2, is_root=True)
        'int64'
        """
        return _cast(dtype, self.param_dtype if self.casts_inputs(api, is_root=is_root) else None)

    def casts_inputs(self, api: Api, *, is_root: bool) -> bool:
        """Whether floating inputs of a unit are cast to `param_dtype` (R35)."""
        casts = api is Api.FSDP2 if self.cast_forward_inputs is None else self.cast_forward_inputs
        return casts or (api is Api.FSDP1 and is_root and self.cast_root_forward_inputs)

    def result_dtype(self, dtype: str) -> str:
        """The dtype to which an output is cast after a unit's forward."""
        return _cast(dtype, self.output_dtype)

    def buffer(self, dtype: str) -> str:
        """The dtype to which a buffer is cast."""
        return _cast(dtype, self.buffer_dtype)


def _cast(dtype: str, wanted: str | None) -> str:
    # By name, since buffers and inputs may have floating dtypes that cannot be sharded, such as float8_e5m2.
    return wanted if wanted is not None and dtype.startswith(("float", "bfloat")) else dtype


@dataclass(frozen=True)
class Precision:
    """Resolved dtypes of one bucket.

    Attributes:
        stored: dtype of the shards.
        gathered: dtype of the all-gather, of compute, and of the gradients that backward computes.
        reduced: dtype in which gradients are sent and summed.
        kept: dtype of the sharded gradient that the optimizer gets.
    """

    stored: str
    gathered: str
    reduced: str
    kept: str

    def __post_init__(self) -> None:
        for dtype in (self.stored, self.gathered, self.reduced, self.kept):
            itemsize(dtype)

    @property
    def is_mixed(self) -> bool:
        """Whether gathered parameters are a copy in another dtype, in which edits would be lost (R19, R21)."""
        return self.gathered != self.stored

    def accumulated(self, api: Api) -> str:
        """The dtype of full gradients that wait for a later microbatch (R15)."""
        return self.gathered if api is Api.FSDP1 else self.reduced


def resolve_precision(
    stored: str,
    param_dtype: str | None = None,
    reduce_dtype: str | None = None,
    *,
    keep_low_precision_grads: bool = False,
) -> Precision:
    """The dtypes of parameters that are stored in `stored`: `reduce_dtype` defaults to `param_dtype` (R33).

    A `param_dtype` equal to the stored dtype, or a `reduce_dtype` equal to the `param_dtype`, has no effect (R34).

    >>> resolve_precision("float32", param_dtype="bfloat16")
    Precision(stored='float32', gathered='bfloat16', reduced='bfloat16', kept='float32')
    """
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if stored in COMPLEX and dtype is not None:
            raise PlanError(
                f"{name}={quote(dtype)}: a parameter is {stored}, whose imaginary parts would be lost; shard its module as a "
                f"unit of its own, with a policy without {name}"
            )
    gathered = param_dtype or stored
    kept = gathered if keep_low_precision_grads else stored
    return Precision(stored, gathered, reduce_dtype or gathered, kept)

"""The dtype of every tensor at every stage (R33, R34)."""

from dataclasses import dataclass

from crossframe.dtypes import itemsize


@dataclass(frozen=True)
class Precision:
    """Resolved dtypes of one bucket.

    `stored` is the dtype of shards and of the gradients that the optimizer sees, `gathered` that of the all-gather and of
    compute, `reduced` that in which gradients travel and are summed.
    """

    stored: str
    gathered: str
    reduced: str

    def __post_init__(self) -> None:
        for dtype in (self.stored, self.gathered, self.reduced):
            itemsize(dtype)


def resolve_precision(stored: str, param_dtype: str | None = None, reduce_dtype: str | None = None) -> Precision:
    """What a policy means for parameters stored in `stored`: `reduce_dtype` defaults to `param_dtype` (R33).

    >>> resolve_precision("float32", param_dtype="bfloat16")
    Precision(stored='float32', gathered='bfloat16', reduced='bfloat16')
    """
    gathered = param_dtype or stored
    return Precision(stored, gathered, reduce_dtype or gathered)

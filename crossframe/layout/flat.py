"""The flat layout (R02-R06): the parameters of a unit in one flat parameter that is cut into equal shards."""

from dataclasses import dataclass
from functools import cached_property

from crossframe.dtypes import itemsize
from crossframe.errors import LayoutError
from crossframe.layout.line import LineLayout
from crossframe.layout.padding import Padding
from crossframe.quoting import quote

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class FlatLayout(LineLayout):
    """A flat parameter and its shards.

    Attributes:
        params: the parameters in order (R01), one dtype for all of them (R11).
        world_size: number of shards.
        keep_original: whether the original parameters stay visible (`use_orig_params=True`). If so, parameters are aligned
            (R02) and the flat parameter is padded to a multiple of the world size (R03).
        compute_dtype: dtype of the gathered parameters, which determines the alignment (R02). Default: the stored dtype.

    Raises:
        LayoutError: no parameters, mixed dtypes, or mixed requires_grad without original parameters.

    >>> from crossframe.params import ParamSpec
    >>> layout = FlatLayout((ParamSpec("a", (5,)), ParamSpec("b", (2,))), world_size=2, keep_original=True)
    >>> layout.offsets, layout.flat_numel, layout.padded_shard_numel
    ((0, 8), 10, 5)
    >>> [(p.name, p.param_start, p.param_stop) for p in layout.pieces(1)]
    [('b', 0, 2)]
    """

    keep_original: bool
    compute_dtype: str | None = None

    kind = "flat"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.keep_original, bool):
            raise LayoutError(f"expected a bool as keep_original, got {quote(self.keep_original)}")
        first = self.params[0]
        for param in self.params[1:]:
            if not self.keep_original and param.requires_grad != first.requires_grad:
                raise LayoutError(
                    f"without original parameters a flat unit is trained or frozen as a whole: {first.name!r} has "
                    f"requires_grad={first.requires_grad}, {param.name!r} has {param.requires_grad}; "
                    "keep the original parameters (use_orig_params=True in torch, keep_original=True in JAX), or give them "
                    "units of their own"
                )
        if self.compute_dtype is not None:
            itemsize(self.compute_dtype)

    @property
    def alignment_numel(self) -> int:
        """The number of elements whose multiples parameters start at (R02)."""
        return max(1, ALIGNMENT_BYTES // itemsize(self.compute_dtype or self.dtype)) if self.keep_original else 1

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each parameter starts in the flat parameter, in elements."""
        return self._offsets

    @cached_property
    def _offsets(self) -> tuple[int, ...]:
        offsets, running, alignment = [], 0, self.alignment_numel
        for param in self.params:
            running += -running % alignment
            offsets.append(running)
            running += param.numel
        return tuple(offsets)

    @property
    def flat_numel(self) -> int:
        """Elements of the unsharded flat parameter, padding inside it included (R03)."""
        return self._end + (-self._end % self.line_ranks if self.keep_original else 0)

    @property
    def gathered_numel(self) -> int:
        """Elements of the buffer that an all-gather fills: one chunk for each of `line_ranks` ranks (R04)."""
        return self._gathered_numel

    @cached_property
    def _gathered_numel(self) -> int:
        return -(-self.flat_numel // self.line_ranks) * self.line_ranks

    @cached_property
    def _end(self) -> int:
        """End of the last parameter."""
        return self.offsets[-1] + self.params[-1].numel

    def padding(self, rank: int) -> tuple[Padding, ...]:
        """The runs of this rank's shard that belong to no parameter (R02, R03, R04)."""
        first, _ = self.shard_range(rank)
        # A gap may lie between parameters, after the last parameter, after the flat parameter, or span several of these zones.
        zones = (("alignment", 0, self._end), ("divisibility", self._end, self.flat_numel))
        zones = (*zones, ("shard", self.flat_numel, self.flat_numel + self.gathered_numel))
        runs = [
            Padding(kind, max(start, low - first), min(stop, high - first))
            for start, stop in self.gaps(rank)
            for kind, low, high in zones
            if max(start, low - first) < min(stop, high - first)
        ]
        return tuple(runs)

    def to_json(self) -> dict:
        """What `layout_from_json` needs to build this layout again."""
        return {"kind": self.kind, "world_size": self.world_size, "keep_original": self.keep_original,
                "compute_dtype": self.compute_dtype} | self._padded_for() | {"places": self.places()}  # fmt: skip

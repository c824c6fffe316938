"""`summon_full_params`: its options, the ranks that see full parameters, the edits that persist, and its exit (R19-R24)."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from crossframe.errors import UnsupportedError, UsageError
from crossframe.layout import Layout
from crossframe.quoting import quote


class AuthoritativeStorage(Enum):
    """The authoritative storage, which a step updates: the shards, or that of the full parameters if nothing is sharded."""

    SHARDS = "shards"
    FULL = "full storage"


def authoritative_storage(layout: Layout, *, moved: bool = False) -> AuthoritativeStorage:
    """The authoritative storage of a bucket: that of the full parameters if nothing is sharded, otherwise the shards (R14, R20).

    Args:
        layout: layout of the bucket.
        moved: whether the shard is on another device than the one that computes.
    """
    return AuthoritativeStorage.SHARDS if layout.world_size > 1 or moved else AuthoritativeStorage.FULL


def shard_is_full(layout: Layout, *, cast: bool = False, moved: bool = False) -> bool:
    """Whether a module computes with the shard itself, so that nothing is gathered, copied or freed (R14).

    A line over one rank is its own unsharded buffer. In a per-parameter layout, full parameters are a copy, as in torch: each
    parameter is aligned like one in memory of its own, since kernels may add in another order if it is not.

    Args:
        layout: layout of the bucket.
        cast: whether the full parameters have another dtype than the shard.
        moved: whether they are on another device.

    >>> from crossframe.layout import PerParamLayout, RaggedLayout
    >>> from crossframe.params import ParamSpec
    >>> line, rows = (kind((ParamSpec("w", (3, 3)),), 1) for kind in (RaggedLayout, PerParamLayout))
    >>> shard_is_full(line), shard_is_full(line, cast=True), shard_is_full(line.over(2)), shard_is_full(rows)
    (True, False, False, False)
    """
    return layout.world_size == 1 and layout.contiguous and not cast and not moved


class ExitStep(Enum):
    """The steps of the exit of `summon_full_params`, in this order, also after an exception (R24)."""

    BACK_FROM_CPU = "full parameters return to the device that the shards are on"
    WRITEBACK = "each rank copies back the slice that it owns"
    RESHARD = "the full parameters are freed"
    RESHARD_GRADS = "the full gradients are freed"


@dataclass(frozen=True)
class UnshardRequest:
    """The options of `summon_full_params`. `check` rejects the combinations that torch rejects (R23).

    Attributes:
        writeback: edits persist on exit (R20).
        rank0_only: only rank 0 of the group sees full parameters (R19).
        offload_to_cpu: full parameters are shown on the CPU.
        with_grads: full gradients are shown too (R22).

    Raises:
        UsageError: an option is not a bool.
    """

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False

    def __post_init__(self) -> None:
        for name in ("writeback", "rank0_only", "offload_to_cpu", "with_grads"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}: expected True or False, got {quote(getattr(self, name))}")

    def check(self, *, keeps_original: bool, authoritative: AuthoritativeStorage = AuthoritativeStorage.SHARDS) -> None:
        """Raise UnsupportedError for an unsupported combination of options.

        Args:
            keeps_original: whether the unit keeps its original parameters (`use_orig_params=True`, or FSDP2).
            authoritative: the authoritative storage of the unit.
        """
        if self.writeback and self.rank0_only:
            raise UnsupportedError(
                "writeback=True with rank0_only=True: the other ranks hold no full parameters to write back from; "
                "pass writeback=False, or rank0_only=False"
            )
        if self.with_grads and not keeps_original:
            raise UnsupportedError(
                "with_grads=True without original parameters: the gradient belongs to the flat parameter, not to the original "
                "ones; keep these (use_orig_params=True in torch, keep_original=True in JAX)"
            )
        if self.with_grads and self.offload_to_cpu:
            raise UnsupportedError(
                "with_grads=True with offload_to_cpu=True: a parameter and its gradient must be on one device; "
                "pass offload_to_cpu=False, or copy the gradients inside the context"
            )
        if self.offload_to_cpu and authoritative is AuthoritativeStorage.FULL:
            raise UnsupportedError(
                "offload_to_cpu=True where nothing is sharded (NO_SHARD): the full parameters are the only copy; "
                "pass offload_to_cpu=False, and copy them inside the context"
            )

    @property
    def warning(self) -> str | None:
        """A warning, if every rank of a machine copies all parameters to the same CPU memory; else None."""
        if self.offload_to_cpu and not self.rank0_only:
            return (
                "offload_to_cpu=True on every rank: ranks of one machine each put a full copy into the same CPU memory; "
                "pass rank0_only=True with writeback=False if one copy will do"
            )
        return None

    def visible(self, rank: int) -> bool:
        """Whether a rank sees full parameters, given its `MeshSpec.group_rank`."""
        return rank == 0 or not self.rank0_only

    def exit_steps(self) -> tuple[ExitStep, ...]:
        """The steps of the exit that these options require, in order (R24).

        >>> [step.name for step in UnshardRequest(with_grads=True).exit_steps()]
        ['WRITEBACK', 'RESHARD', 'RESHARD_GRADS']
        """
        asked = {
            ExitStep.BACK_FROM_CPU: self.offload_to_cpu,
            ExitStep.WRITEBACK: self.writeback,
            ExitStep.RESHARD: True,
            ExitStep.RESHARD_GRADS: self.with_grads,
        }
        return tuple(step for step in ExitStep if asked[step])

    def persists(self, authoritative: AuthoritativeStorage = AuthoritativeStorage.SHARDS) -> bool:
        """Whether edits persist: with `writeback`, and always if the full parameters are the authoritative storage (R20)."""
        return self.writeback or authoritative is AuthoritativeStorage.FULL


def shows_grad(present: Iterable[bool]) -> bool:
    """Whether a full gradient is shown, given the ranks that have one: it is unless all ranks lack it, and ranks that lack it
    count as zeros (R22).

    >>> shows_grad([False, False]), shows_grad([True, False])
    (False, True)
    """
    return any(present)

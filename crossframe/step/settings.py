"""The settings of a unit for a step: when it is resharded, prefetched and reduced."""

from dataclasses import dataclass, replace
from typing import Any

from crossframe.errors import StateError
from crossframe.layout.sharding import check_reshard_group
from crossframe.quoting import quote
from crossframe.strategy import Prefetch, Strategy


@dataclass(frozen=True)
class StepSettings:
    """The user's settings of a unit for a step. Immutable; `UnitStep.choose` replaces them.

    Attributes:
        reshard_after_forward: True frees the unsharded parameters after forward, False keeps them for backward, a number k
            reshards to groups of k ranks (R08, R13, R14).
        keep_root: whether the root always keeps them (R13).
        reshard_after_backward: whether backward frees them (FSDP2's `set_reshard_after_backward`).
        unshard_in_backward: whether backward needs them (FSDP2's `set_unshard_in_backward`).
        keep_without_reduction: whether a backward without reduction keeps them (R15).
        conceal_after_forward: whether the module registers sharded parameters between forward and backward even if the unsharded
            ones stay in memory.
        backward_prefetch: when the next unit in backward is all-gathered (R16); None: when it is needed.
        forward_prefetch: whether forward prefetches the unit that ran next in the previous step.
        reduce_grads: whether backward reduces gradients; False under `no_sync` (R15).
        all_reduce_grads: whether a reduction includes the sum over replicas; False leaves partial sums (R28).
        reduce_unused: whether unused parameters count as zeros on every rank (R29).
    """

    reshard_after_forward: bool | int = True
    keep_root: bool = False
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keep_without_reduction: bool = False
    conceal_after_forward: bool = True
    backward_prefetch: Prefetch | None = Prefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    reduce_grads: bool = True
    all_reduce_grads: bool = True
    reduce_unused: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "reshard_after_forward":
                valid = type(value) in (bool, int)
            elif name == "backward_prefetch":
                valid = value is None or isinstance(value, Prefetch)
            else:
                valid = type(value) is bool
            if not valid:
                raise StateError(
                    f"{name}: got {quote(value)}, which is not a valid choice; pass {_KINDS.get(name, 'a bool')}"
                )

    @classmethod
    def of_strategy(cls, strategy: Strategy, *, casts: bool = False, **settings: Any) -> "StepSettings":
        """The settings of an FSDP1 sharding strategy (R13, R14, R15), with overrides.

        Args:
            casts: whether full parameters are a copy of another dtype. Under NO_SHARD such copies, that of the root among them,
                are freed wherever FULL_SHARD frees: making them again takes no all-gather.
        """
        copies = strategy is Strategy.NO_SHARD and casts
        reshards = strategy.reshards_after_forward or copies
        keeps = {"keep_root": not copies, "keep_without_reduction": not reshards}
        return cls(reshard_after_forward=reshards, **keeps, **settings)

    def as_root(self) -> "StepSettings":
        """The settings if the unit is the root (R13)."""
        return replace(self, reshard_after_forward=False) if self.keep_root else self

    @property
    def reshards_to_group(self) -> bool:
        """Whether a forward leaves a shard of the reshard group (R08)."""
        return type(self.reshard_after_forward) is int

    @property
    def frees_after_backward(self) -> bool:
        """Whether a backward frees the unsharded parameters (R15)."""
        return self.reshard_after_backward and (self.reduce_grads or not self.keep_without_reduction)


_KINDS = {"reshard_after_forward": "a bool or a number of ranks", "backward_prefetch": "a Prefetch or None"}


def reshard_choice(asked: bool | int, num_shards: int) -> bool | int:
    """`reshard_after_forward` in its simplest form (R08): the whole shard group means True, a group of one rank means False.

    Raises:
        MeshError: a number that does not divide the shard group.

    >>> [reshard_choice(asked, 4) for asked in (True, False, 4, 2, 1)]
    [True, False, True, 2, False]
    """
    if isinstance(asked, bool):
        return asked
    check_reshard_group(asked, num_shards)
    return asked == num_shards and asked > 1 if asked in (1, num_shards) else asked

"""What a user's unshard asks for, and what is refused (R18-R23)."""

from dataclasses import dataclass

from crossframe.errors import UnsupportedError


@dataclass(frozen=True)
class UnshardRequest:
    """The arguments of `summon_full_params`, refused together where torch refuses them (R23).

    Attributes:
        writeback: edits persist on exit (R20).
        rank0_only: only rank 0 of the group sees full parameters (R19).
        with_grads: full gradients are shown beside the parameters (R22).
    """

    writeback: bool = True
    rank0_only: bool = False
    with_grads: bool = False

    def check(self, *, keeps_original: bool) -> None:
        """Raise UnsupportedError for a combination that has no meaning."""
        if self.writeback and self.rank0_only:
            raise UnsupportedError(
                "writeback=True with rank0_only=True: the other ranks hold no full parameters to write back from; "
                "pass writeback=False, or rank0_only=False"
            )
        if self.with_grads and not keeps_original:
            raise UnsupportedError(
                "with_grads=True with use_orig_params=False: the gradient belongs to the flat parameter, not to the "
                "original ones; build the module with use_orig_params=True"
            )

    def visible(self, rank: int) -> bool:
        """Whether this rank sees full parameters."""
        return rank == 0 or not self.rank0_only

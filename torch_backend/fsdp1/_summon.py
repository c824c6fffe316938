"""`summon_full_params` of FSDP1: unsharded parameters for the user, and the names under which they appear."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from crossframe.errors import UsageError
from crossframe.state import FSDP_WRAPPED, without_parts
from crossframe.unshard import Truth, UnshardRequest
from torch_backend.engine._unit import unit_of
from torch_backend.engine._unshard import summon_on_first, summon_units


class Summonable(nn.Module):
    """A module over one unit, whose parameters can be summoned."""

    _use_orig_params: bool

    @staticmethod
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Inside, parameters are full and in full precision, under their original names and shapes (R18-R24).

        Args:
            module: a module with units in it; all of them are unsharded, or with `recurse=False` its own alone.
            writeback: on exit each rank copies back what it owns of the edits; otherwise they are lost, except where nothing
                is sharded.
            rank0_only: ranks other than the group's first see their shards; needs `writeback=False`.
            offload_to_cpu: show the parameters on the CPU. With `rank0_only`, or each rank of a machine fills its memory.
            with_grads: show full gradients too; needs `use_orig_params=True`, and no `offload_to_cpu`.

        Raises:
            StateError: during forward or backward, or inside another summon of the same units.
            UnsupportedError: a combination that has no meaning (R23).
        """
        request = UnshardRequest(writeback, rank0_only, offload_to_cpu, with_grads)
        wrappers = _summonable(module, recurse)
        for wrapper in wrappers:
            truth = next((bucket.truth for bucket in unit_of(wrapper).buckets), Truth.SHARDS)
            request.check(keeps_original=wrapper._use_orig_params, truth=truth)
        with summon_units([unit_of(wrapper) for wrapper in wrappers], request):
            yield

    @staticmethod
    @contextmanager
    def summon_full_params_on_rank0(
        module: nn.Module, recurse: bool = True, offload_to_cpu: bool = False
    ) -> Iterator[None]:
        """Inside, the first rank alone sees full parameters, and what it makes of them becomes every rank's on exit (R23).

        torch has no such thing: there `rank0_only` excludes `writeback`. Every rank enters and leaves it.

        Args:
            module, recurse, offload_to_cpu: as of `summon_full_params`.

        Raises:
            StateError: as there; and on all ranks if the first one raises inside, when nothing is changed.
        """
        wrappers = _summonable(module, recurse)
        with summon_on_first([unit_of(wrapper) for wrapper in wrappers], offload_to_cpu=offload_to_cpu):
            yield

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; while parameters are summoned, without the names that wrapping added."""
        summoned = unit_of(self).summoned
        for name, param in super().named_parameters(*args, **kwargs):
            yield (without_parts(name, {FSDP_WRAPPED}) if summoned else name), param

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """As of any module; while parameters are summoned, without the names that wrapping added."""
        summoned = unit_of(self).summoned
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield (without_parts(name, {FSDP_WRAPPED}) if summoned else name), buffer


def _summonable(module: nn.Module, recurse: bool) -> list[Summonable]:
    if not isinstance(module, nn.Module) or not isinstance(recurse, bool):
        raise UsageError(f"expected a module, and recurse as True or False; got {module!r}, {recurse!r}")
    if recurse:
        return [inner for inner in module.modules() if isinstance(inner, Summonable)]
    return [module] if isinstance(module, Summonable) else []

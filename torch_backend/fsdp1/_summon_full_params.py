"""`summon_full_params` of FSDP1: unsharded parameters for the user, and the names under which they appear."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from crossframe.errors import UsageError
from crossframe.state import FSDP_WRAPPED, without_parts
from crossframe.unshard import AuthoritativeStorage, UnshardRequest
from torch_backend.engine._summon import summon_on_first, summon_units
from torch_backend.engine._unit import unit_of

T = TypeVar("T")


class Summonable(nn.Module):
    """Adds `summon_full_params` to the wrapper."""

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
        """A context with unsharded parameters in full precision, under their original names and shapes (R18-R24).

        Args:
            module: a module with units; all of them are unsharded, or with `recurse=False` only its own.
            writeback: whether each rank writes back edits of the elements that it owns on exit. Without it, edits are lost,
                except under NO_SHARD.
            rank0_only: unshard on the group's first rank only; requires `writeback=False`.
            offload_to_cpu: move the parameters to the CPU. Use it with `rank0_only`, or all ranks of a machine use its memory.
            with_grads: also unshard gradients; requires `use_orig_params=True` and no `offload_to_cpu`.

        Raises:
            StateError: during forward or backward, or inside another summon of the same units.
            UnsupportedError: an invalid combination (R23).
        """
        request = UnshardRequest(writeback, rank0_only, offload_to_cpu, with_grads)
        wrappers = _summonable(module, recurse)
        for wrapper in wrappers:
            authoritative = next(
                (bucket.authoritative for bucket in unit_of(wrapper).buckets), AuthoritativeStorage.SHARDS
            )
            request.check(keeps_original=wrapper._use_orig_params, authoritative=authoritative)
        with summon_units([unit_of(wrapper) for wrapper in wrappers], request):
            yield

    @staticmethod
    @contextmanager
    def summon_full_params_on_rank0(
        module: nn.Module, recurse: bool = True, offload_to_cpu: bool = False
    ) -> Iterator[None]:
        """A context in which only the first rank has unsharded parameters, whose edits are scattered to all ranks on exit (R23).

        Not in PyTorch, where `rank0_only` excludes `writeback`. All ranks must enter and leave the context.

        Args:
            module, recurse, offload_to_cpu: as for `summon_full_params`.

        Raises:
            StateError: as for `summon_full_params`, and on all ranks if the first one raises inside; nothing changes then.
        """
        wrappers = _summonable(module, recurse)
        with summon_on_first([unit_of(wrapper) for wrapper in wrappers], offload_to_cpu=offload_to_cpu):
            yield

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Like `nn.Module`'s method, but without the wrapper's prefix while parameters are summoned."""
        yield from _named(super().named_parameters(*args, **kwargs), summoned=unit_of(self).summoned)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Like `nn.Module`'s method, but without the wrapper's prefix while parameters are summoned."""
        yield from _named(super().named_buffers(*args, **kwargs), summoned=unit_of(self).summoned)


def _named(found: Iterator[tuple[str, T]], *, summoned: bool) -> Iterator[tuple[str, T]]:
    return ((without_parts(name, {FSDP_WRAPPED}), value) for name, value in found) if summoned else found


def _summonable(module: nn.Module, recurse: bool) -> list[Summonable]:
    if not isinstance(module, nn.Module) or not isinstance(recurse, bool):
        raise UsageError(f"expected a module, and recurse as True or False; got {module!r}, {recurse!r}")
    if recurse:
        return [inner for inner in module.modules() if isinstance(inner, Summonable)]
    return [module] if isinstance(module, Summonable) else []

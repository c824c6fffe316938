"""Acts in which one rank may fail, and all must know."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from crossframe.errors import CrossframeError

T = TypeVar("T")


class CheckpointError(CrossframeError, RuntimeError):
    """A checkpoint that could not be written or read; all ranks raise it, with the same words."""


def together(what: str, act: Callable[[], T]) -> list[T]:
    """What `act` returns on each rank of the default process group.

    Args:
        what: is being done, in words, for the message.

    Raises:
        CheckpointError: it raised on some rank. All ranks raise this then, so that none waits for another.
    """
    mine: tuple[T | None, str | None]
    try:
        mine = act(), None
    except (Exception, CheckpointException) as error:
        mine = None, in_words(error)
    everyone: list[tuple[T, str | None]] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(everyone, mine)
    failed = {rank: said for rank, (_, said) in enumerate(everyone) if said is not None}
    if failed:
        said = "; ".join(
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {words}"
            for words in dict.fromkeys(failed.values())
            for ranks in [[rank for rank in failed if failed[rank] == words]]
        )
        raise CheckpointError(f"{what}: {said}")
    return [value for value, _ in everyone]


def on_first(what: str, act: Callable[[], T]) -> T:
    """What `act` returns on rank 0, which alone runs it; CheckpointError on all ranks if it raises."""
    return together(what, lambda: act() if dist.get_rank() == 0 else None)[0]  # type: ignore[return-value]


def in_words(error: BaseException) -> str:
    """An error in one line. Of what `torch.distributed.checkpoint` gathered from ranks, each error once."""
    if isinstance(error, CheckpointException):
        return "; ".join(dict.fromkeys(in_words(cause) for cause, _ in error.failures.values()))
    if isinstance(error, CrossframeError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

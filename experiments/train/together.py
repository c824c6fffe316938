"""Acts in which one rank may fail, and all must know."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from crossframe.checkpoint import CheckpointError
from crossframe.errors import AgreementError, CrossframeError

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a run, as they talk about files: ranks of torch, or processes of JAX.

    Attributes:
        noun: what one of them is called.
        rank: this one.
        size: how many there are.
    """

    noun: str
    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """The JSON values that the ranks pass, in order. A collective call."""
        ...


def together(ranks: Ranks, what: str, act: Callable[[], T]) -> list[T]:
    """Returns the results of `act` on all ranks; they are JSON values.

    Args:
        what: is being done, in words, for the message.

    Raises:
        CheckpointError: it raised on some rank. All ranks raise this then, so that none waits for another.
    """
    mine: tuple[T | None, str, bool]
    try:
        mine = act(), "", False
    except Exception as error:
        # What a rank was told by another says nothing new.
        mine = None, _in_words(error), isinstance(error, AgreementError)
    everyone = ranks.gather(mine)
    failed = {rank: (said, told) for rank, (_, said, told) in enumerate(everyone) if said}
    if failed:
        first = {rank: said for rank, (said, told) in failed.items() if not told}
        named = first or {rank: said for rank, (said, _) in failed.items()}
        said = "; ".join(
            f"{_called(ranks.noun, [rank for rank in named if named[rank] == words])}: {words}"
            for words in dict.fromkeys(named.values())
        )
        raise CheckpointError(f"{what}: {said}")
    return [value for value, *_ in everyone]


def on_first(ranks: Ranks, what: str, act: Callable[[], T]) -> T:
    """What `act` returns on rank 0, which alone runs it; CheckpointError on all ranks if it raises."""
    return together(ranks, what, lambda: act() if ranks.rank == 0 else None)[0]  # type: ignore[return-value]


def _called(noun: str, numbers: list[int]) -> str:
    plural = noun if len(numbers) == 1 else f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{plural} {', '.join(map(str, numbers))}"


def _in_words(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, CrossframeError):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

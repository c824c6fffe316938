"""What no rank used, said through stores of all kinds (R29)."""

# pyright: reportPrivateImportUsage=false

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torch_backend
from torch_backend.engine import _unused_params as unused


class Half(nn.Module):
    """A weight that is used, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(2))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return (x * self.used).sum()


class Late:
    """A store that applies a rank's `set` only when that rank asks it something, as a TCPStore may."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._said: list[tuple[str, str]] = []

    def set(self, key: str, value: str) -> None:
        self._said.append((key, value))

    def __getattr__(self, name: str):
        while self._said:
            self._store.set(*self._said.pop(0))
        return getattr(self._store, name)


def _gradients(rank: int, world_size: int, path: str | None) -> list[bool]:
    """Whether the unused weight has a gradient after each of some steps, with a file as a store, or one that hears late."""
    own = unused._store
    store = dist.FileStore(path, world_size) if path else Late(own())
    unused._store = lambda: store
    try:
        model, found = torch_backend.fully_shard(Half()), []
        for _ in range(10):
            dist.barrier()  # ranks say what they lack at the same time
            model(torch.ones(2)).backward()
            found.append(model.unused.grad is not None)
            assert model.used.grad is not None
            model.zero_grad()
        return found
    finally:
        unused._store = own


def test_R29_what_no_rank_used_has_no_gradient_when_ranks_meet_at_a_file(ranks, tmp_path: Path):
    """A FileStore loses what two ranks append to one key at the same time."""
    assert ranks.run(2, _gradients, str(tmp_path / "store")) == [[False] * 10] * 2


def test_R29_what_no_rank_used_has_no_gradient_when_the_store_hears_late(ranks):
    """A TCPStore takes what it is told in the order in which it listens to its ranks."""
    assert ranks.run(2, _gradients, None) == [[False] * 10] * 2

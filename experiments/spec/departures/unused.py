"""R29: ranks that leave different parameters of a unit unused. Each rank of torch reduces the gradients that it has, so that one
parameter's gradient is summed with another's, without a word.
"""

from types import ModuleType

import torch
from torch import nn

from experiments.spec.departures import Departure, depart


class Two(nn.Module):
    """Two parameters, of which one is used: the first with gradient 1, the second with gradient 2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def forward(self, rank: int) -> torch.Tensor:
        """Rank 0 uses the first, rank 1 the second."""
        return 2 * self.second.sum() if rank else self.first.sum()


def gradients(package: ModuleType, rank: int) -> dict[str, float | None]:
    """The gradients of both, as this rank's optimizer finds them: one element of each."""
    model = package.fully_shard(Two())
    model(rank).backward()
    return {
        name: None if param.grad is None else param.grad.to_local().item() for name, param in model.named_parameters()
    }


def departure() -> Departure:
    """What both find on two ranks: the mean of 1 and nothing, and of nothing and 2."""
    asked = "gradients where rank 0 uses the first parameter alone and rank 1 the second"
    return depart("R29", asked, 2, gradients, [{"first": 0.5, "second": 1.0}])


if __name__ == "__main__":
    print(departure())

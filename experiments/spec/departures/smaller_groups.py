"""R08: `reshard_after_forward=k` leaves a DTensor on the module between forward and backward. Where dim 0 is uneven torch's takes
its pieces for others than they are, and a full tensor made from it has wrong rows.

5 rows on 4 ranks are shards of 2, 2, 1 and 0 rows, padded to 2. Gathered, that is 5 rows and 3 of padding; two ranks of a smaller
group split the 5 rows in chunks of 3 and 2, and not the 8 in halves of 4.
"""

from types import ModuleType

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from experiments.spec.departures import Departure, depart

NUM_ROWS = 5


def rows_between_forward_and_backward(package: ModuleType, rank: int) -> list[float]:
    """The first element of each row of the full weight, each of which holds its own number."""
    model = nn.Linear(3, NUM_ROWS, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.arange(NUM_ROWS).view(-1, 1))
    package.fully_shard(model, reshard_after_forward=2)
    model(torch.ones(1, 3))
    assert isinstance(model.weight, DTensor)
    return model.weight.full_tensor()[:, 0].tolist()


def departure() -> Departure:
    """What both see of five rows on four ranks, kept in halves."""
    asked = "rows of full_tensor() after a forward with reshard_after_forward=2, of 5 rows on 4 ranks"
    return depart("R08", asked, 4, rows_between_forward_and_backward, [[float(i) for i in range(NUM_ROWS)]])


if __name__ == "__main__":
    print(departure())

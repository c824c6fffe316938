"""R27: `set_gradient_divide_factor`. torch asks the backend to multiply before it sums, which gloo cannot: it raises in backward.

A factor that equals the number of ranks of a shard group is the one that torch's gloo takes.
"""

from types import ModuleType

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from experiments.spec.departures import Departure, depart

FACTOR = 8.0


def gradients(package: ModuleType, rank: int) -> dict[str, float | str]:
    """On one axis and on two: an element of the reduced gradient, to which rank r brings r + 1; or the error's kind."""
    return {name: _gradient(package, rank, hybrid=name == "hybrid") for name in ("sharded", "hybrid")}


def _gradient(package: ModuleType, rank: int, *, hybrid: bool) -> float | str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if hybrid else None
    model = package.fully_shard(nn.Linear(1, 4, bias=False), mesh=mesh)
    model.set_gradient_divide_factor(FACTOR)
    try:
        model(torch.tensor([[rank + 1.0]])).sum().backward()
    except Exception as error:
        return type(error).__name__
    return model.weight.grad.to_local()[0].item()


def departure() -> Departure:
    """What both give on four ranks: 1 + 2 + 3 + 4, divided by 8."""
    asked = f"the gradient with set_gradient_divide_factor({FACTOR}) on gloo, of ranks that bring 1, 2, 3 and 4"
    return depart("R27", asked, 4, gradients, [dict.fromkeys(("sharded", "hybrid"), 10 / FACTOR)])


if __name__ == "__main__":
    print(departure())

"""The transformer of `torch_matmul`, compiled. Arguments: a dtype, a fault of `backends` or "none", "eager" or "inductor"."""

import sys

import torch

from experiments.kernels import torch_matmul, values
from experiments.kernels.backends import backend


def main() -> None:
    """Two steps."""
    model = torch_matmul.Transformer()
    compiled = torch.compile(model, backend=backend(sys.argv[2], sys.argv[3]))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.01)
    for step in range(2):
        compiled(torch.from_numpy(values.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()

"""What all programs train on: initial values and tokens, drawn by numpy."""

import zlib

import numpy as np

WIDTH, HEADS, BLOCKS, VOCABULARY, CONTEXT, BATCH = 16, 2, 2, 13, 10, 4
PADDING = 0
SHAPES = {"tokens": (VOCABULARY, WIDTH), "positions": (CONTEXT + 2, WIDTH)} | {
    f"blocks.{i}.{name}": shape
    for i in range(BLOCKS)
    for name, shape in {
        "norm1": (WIDTH,), "query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH), "value": (WIDTH, WIDTH), "out": (WIDTH, WIDTH),
        "norm2": (WIDTH,), "up": (2 * WIDTH, WIDTH), "gate": (2 * WIDTH, WIDTH), "down": (WIDTH, 2 * WIDTH),
    }.items()
} | {"norm": (WIDTH,), "bias": (WIDTH,), "head": (VOCABULARY, WIDTH)}  # fmt: skip
"""The shape of each parameter by its name. Matrices have a row for each output."""


def initial(name: str) -> np.ndarray:
    """The first value of a parameter; norms are about 1, and inputs small, so that an epsilon shows."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=SHAPES[name])
    if len(SHAPES[name]) == 1:
        return 0.1 * drawn + (name != "bias")
    return drawn * (0.05 if name in ("tokens", "positions") else SHAPES[name][1] ** -0.5)


def batch(step: int, rank: int = 0) -> np.ndarray:
    """Tokens (batch, context + 1), the last ones of some samples padding."""
    rng = np.random.default_rng([step, rank])
    tokens = rng.integers(1, VOCABULARY, (BATCH, CONTEXT + 1))
    tokens[:2, -3:] = PADDING
    return tokens


def angles(base: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines (context, half of a head's width) of rotary positions."""
    half = WIDTH // HEADS // 2
    turned = np.outer(np.arange(CONTEXT), base ** (-np.arange(half) / half))
    return np.cos(turned), np.sin(turned)


def join_group(rank: int, num_ranks: int) -> None:
    """Make the default process group of torch, as torchrun says or of this process alone, unless there is one."""
    import torch.distributed as dist

    if not dist.is_initialized():
        if num_ranks == 1:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=1)  # type: ignore[attr-defined]
        else:
            dist.init_process_group("gloo")

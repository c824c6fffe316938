"""Counts the work of a function: bytecode instructions in this project's own files, which do not depend on the machine."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = Path(__file__).parents[3]
_OURS = tuple(str(_ROOT / package) for package in ("crossframe", "jax_backend"))


def work_of(fun: Callable[..., Any], *args: Any) -> int:
    """How many instructions of ours `fun(*args)` executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            if not frame.f_code.co_filename.startswith(_OURS):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
        return trace

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # before settrace: Python 3.12 sends no opcode events otherwise
    sys.settrace(trace)
    try:
        fun(*args)
    finally:
        sys.settrace(before)
    return count


def assert_linear(fun: Callable[..., Any], make: Callable[[int], tuple[Any, ...]], sizes: tuple[int, int]) -> None:
    """Fail unless the work of `fun(*make(n))` grows with n as a line does.

    Of n items the work is at most a + b * n + c * n * log(n) with the last term small; between two sizes it then grows by little
    more than their ratio r, where quadratic work grows by nearly r * r. The border lies between, at the geometric mean of both.
    """
    small, large = (work_of(fun, *make(size)) for size in sizes)
    ratio = sizes[1] / sizes[0]
    assert large < ratio**1.5 * small, (
        f"{small} instructions at {sizes[0]}, {large} at {sizes[1]}: {large / small:.1f} times"
    )

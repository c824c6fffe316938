"""The memory that the kernel says a process holds."""

import ctypes
from pathlib import Path

_PROC = Path("/proc/self")
# Of mallopt: from how many bytes on memory is asked of the kernel by itself, and goes back to it when it is freed.
_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 1 << 16


class Resident:
    """This process's resident memory, from now on without what was freed. Linux alone tells and resets the peak.

    Raises:
        RuntimeError: where that is not so.
    """

    def __init__(self) -> None:
        try:
            freed = ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _THRESHOLD_BYTES)
            self.forget_peak()
        except (OSError, AttributeError) as error:
            raise RuntimeError(f"peak memory is read from {_PROC}, which Linux has; there: {error}") from error
        if not freed:
            raise RuntimeError("mallopt refused: memory that is freed would count as held")

    def forget_peak(self) -> None:
        """Let the peak begin at what is held now."""
        (_PROC / "clear_refs").write_text("5")

    @property
    def num_bytes(self) -> int:
        """What is held now."""
        return self._read("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """The most that was held since `forget_peak`."""
        return self._read("VmHWM")

    def _read(self, entry: str) -> int:
        for line in (_PROC / "status").read_text().splitlines():
            if line.startswith(f"{entry}:"):
                return 1024 * int(line.split()[1])
        raise RuntimeError(f"{_PROC / 'status'} has no {entry}")

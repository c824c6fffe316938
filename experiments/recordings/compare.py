"""Recordings of which it need not be read that they are equal."""

from pathlib import Path

from crossframe.recording.stated import Stated, exceeds

READ_ANYWAY = 64 << 20
"""Recordings of fewer bytes are read and verified all the same: that takes about a second."""


def equal_as_stated(a: Path, b: Path, *, read_anyway: int = READ_ANYWAY) -> str | None:
    """What is said of two recordings that state the same content; None where that is not known, or where they are small.

    A rank's last line has the sha256 of all its lines, made when they were written, and its lines have that of every tensor file.
    Equal ones mean that both runs saw the same in every bit. Whether the files are still as they were written is not verified.

    Raises:
        RecordingError: no or a wrong manifest.
    """
    stated = [Stated.read(path) for path in (a, b)]
    first, second = stated
    if first is None or second is None or not first.equals(second):
        return None
    if not any(exceeds(path, read_anyway) for path in (a, b)):
        return None
    return (
        f"equal: every bit that both runs recorded is equal, {first.num_steps} steps on {first.manifest.world_size} ranks\n"
        "told by the sha256 of all lines and tensor files, as both recordings state them; the files themselves were not read: "
        "--verify reads and verifies them"
    )

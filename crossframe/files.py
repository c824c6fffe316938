"""Reads untrusted files: only regular files, whose size is known before reading, and in bounded memory.

A file that is read in parts after its checksum was verified may be cut off or overwritten in between. Parts that are read later
are therefore compared with the verified content (`VerifiedFile`), and files are read, not mapped, since a page of a mapped file
that was cut off ends the process with SIGBUS.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from crossframe.errors import CrossframeError
from crossframe.quoting import quote, quote_path

# Size of the blocks of a verified file, each of which has a digest.
BLOCK = 1 << 18
_DIGEST_BYTES = 16
# Limits of JSON texts: the number of values, each of which takes about 200 bytes of memory, and the digits of an int. No file of
# this project has larger ints, and they would overflow the types that they are converted to.
MOST_VALUES = 1 << 22
MOST_DIGITS = 20
_LONG_INT = re.compile(rb"\d{%d}" % (MOST_DIGITS + 1))
_LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class FileError(CrossframeError):
    """A file that cannot be read, or whose content was changed. The message begins with its path.

    Attributes:
        reason: the message without the path.
        missing: whether the file does not exist.
    """

    def __init__(self, path: Path | str, reason: str, *, missing: bool = False) -> None:
        super().__init__(f"{quote_path(path)}: {reason}")
        self.reason, self.missing = reason, missing


def open_regular(path: Path | str, most_bytes: int | None = None) -> tuple[BinaryIO, int]:
    """Open a regular file for reading. Never blocks, unlike opening a pipe.

    Returns:
        The file, unbuffered, and its size in bytes.

    Raises:
        FileError: the file does not exist, is not a regular file, has more than `most_bytes` bytes, or cannot be read.
    """
    try:
        # Before it is opened, since opening a device may have side effects.
        _check_regular(path, os.stat(path))
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0)  # noqa: SIM115
    except (FileNotFoundError, NotADirectoryError):
        raise FileError(path, "there is no such file", missing=True) from None
    except (OSError, ValueError) as error:  # a path with a null byte, or with a surrogate, is a ValueError
        raise FileError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from None
    try:
        status = os.fstat(file.fileno())
        _check_regular(path, status)
        if most_bytes is not None and status.st_size > most_bytes:
            raise FileError(path, f"expected at most {most_bytes} bytes, got {status.st_size}")
    except BaseException:
        file.close()
        raise
    return file, status.st_size


def _check_regular(path: Path | str, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _KINDS if test(status.st_mode)), "something else")
        raise FileError(path, f"expected a file, got {kind}")


@contextmanager
def folder_lock(path: Path, *, shared: bool = False) -> Iterator[bool]:
    """Hold the lock of a folder, which ends with the process.

    Yields whether the lock is held: False if another process holds it. On a disk without locks it is True.

    Args:
        shared: wait for the lock, and share it with other processes that share it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except BlockingIOError:
            held = False
        except OSError:
            held = True
        yield held
    finally:
        os.close(descriptor)


def read_bytes(path: Path | str, most_bytes: int) -> bytes:
    """The content of a regular file; FileError as in `open_regular`, or if the disk fails."""
    file, size = open_regular(path, most_bytes)
    with file:
        return _read(file, path, size)


def _read(file: BinaryIO, path: Path | str, size: int) -> bytes:
    parts = []
    try:
        while size and (part := file.read(min(size, 1 << 24))):
            parts.append(part)
            size -= len(part)
    except OSError as error:
        raise FileError(path, f"cannot be read ({error.strerror or error})") from None
    return b"".join(parts)


def parse_json(content: bytes | str) -> Any:
    """Parse a JSON text of at most `MOST_VALUES` values, ints of at most `MOST_DIGITS` digits, and valid Unicode.

    Raises:
        ValueError: the text exceeds these limits or is not JSON. The message is one short line.
    """
    content = content.encode() if isinstance(content, str) else content
    num_values = sum(map(content.count, (b",", b"[", b"{")))
    if num_values > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        found = json.loads(content.decode(), parse_int=_int if _LONG_INT.search(content) else None)
    except RecursionError:
        raise ValueError("brackets nested too deep") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"bytes that are not UTF-8 ({error.reason} at byte {error.start})") from None
    if b"\\u" in content and _LONE_SURROGATE.search(json.dumps(found, ensure_ascii=False)):
        raise ValueError("text that is not Unicode (a lone surrogate)")
    return found


def _int(digits: str) -> int:
    if (num_digits := len(digits.lstrip("-"))) > MOST_DIGITS:
        raise ValueError(f"an integer of {num_digits} digits")
    return int(digits)


class VerifiedFile:
    """A file that was verified once, and whose parts are read later. Changes since the verification are detected.

    The file is not kept open. It takes 16 bytes of memory for each 256 KiB, and one block; or the size of the file if it is kept
    in memory.

    Attributes:
        path: path of the file.
        size: size in bytes.
    """

    def __init__(
        self,
        path: Path,
        sha256: str,
        size: int | None = None,
        *,
        most_bytes: int | None = None,
        in_memory: bool = False,
    ) -> None:
        """Read the whole file once.

        Args:
            sha256: expected sha256 of the content, in hex.
            size: expected size in bytes; None: unknown.
            most_bytes: maximum size of a file that is read.
            in_memory: keep the content in memory instead of reading it again.

        Raises:
            FileError: as in `open_regular`, or the file has another size or content.
        """
        self.path, self._digests = path, []
        self._content: bytearray | None = bytearray() if in_memory else None
        file, self.size = open_regular(path, most_bytes)
        digest, read = hashlib.sha256(), 0
        with file:
            if size is not None and size != self.size:
                raise FileError(path, f"has {self.size} bytes, not {size}: it was cut off or replaced")
            while block := _read(file, path, min(BLOCK, self.size - read)):
                digest.update(block)
                if self._content is None:
                    self._digests.append(_block_digest(block))
                else:
                    self._content += block
                read += len(block)
        if digest.hexdigest() != sha256:
            raise FileError(
                path,
                "has other content than was written (its checksum differs): expected the sha256 "
                f"{quote(sha256[:12])}..., got {digest.hexdigest()[:12]}...",
            )
        self._last: tuple[int, bytes] = (-1, b"")

    def read(self, start: int, stop: int) -> bytearray:
        """Read bytes `start:stop`.

        Raises:
            FileError: they have changed since the verification, or can no longer be read.
        """
        assert 0 <= start <= stop <= self.size, (start, stop, self.size)
        if self._content is not None:
            return self._content[start:stop]
        found = bytearray(stop - start)
        if start == stop:
            return found
        first, last = start // BLOCK, (stop - 1) // BLOCK
        file: BinaryIO | None = None
        try:
            for i in range(first, last + 1):
                if i != self._last[0]:
                    if file is None:
                        file, _ = open_regular(self.path)
                    file.seek(i * BLOCK)
                    block = _read(file, self.path, min(BLOCK, self.size - i * BLOCK))
                    if _block_digest(block) != self._digests[i]:
                        raise FileError(self.path, "was changed while it was being read")
                    self._last = i, block
                low, high = max(start, i * BLOCK), min(stop, (i + 1) * BLOCK)
                found[low - start : high - start] = memoryview(self._last[1])[low - i * BLOCK : high - i * BLOCK]
        finally:
            if file is not None:
                file.close()
        return found


def _block_digest(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=_DIGEST_BYTES).digest()

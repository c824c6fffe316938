"""The file of a golden: a recording in small sketches with the spread of its perturbed runs, to commit to a repository.

After a line that states the format, the file is compressed by xz, whose sha256 detects damage. It consists of a JSON object, its
length before it, and of the parts whose lengths the object states:

- `manifest.json` and the `events.jsonl` of each rank, as in the directory of a recording;
- sketches (`crossframe.recording.sketch`), each distinct one once, with `num_sums` sums. Sums and norms have 4 bytes, or 8 in
  runs that compute in float64. Numbers of one kind are stored together, byte by byte, which compresses better;
- for each rank and step, the index of each row of its sketches, as the difference to the row before it;
- the spread of each quantity (`crossframe.verdict.perturbed_runs.spread`), with 4 bytes.

A file takes about 4 * num_sums + 12 bytes for each tensor and step, and 8 bytes for each sample of a batch.
"""

import json
import lzma
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.errors import RecordingError
from crossframe.files import FileError, parse_json, read_bytes
from crossframe.quoting import quote, quote_error, quote_path
from crossframe.recording.sketch import NUM_SUMS

SUFFIX = ".golden"
LARGEST = 1 << 26
"""Maximum bytes of a file."""
_LARGEST_CONTENT = 1 << 30
_FIRST_LINE = b"crossframe golden 1\n"
_PRESET = 7 | lzma.PRESET_EXTREME
_MEMORY = 1 << 28
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class StoredSpread:
    """The spread of perturbed runs, as numbers.

    Attributes:
        num_runs: number of perturbed runs.
        factors: by kind, the multiple of the spread that is allowed.
        keys: (kind, name, microbatch, numel, steps) of quantities.
        values: the spread of each quantity at each of its steps, in the order of keys.
    """

    num_runs: int
    factors: Mapping[str, float]
    keys: tuple[tuple[str, str, int, int, tuple[int, ...]], ...]
    values: np.ndarray

    @classmethod
    def from_json(cls, fields: Any, values: np.ndarray) -> "StoredSpread":
        """The spread that `to_json` wrote; ValueError if it is invalid."""
        num_runs, factors, keys = (fields[name] for name in ("num_runs", "factors", "keys"))
        _expect(type(num_runs) is int and num_runs > 1, "number of perturbed runs", num_runs)
        _expect(type(factors) is dict and all(type(each) is float for each in factors.values()), "factors", factors)
        made = tuple((kind, name, at, numel, tuple(steps)) for kind, name, at, numel, steps in keys)
        for kind, name, at, numel, steps in made:
            are_ints = all(type(each) is int and each >= 0 for each in (at, numel, *steps))
            _expect(type(kind) is type(name) is str and are_ints, "quantity", [kind, name, at, numel])
        num = sum(len(steps) for *_, steps in made)
        _expect(num == values.size and bool((values >= 0).all()), "spread of each quantity", values.size)
        return cls(num_runs, factors, made, values)

    def to_json(self) -> dict[str, Any]:
        """Everything but the values."""
        return {"num_runs": self.num_runs, "factors": dict(self.factors), "keys": self.keys}


@dataclass(frozen=True)
class Golden:
    """The content of a file.

    Attributes:
        manifest: content of `manifest.json`.
        lines: for each rank, the content of its `events.jsonl`.
        rows: float64 of shape (num_rows, num_sums + 3): distinct rows of sketches, as `Sketch.to_row` returns them.
        places: for each rank and step, the index of each row of its sketches.
        command: words of the command that was recorded; empty if it is not known.
        spread: None before it was measured.
    """

    manifest: bytes
    lines: tuple[bytes, ...]
    rows: np.ndarray
    places: tuple[tuple[np.ndarray, ...], ...]
    command: tuple[str, ...] = ()
    spread: StoredSpread | None = None
    sums_dtype: str = "float32"

    @property
    def num_sums(self) -> int:
        """Number of sums of each sketch."""
        return self.rows.shape[1] - 3

    def rows_of(self, rank: int, step: int) -> np.ndarray:
        """The rows of the sketches of a rank at a step."""
        return self.rows[self.places[rank][step]]

    def rounded(self) -> "Golden":
        """The golden with the numbers that its file has."""
        rows = self.rows.copy()
        rows[:, : self.num_sums] = _in_range(self.rows[:, : self.num_sums], self.sums_dtype)
        rows[:, self.num_sums] = np.square(
            _in_range(np.sqrt(self.rows[:, self.num_sums]), self.sums_dtype), dtype=np.float64
        )
        return replace(self, rows=rows)

    def to_bytes(self) -> bytes:
        """The content of the file. Equal goldens have equal bytes."""
        sizes = [[each.size for each in steps] for steps in self.places]
        all_places = np.concatenate([np.zeros(0, np.int64), *(each for steps in self.places for each in steps)])
        floats = np.column_stack([self.rows[:, : self.num_sums], np.sqrt(self.rows[:, self.num_sums])])
        whole = np.ascontiguousarray(self.rows[:, -2:]).view(np.uint64)
        values = self.spread.values if self.spread else np.zeros(0)
        parts = [
            self.manifest,
            *self.lines,
            _by_bytes(_in_range(floats, self.sums_dtype)),
            _by_bytes(whole[:, 0].astype("<u8")),
            _by_bytes(whole[:, 1].astype("<u8")),
            _by_bytes(np.diff(all_places, prepend=0).astype("<i4")),
            _by_bytes(values.astype("<f4")),
        ]
        head = {
            "lengths": [len(part) for part in parts],
            "num_sums": self.num_sums,
            "sums_dtype": self.sums_dtype,
            "num_rows": len(self.rows),
            "num_places": sizes,
            "command": list(self.command),
            "spread": self.spread and self.spread.to_json(),
        }
        first = json.dumps(head, separators=(",", ":"), allow_nan=False).encode()
        content = b"".join([len(first).to_bytes(_LENGTH_BYTES, "little"), first, *parts])
        return _FIRST_LINE + lzma.compress(content, check=lzma.CHECK_SHA256, preset=_PRESET)

    def write(self, path: Path) -> None:
        """Write a file, which appears when it is complete."""
        part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        part.write_bytes(self.to_bytes())
        os.replace(part, path)

    @classmethod
    def read(cls, path: Path) -> "Golden":
        """Read a file.

        Raises:
            RecordingError: there is no such file, or it is not a golden, or it is damaged.
        """
        at = quote_path(path)
        try:
            content = read_bytes(path, LARGEST)
        except FileError as error:
            raise RecordingError(f"{error}; check the path, or record it with crossframe baseline record") from None
        if not content.startswith(_FIRST_LINE):
            raise RecordingError(
                f"{at}: expected the directory of a recording, or a golden that begins with {_FIRST_LINE.decode().strip()!r}; "
                "check the path"
            )
        try:
            return cls._parsed(content[len(_FIRST_LINE) :])
        except (ValueError, KeyError, TypeError, IndexError, lzma.LZMAError, EOFError) as error:
            raise RecordingError(
                f"{at}: damaged ({quote_error(error)}); restore the file, or record it again with crossframe baseline record"
            ) from None

    @classmethod
    def _parsed(cls, compressed: bytes) -> "Golden":
        reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)
        content = reader.decompress(compressed, _LARGEST_CONTENT)
        _expect(reader.eof and not reader.unused_data, f"end within {_LARGEST_CONTENT} bytes", len(content))
        stop = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        head = parse_json(content[_LENGTH_BYTES:stop])
        parts = []
        for length in head["lengths"]:
            _expect(type(length) is int and 0 <= length <= len(content) - stop, "length of a part", length)
            parts.append(content[stop : stop + length])
            stop += length
        num_sums, num_rows, sizes = head["num_sums"], head["num_rows"], head["num_places"]
        divides = type(num_sums) is int and 0 < num_sums <= NUM_SUMS and NUM_SUMS % num_sums == 0
        _expect(divides, f"divisor of {NUM_SUMS} as number of sums", num_sums)
        _expect(head["sums_dtype"] in ("float32", "float64"), "dtype of sums", head["sums_dtype"])
        manifest, *lines, floats, fingerprints, lost, places, values = parts
        numbers = _of_bytes(floats, np.dtype(head["sums_dtype"]).newbyteorder("<")).astype(np.float64)
        numbers = numbers.reshape(num_rows, num_sums + 1)  # before anything of a stated size is allocated
        rows = np.empty((num_rows, num_sums + 3))
        rows[:, : num_sums + 1] = numbers
        rows[:, num_sums] **= 2
        rows[:, -2].view(np.uint64)[:] = _of_bytes(fingerprints, np.dtype("<u8"))
        rows[:, -1].view(np.uint64)[:] = _of_bytes(lost, np.dtype("<u8"))
        flat = np.cumsum(_of_bytes(places, np.dtype("<i4")), dtype=np.int64)
        _expect(flat.size == 0 or (flat.min() >= 0 and flat.max() < num_rows), "rows of sketches", num_rows)
        _expect(len(sizes) == len(lines), "steps of each rank", len(sizes))
        cut = np.split(flat, np.cumsum([size for each in sizes for size in each]))
        _expect(cut[-1].size == 0, "row for each sketch", flat.size)
        numbered = iter(cut)
        spread = head["spread"]
        command = head["command"]
        _expect(type(command) is list and all(type(word) is str for word in command), "command", command)
        return cls(
            manifest,
            tuple(lines),
            rows,
            tuple(tuple(next(numbered) for _ in each) for each in sizes),
            tuple(command),
            spread and StoredSpread.from_json(spread, _of_bytes(values, np.dtype("<f4")).astype(np.float64)),
            head["sums_dtype"],
        )


class GoldenStep:
    """The sketches of a rank at a step, instead of its tensor file."""

    def __init__(self, path: Path, rows: np.ndarray) -> None:
        self._path, self._rows = path, rows

    def read(self, key: str, dtype: str, numel: int) -> np.ndarray:
        """RecordingError, since a golden has no elements."""
        raise RecordingError(f"{quote_path(self._path)}: a golden has sketches only, not the elements of {quote(key)}")

    def rows(self, num: int) -> np.ndarray:
        """The rows of all sketches."""
        if num > len(self._rows):
            raise RecordingError(f"{quote_path(self._path)}: expected {num} sketches, got {len(self._rows)}; damaged")
        return self._rows


def distinct(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The distinct rows of several arrays, in the order of their first occurrence, and for each array the index of its rows."""
    known: dict[bytes, int] = {}
    kept, places = [], []
    for each in rows:
        found = []
        for row in each:
            key = row.tobytes()
            if key not in known:
                known[key] = len(kept)
                kept.append(row)
            found.append(known[key])
        places.append(np.array(found, np.int64))
    return np.array(kept), places


def _in_range(floats: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers in another dtype; those that are too large are the largest."""
    most = float(np.finfo(dtype).max)
    return np.clip(floats, -most, most).astype(np.dtype(dtype).newbyteorder("<"))


def _by_bytes(array: np.ndarray) -> bytes:
    """All first bytes of the numbers, then all second ones, and so on."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8).reshape(flat.size, flat.itemsize).T.tobytes()


def _of_bytes(content: bytes, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(np.frombuffer(content, np.uint8).reshape(dtype.itemsize, -1).T).reshape(-1).view(dtype)


def _expect(holds: bool, what: str, came: Any) -> None:
    if not holds:
        raise ValueError(f"expected the {what}, got {quote(came)}")

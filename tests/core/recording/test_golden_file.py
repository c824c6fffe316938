"""The file of a golden: what is written comes back, and a head that does not fit its parts is refused."""

import json
import lzma
from dataclasses import replace

import numpy as np
import pytest

from crossframe.errors import RecordingError
from crossframe.recording import Recording
from crossframe.recording.golden_file import Golden, StoredSpread, distinct

FIRST_LINE = b"crossframe golden 1\n"
KEYS = (("norm", "", 0, 1, (0, 2)), ("update", "w", 3, 0, (1,)))
SPREAD = StoredSpread(2, {"norm": 1.5}, KEYS, np.array([0.5, 0.0, 0.25]))


def row(sums, square, fingerprint, lost):
    made = np.array([*sums, square, 0.0, 0.0])
    made[-2:].view(np.uint64)[:] = fingerprint, lost
    return made


ROWS = np.stack([row((1.0, -2.0), 9.0, 2**64 - 1, 0), row((0.5, 0.0), 0.25, 7, 3), row((0.0, 0.0), 0.0, 0, 0)])
PLACES = tuple(tuple(np.array(each, np.int64) for each in steps) for steps in (([0, 2], [1]), ([1, 1, 0], [])))
GOLDEN = Golden(b"{}", (b"first\n", b""), ROWS, PLACES, ("python", "train.py"), SPREAD)


@pytest.fixture
def read(tmp_path):
    def read(content):
        (tmp_path / "a.golden").write_bytes(content)
        return Golden.read(tmp_path / "a.golden")

    return read


def edited(golden, **fields):
    """The file of a golden with other fields in its head; those of a spread by a dict."""
    content = lzma.decompress(golden.to_bytes().removeprefix(FIRST_LINE))
    stop = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:stop])
    for name, value in fields.items():
        head[name] = head[name] | value if isinstance(value, dict) and head[name] else value
    first = json.dumps(head).encode()
    return FIRST_LINE + lzma.compress(len(first).to_bytes(8, "little") + first + content[stop:])


@pytest.mark.parametrize("spread", [None, SPREAD], ids=["no spread", "spread"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_written_comes_back(read, dtype, spread):
    golden = replace(GOLDEN, sums_dtype=dtype, spread=spread)
    found = read(golden.to_bytes())
    assert found.rows.tobytes() == ROWS.tobytes() and found.num_sums == 2
    assert [[each.tolist() for each in steps] for steps in found.places] == [[[0, 2], [1]], [[1, 1, 0], []]]
    assert (found.manifest, found.lines, found.command) == (b"{}", (b"first\n", b""), ("python", "train.py"))
    assert found.sums_dtype == dtype and found.rows_of(1, 0).tobytes() == ROWS[[1, 1, 0]].tobytes()
    assert read(edited(golden)).rows.tobytes() == ROWS.tobytes()
    if spread is None:
        assert found.spread is None
    else:
        assert (found.spread.num_runs, found.spread.factors, found.spread.keys) == (2, {"norm": 1.5}, KEYS)
        assert found.spread.values.tolist() == [0.5, 0.0, 0.25]


def test_numbers_are_rounded_to_the_files_dtype(read):
    rows = np.stack([row((1.0 + 2.0**-30, 1e300), 1e300, 1, 0), row((-1e300, 0.1), 0.01, 1, 0)])
    golden = replace(GOLDEN, rows=rows, places=((np.array([0, 1]),), (np.zeros(0, np.int64),)))
    most = float(np.finfo(np.float32).max)
    narrow = golden.rounded().rows
    assert narrow[:, :2].tolist() == [[1.0, most], [-most, float(np.float32(0.1))]]
    assert narrow[:, 2].tolist() == [most**2, float(np.float32(0.1)) ** 2]
    assert narrow[:, 3:].tobytes() == rows[:, 3:].tobytes() == read(golden.to_bytes()).rows[:, 3:].tobytes()
    assert read(golden.to_bytes()).rows.tobytes() == narrow.tobytes()
    wide = replace(golden, sums_dtype="float64").rounded().rows
    np.testing.assert_allclose(wide, rows, rtol=2.0**-52)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        pytest.param({"num_sums": 0}, "the divisor of 256 as number of sums, got 0", id="no sums"),
        pytest.param({"num_sums": 3}, "the divisor of 256 as number of sums, got 3", id="no divisor"),
        pytest.param({"num_sums": 512}, "the divisor of 256 as number of sums, got 512", id="more than 256"),
        pytest.param({"num_sums": 2.0}, "the divisor of 256 as number of sums, got 2.0", id="no int"),
        pytest.param({"num_sums": 256}, "cannot reshape", id="another number of sums"),
        pytest.param({"num_rows": 4}, "cannot reshape", id="another number of rows"),
        pytest.param({"num_rows": 10**13}, "cannot reshape", id="rows beyond memory"),
        pytest.param({"sums_dtype": "float16"}, "the dtype of sums, got 'float16'", id="dtype"),
        pytest.param({"sums_dtype": "float64"}, "cannot reshape", id="wider dtype"),
        pytest.param({"lengths": [-1]}, "the length of a part, got -1", id="length below 0"),
        pytest.param({"lengths": [1e1]}, "the length of a part, got 10.0", id="length that is no int"),
        pytest.param({"lengths": [2, 6, 0, 10**6]}, "the length of a part, got 1000000", id="length beyond the end"),
        pytest.param({"lengths": [2, 6, 0]}, "not enough values", id="too few parts"),
        pytest.param({"num_places": [[2, 1]]}, "the steps of each rank, got 1", id="ranks"),
        pytest.param({"num_places": [[2, 1], [2]]}, "the row for each sketch, got 6", id="too few rows"),
        pytest.param({"command": "python"}, "the command, got 'python'", id="command that is no list"),
        pytest.param({"command": ["python", 3]}, r"the command, got \['python', 3\]", id="word that is no str"),
        pytest.param({"spread": {"num_runs": 1}}, "the number of perturbed runs, got 1", id="one perturbed run"),
        pytest.param({"spread": {"num_runs": 2.0}}, "the number of perturbed runs, got 2.0", id="runs that are no int"),
        pytest.param({"spread": {"factors": [1.0]}}, "the factors", id="factors that are no dict"),
        pytest.param({"spread": {"factors": {"norm": 1}}}, "the factors", id="factor that is no float"),
        pytest.param({"spread": {"factors": {"norm": 1.5, "loss": 1}}}, "the factors", id="one of two factors"),
        *(
            pytest.param({"spread": {"keys": [key, KEYS[1]]}}, "the quantity, got", id=f"quantity {i}")
            for i, key in enumerate(
                [
                    (1, "", 0, 1, (0, 2)),
                    ("norm", None, 0, 1, (0, 2)),
                    ("norm", "", -1, 1, (0, 2)),
                    ("norm", "", 0, -1, (0, 2)),
                    ("norm", "", 0, 1, (-1, 2)),
                    ("norm", "", 0, 1.0, (0, 2)),
                    ("norm", "", 0, 1, (0, True)),
                ]
            )
        ),
        pytest.param({"spread": {"keys": KEYS[:1]}}, "the spread of each quantity, got 3", id="too few quantities"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(read, fields, match):
    with pytest.raises(RecordingError, match=rf"a\.golden: damaged \(.*{match}.*\); restore the file"):
        read(edited(GOLDEN, **fields))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        pytest.param({"places": ((np.array([0, 3]),), ())}, "the rows of sketches, got 3", id="row beyond the last"),
        pytest.param({"places": ((np.array([0, -1]),), ())}, "the rows of sketches, got 3", id="row before the first"),
        pytest.param(
            {"spread": replace(SPREAD, values=np.array([0.5, -0.1, 0.0]))}, "the spread of each", id="spread below 0"
        ),
        pytest.param(
            {"spread": replace(SPREAD, values=np.array([0.5, np.nan, 0.0]))}, "the spread of each", id="spread of nan"
        ),
    ],
)
def test_parts_out_of_range_are_refused(read, changed, match):
    with pytest.raises(RecordingError, match=rf"a\.golden: damaged \(.*{match}.*\); restore the file"):
        read(replace(GOLDEN, **changed).to_bytes())


def test_bytes_after_the_end_are_refused(read, monkeypatch):
    content = GOLDEN.to_bytes()
    with pytest.raises(RecordingError, match="expected the end within 1073741824 bytes"):
        read(content + b"\0")
    size = len(lzma.decompress(content.removeprefix(FIRST_LINE)))
    monkeypatch.setattr("crossframe.recording.golden_file._LARGEST_CONTENT", size - 1)
    with pytest.raises(RecordingError, match=f"expected the end within {size - 1} bytes"):
        read(content)


def test_files_of_more_than_64_mib_are_refused(tmp_path):
    with open(tmp_path / "a.golden", "wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(
        RecordingError, match="expected at most 67108864 bytes, got 67108865; check the path, or record"
    ):
        Golden.read(tmp_path / "a.golden")


def test_a_golden_without_ranks_is_no_recording(tmp_path):
    golden = replace(GOLDEN, lines=(), places=(), spread=None)
    golden.write(tmp_path / "a.golden")
    assert [path.name for path in tmp_path.iterdir()] == ["a.golden"]
    assert Golden.read(tmp_path / "a.golden").places == ()
    with pytest.raises(RecordingError):
        Recording.open(tmp_path / "a.golden")


def test_equal_rows_are_kept_once():
    rows, places = distinct([ROWS[[1, 0, 1]], ROWS[:0], ROWS[[0, 2]]])
    assert rows.tobytes() == ROWS[[1, 0, 2]].tobytes()
    assert [each.tolist() for each in places] == [[0, 1, 0], [], [1, 2]]
    negative = ROWS[2].copy()
    negative[0] = -0.0  # another row, though its numbers are equal
    assert len(distinct([np.stack([ROWS[2], negative])])[0]) == 2

"""Hostile and unlucky arguments: the command answers or refuses, in seconds, in a few words, and touches nothing else."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.commands import module_of, status_of
from tests.conftest import EXHAUSTIVE

ROOT = Path(__file__).parents[3]
SECONDS = 10
MOST_MESSAGE = 2000
LONG = "9" * 400


class TooSlowError(BaseException):
    """No handler of errors of the command catches it."""


@contextmanager
def limited():
    """At most SECONDS of the processor in this process, however many others run."""

    def stop(*_):
        raise TooSlowError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def run(*arguments):
    """Exit status, output and message of the command in this process; what every call of it must obey is asserted."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), limited():
        status = status_of(*arguments)
    said = err.getvalue()
    assert status in (0, 1, 2)
    assert status == 0 or said.startswith("crossframe: ") or not said
    assert "Traceback" not in said + out.getvalue() and "internal error" not in said, said
    assert len(said.encode(errors="backslashreplace")) <= MOST_MESSAGE  # as streams of the command write it
    assert not set(said + out.getvalue()) & set("\x1b\x07\x08\x9b")
    return status, out.getvalue(), said


SIZES = [
    ["plan", "gpt", "--world-size"],
    ["plan", "gpt", "--world-size", "2", "--microbatches"],
    ["plan", "gpt", "--world-size", "2", "--tokens"],
    ["plan", "gpt", "--world-size", "2", "--forward-prefetch"],
    ["plan", "gpt", "--world-size", "2", "--rank"],
    ["plan", "gpt", "--world-size", "8", "--strategy", "hybrid_shard", "--shard"],
    ["plan", "gpt", "--world-size", "8", "--api", "fsdp2", "--reshard-after-forward"],
    ["plan", "gpt", "--world-size", "2", "--bandwidth"],
    ["plan", "gpt", "--world-size", "2", "--latency"],
    ["plan", "gpt", "--world-size", "2", "--flops"],
    ["layout", "gpt", "--world-size"],
    ["layout", "gpt", "--world-size", "4", "--replicate"],
    ["layout", "gpt", "--world-size", "4", "--rank"],
    ["layout", "gpt", "--world-size", "4", "--where"],
    *(
        ["parity", "gpt-tiny", f"--{name}"]
        for name in ("world-size", "steps", "batch-size", "accumulate", "seed", "perturbed_runs")
    ),
    *(["parity", "gpt-tiny", f"--{name}"] for name in ("mesh", "clip", "learning-rate")),
    *(["train", "torch", "gpt-tiny", "--output", "out", f"--{name}"] for name in ("dense", "window", "resume-at")),
    *(
        ["train", "torch", "gpt-tiny", "--output", "out", f"--{name}"]
        for name in ("world-size", "perturbed_runs", "rounding")
    ),
    *(["record", "train.py", f"--{name}"] for name in ("nproc-per-node", "every", "dense", "perturbed_runs", "window")),
    ["grid", "--steps"],
    ["grid", "--ranks"],
    ["faults", "--jobs"],
    ["bench", "fsdp-variants", "--steps"],
    ["bench", "fsdp-variants", "--ranks"],
    ["spec", "--rule"],
    ["clean-pairs", "--model"],
]


INVALID_SIZES = [LONG, f"-{LONG}", "nan", "1e400", "\x1b[2J", "[/]", "0x"]


def sizes_of(at):
    """All invalid sizes for --exhaustive, else three of them, by an option's position; each option gets a number and a word."""
    return INVALID_SIZES if EXHAUSTIVE in os.environ else [INVALID_SIZES[(at + step) % 7] for step in (0, 2, 4)]


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        pytest.param(arguments, size, id=f"{arguments[-1]} {arguments[0]}-{size!a}")
        for at, arguments in enumerate(SIZES)
        for size in sizes_of(at)
    ],
)
def test_sizes_out_of_range_are_refused(tmp_path, monkeypatch, arguments, size):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit(0)")
    before = sorted(tmp_path.iterdir())
    status, _, _ = run(*arguments, size)
    assert status == 2
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "gpt", "--world-size", "2", "--microbatches", 10**9],
        ["parity", "gpt-tiny", "--world-size", 10**9],
        ["parity", "gpt-tiny", "--accumulate", 10**9],
        ["parity", "gpt-tiny", "--batch-size", 10**5],
        ["parity", "gpt-tiny", "--batch-size", 2**10, "--accumulate", 2**10],
        ["train", "torch", "gpt-tiny", "--output", "out", "--twins", 10**9],
        ["record", "train.py", "--nproc-per-node", 10**9],
        ["faults", "--jobs", 10**9],
    ],
    ids=lambda arguments: " ".join(map(str, arguments[-2:])),
)
def test_sizes_that_are_too_large_say_the_limit(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    status, _, said = run(*arguments)
    assert status == 2 and "expected at most" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


MANY = 10**5 if EXHAUSTIVE in os.environ else 10**4
SHAPES = {
    "empty": b"",
    "binary": bytes(range(256)) * 10,
    "deep": b"[" * 10**6,
    "null": b"null",
    "a number": b"1e999",
    "many digits": b'{"w": [' + b"9" * 10**4 + b"]}",
    "huge shape": json.dumps({"w": [2**62, 2**62]}).encode(),
    "many dims": json.dumps({"w": [1] * 10**5}).encode(),
    "negative": b'{"w": [-1]}',
    "nan": b'{"w": [NaN]}',
    "a text as shape": b'{"w": "abc"}',
    "twice": b'{"w": [1], "w": [2]}',
    "control characters": json.dumps({"\x1b[2J[/]": [4, 4], ":smile:": [3]}).encode(),
    "surrogate": b'{"\\ud800": [4, 4]}',
    "long name": json.dumps({"w" * 10**6: [4, 4]}).encode(),
    "units of another kind": b'{"params": [{"name": "w", "shape": [1]}], "units": [1, null]}',
    "dtype of another kind": b'{"params": [{"name": "w", "shape": [1], "dtype": [1]}]}',
    "many parameters": json.dumps({f"layer{i}.w": [1] for i in range(MANY)}).encode(),
    "many units": json.dumps(
        {
            "params": [{"name": f"layer{i}.w", "shape": [1]} for i in range(2 * 10**4)],
            "units": [f"layer{i}" for i in range(2 * 10**4)],
        }
    ).encode(),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("command", ["layout", "plan"])
def test_files_of_shapes_are_answered_or_refused(tmp_path, command, name):
    path = tmp_path / "params.json"
    path.write_bytes(SHAPES[name])
    run(command, path, "--world-size", 4)
    assert path.read_bytes() == SHAPES[name]


@pytest.mark.parametrize("kind", ["folder", "fifo", "device", "loop", "sparse"])
@pytest.mark.parametrize("command", ["layout", "plan"])
def test_what_is_no_file_of_shapes_is_refused(tmp_path, command, kind):
    path = tmp_path / "params.json"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(2**40)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    status, _, said = run(command, path, "--world-size", 4)
    assert status == 2 and str(path) in said


@pytest.mark.parametrize("kind", ["file", "loop", "below a file", "long", "null", "read-only"])
def test_output_that_cannot_be_written_is_refused(tmp_path, kind):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    path = {
        "file": mine / "drawing.svg",
        "loop": tmp_path / "loop",
        "below a file": mine / "a" / "b.svg",
        "long": tmp_path / ("a" * 300),
        "null": f"{tmp_path}/a\0b",
        "read-only": Path("/proc/drawing.svg"),
    }[kind]
    if kind == "loop":
        path.symlink_to(path)
    for command in ("plan", "layout"):
        assert run(command, "gpt-tiny", "--world-size", 2, "--svg", path)[0] == 2
    assert run("train", "torch", "gpt-tiny", "--output", path, "--steps", 1)[0] == 2
    assert run("parity", "gpt-tiny", "--output", path, "--fault", "none of them")[0] == 2
    assert mine.read_text() == "mine"


def test_text_of_the_user_is_no_markup(tmp_path):
    folder = tmp_path / "[/] [bold] :smile: \x1b[31m"
    folder.mkdir(parents=True)
    status, out, _ = run("layout", "gpt-tiny", "--world-size", 2, "--svg", folder / "drawing.svg")
    assert status == 0 and out.endswith("[/] [bold] :smile: \\x1b[31m/drawing.svg\n")
    assert (folder / "drawing.svg").exists()


WORDS = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        ["", "--", "-", "[/]", "\x1b[2J", "\0", "\ud800", "a" * 10**5, LONG, f"-{LONG}", "1e999", "nan", "0", "-1"]
    ),
    st.integers(-(10**12), 10**12).map(str),
)
OPTIONS = st.sampled_from(
    [
        "--world-size",
        "--rank",
        "--layout",
        "--dtype",
        "--where",
        "--unit",
        "--dim",
        "--replicate",
        "--compute-dtype",
        "--strategy",
        "--shard",
        "--api",
        "--microbatches",
        "--tokens",
        "--latency",
        "--bandwidth",
        "--events",
        "--sync",
        "--reshard-after-forward",
        "--backward-prefetch",
        "--param-dtype",
        "--help",
        "--output",
        "--svg",
    ]
)
ARGUMENTS = st.lists(st.one_of(WORDS, OPTIONS), max_size=6)


@settings(
    max_examples=60 if EXHAUSTIVE in os.environ else 25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    command=st.sampled_from(["layout", "plan", "compare"]),
    first=st.sampled_from(["gpt-tiny", "mlp", "."]),
    rest=ARGUMENTS,
)
@example("compare", ".", ["\ud800"])
@example("compare", ".", ["a" * 10**5])
@example("layout", "gpt-tiny", ["--world-size", "2", "--svg", "\0"])
def test_any_arguments_end_with_an_answer_or_a_refusal(tmp_path, command, first, rest):
    (tmp_path / "mine").write_text("mine")
    with chdir(tmp_path):
        run(command, first, *rest)
    assert (tmp_path / "mine").read_text() == "mine"


@settings(
    max_examples=25 if EXHAUSTIVE in os.environ else 12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(words=st.lists(WORDS, max_size=4))
def test_unknown_commands_and_options_are_refused(tmp_path, words):
    with chdir(tmp_path):
        assert run("no-such-command", *words)[0] == 2
        assert run("parity", "no-such-model", *words)[0] in (0, 2)  # words may ask for help
        assert run("compare", "--no-such-option", *words)[0] == 2


# In a process of its own, with its environment and its streams


def spawned(*arguments, env=None, **options):
    limited_to_1_gib = ["sh", "-c", 'ulimit -d 1048576 && exec "$@"', "sh"]
    return subprocess.run(
        [*limited_to_1_gib, sys.executable, "-m", module_of(str(arguments[0])), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (env or {}),
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=200,
        check=False,
        **options,
    )


@pytest.mark.parametrize(
    ("environment", "status"),
    [
        (
            {
                "COLUMNS": "0",
                "TERMINAL_WIDTH": "wide",
                "LINES": "-1",
                "PYTHONIOENCODING": "ascii",
                "HOME": "/nonexistent",
            },
            0,
        ),
        ({"COLUMNS": "9" * 400, "TERM": "unknown", "PYTHONUTF8": "0", "LC_ALL": "C"}, 0),
    ],
    ids=["narrow, ascii", "unknown"],
)
def test_the_environment_does_not_stop_output(environment, status):
    ended = spawned("layout", "gpt-tiny", "--world-size", "2", env=environment, stdout=subprocess.PIPE)
    assert ended.returncode == status, ended.stderr
    assert b"token_embedding" in ended.stdout and not ended.stderr


def test_output_that_nobody_reads_is_no_bug():
    reader, writer = os.pipe()
    os.close(reader)
    ended = spawned("plan", "gpt", "--world-size", "2", stdout=writer)
    os.close(writer)
    assert ended.returncode == 128 + signal.SIGPIPE and not ended.stderr
    with open("/dev/full", "wb") as full:
        ended = spawned("plan", "gpt", "--world-size", "2", stdout=full)
    assert (
        ended.returncode == 2 and ended.stderr.startswith(b"crossframe: cannot ") and b"Traceback" not in ended.stderr
    )

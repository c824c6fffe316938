"""The description of the program that ran: the format of its products, and what changes its digests."""

import json
import os
import platform
import sys
from types import SimpleNamespace

import pytest

from crossframe.recording import program
from crossframe.recording.program import (
    environment_digest,
    processor,
    products_in,
    program_of,
    source_digest,
    sources,
    with_digests,
)

KERNEL = (100, 80, 3)


@pytest.mark.parametrize(
    ("dtype", "stated", "expected"),
    [
        ("float32", {"matmul": "None"}, "float32"),
        ("float32", {"device": "cpu", "matmul": "None"}, "float32"),
        ("float32", {"device": "cuda H100"}, "float32"),
        ("float64", {"device": "cuda H100", "matmul": "high"}, "float64"),
        ("bfloat16", {"device": "tpu", "matmul": "None"}, "bfloat16"),
        ("float32", {"device": "rocm MI300", "matmul": "high"}, "tf32"),
        ("float32", {"device": "gpu", "matmul": "BF16_BF16_BF16"}, "bfloat16"),
        ("float32", {"device": "gpu", "matmul": "BF16_BF16_F32_X3"}, "tf32"),
        ("float32", {"device": "tpu v5", "matmul": "None"}, "bfloat16"),
        *(
            ("float32", {"device": "tpu v5", "matmul": exact}, "float32")
            for exact in ("highest", "HIGHEST", "float32", "F32_F32_F32", "F64_F64_F64")
        ),
    ],
)
def test_products_have_the_format_of_the_device_and_precision(dtype, stated, expected):
    assert products_in(dtype, stated, [(8, 8)]) == expected


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        pytest.param([(8, 8), KERNEL], "tf32", id="one kernel of two weights"),
        pytest.param([(8, 3, 64)], "tf32", id="a long kernel"),
        pytest.param([(4, 3, 65)], "float32", id="stacked matrices"),
        pytest.param([(8, 8)], "float32", id="a matrix"),
    ],
)
def test_tf32_in_convolutions_needs_a_kernel(shapes, expected):
    stated = {"device": "cuda H100", "matmul": "highest"}
    assert products_in("float32", stated | {"tf32": True}, shapes) == expected
    assert products_in("float32", stated | {"tf32": False}, shapes) == "float32"
    assert products_in("float32", stated | {"tf32": True, "matmul": "high"}, shapes) == "tf32"


@pytest.fixture
def running(tmp_path, monkeypatch):
    """Makes files, and a process that runs the first one and has imported the others; returns their paths."""

    def start(folder, contents, *more):
        paths = [tmp_path / folder / name for name in contents]
        for path, content in zip(paths, contents.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        modules = [SimpleNamespace(__file__=file) for file in (*map(str, paths[1:]), *more)]
        monkeypatch.setattr(program, "sys", SimpleNamespace(argv=[str(paths[0])], modules=dict(enumerate(modules))))
        return paths

    return start


def test_sources_are_the_script_and_modules_not_installed(tmp_path, monkeypatch, running):
    names = ("train.py", "helpers.py", "lib/site-packages/installed.py", "extension.so")
    script, helpers, *_ = running("a", dict.fromkeys(names, ""), json.__file__, None, str(tmp_path / "a/gone.py"))
    assert sources() == [str(helpers), str(script)]
    link = tmp_path / "linked.py"
    link.symlink_to(helpers)
    monkeypatch.setattr(
        program,
        "sys",
        SimpleNamespace(argv=["a/train.py"], modules={"linked": SimpleNamespace(__file__=str(link)), "sys": sys}),
    )
    monkeypatch.chdir(tmp_path)
    assert sources() == [str(helpers), str(script)]
    program.sys.argv.clear()
    assert sources() == [str(helpers)]


def test_the_source_digest_is_of_names_and_contents(running):
    own = {f"{name}.py": f"a = {name!r}\n" for name in "etzbkm"} | {os.fsdecode(b"n\xff.py"): ""}
    paths = running("a", own)
    known = "8fd1f637162298ad"  # as in recordings that exist, so that a repetition of their program is recognized
    assert source_digest() == known
    running("b", own)
    assert source_digest() == known
    for folder, other in (("c", own | {"k.py": "a"}), ("d", {name.replace("k", "l"): own[name] for name in own})):
        running(folder, other)
        assert source_digest() != known, folder
    running("a", own)
    paths[0].unlink()  # a file that the process has imported
    assert source_digest() != known


# What torchrun, Slurm, shells and terminals set.
OF_A_LAUNCH = """TORCHELASTIC_RUN_ID TORCH_NCCL_ASYNC_ERROR_HANDLING GROUP_RANK ROLE_RANK LOCAL_RANK RANK WORLD_SIZE MASTER_ADDR
    MASTER_PORT SLURM_JOB_ID HOSTNAME SSH_CONNECTION XDG_SESSION_ID TERM TERM_PROGRAM LC_ALL COLUMNS LINES LS_COLORS _ PWD OLDPWD
    SHLVL TMPDIR PYTEST_CURRENT_TEST CROSSFRAME_RECORD"""


def test_the_environment_digest_is_of_what_a_launch_keeps():
    known = "21f084cf57de5236"
    kept = {"OMP_NUM_THREADS": "2", "A": os.fsdecode(b"\xff"), "MY_RANK": "1"}
    assert environment_digest(kept) == environment_digest(dict(reversed(kept.items()))) == known
    for name in OF_A_LAUNCH.split():
        assert environment_digest(kept | {name: "1"}) == known, name
    for name in kept:
        assert environment_digest(kept | {name: "3"}) != known, name


def test_the_program_states_its_device_and_its_machine():
    described = program_of(device="cuda H100", deterministic=True, compiled=False, threads=4)
    assert with_digests(described) == {
        "device": "cuda H100",
        "processor": processor(),
        "python": platform.python_version(),
        "deterministic": True,
        "compiled": False,
        "threads": 4,
        "source": source_digest(),
        "environment": environment_digest(os.environ),
    }

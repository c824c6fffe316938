"""Folders that someone made to do harm, and what the loaders answer: `python -m tests.core.programs.loaders FOLDER EVERY`.

It runs in a process of its own, whose memory and time are limited. It prints what went wrong, one line a case.
"""

import copy
import hashlib
import json
import math
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crossframe import checkpoint
from crossframe.checkpoint import MODEL
from crossframe.dtypes import numpy_dtype
from crossframe.errors import CrossframeError
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout, Sharding
from crossframe.mesh import MeshSpec
from crossframe.params import ParamSpec
from crossframe.recording import Recording
from crossframe.verdict import compare
from tests.core.helpers import synthetic

MOST_BYTES, MOST_SECONDS, LONGEST_MESSAGE = 1 << 30, 10, 2048
SPARSE = 1 << 40

DEEP: Any = []
for _ in range(500):
    DEEP = [DEEP]
RAW = "raw text instead of a value: "
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 0.5, 2**31, 2**63, 2**80, math.nan, math.inf, "", "x", "float32", "float8_e4m3fn", "../../../etc/passwd",
    "\ud800", "\x00\x1b[2J", "n" * 100_000, [], [0], [-1, "a"], [2**62, 2**62], [1] * 65, {}, {"a": 1}, DEEP,
    RAW + "1" * 400, RAW + "-" + "9" * 5000, RAW + "1e999", RAW + "[" * 5000,
)  # fmt: skip
"""Replacements for any value of a JSON text, with corrected checksums."""


def make_checkpoint(path: Path) -> None:
    """Three kinds of layouts over two ranks, two values."""
    units = (
        ("", FlatLayout((ParamSpec("w", (5, 3)), ParamSpec("b", (7,), aliases=("tied",))), 2, True, "bfloat16")),
        ("rows", PerParamLayout((ParamSpec("rows.k", (4, 6), "bfloat16"),), 2, (1,))),
        ("line", RaggedLayout((ParamSpec("line.q", (6, 4)), ParamSpec("line.s", (9,))), 2, (8, 1))),
    )
    sharding = Sharding(units, MeshSpec(2))
    values = {"step": np.array(3, np.int32), "scale": np.array([0.5, 2], np.float32)}
    token = checkpoint.begin(path)
    for rank in range(2):
        lines = [np.ones(layout.padded_shard_numel, numpy_dtype(layout.dtype)) for _, layout in units]
        checkpoint.write_rank(path, token, rank, {MODEL: sharding}, {MODEL: lines}, values if rank == 0 else None)
    checkpoint.finish(path, token, {MODEL: sharding}, values, {"step": 3})


def make_recording(path: Path) -> None:
    """Two steps, the first dense."""
    settings = {"optimizer": "SGD", "accumulate": 1, "batch_size": 3, "clip": 1.0, "betas": [0.9, 0.99]}
    synthetic.write_run(path, synthetic.manifest(steps=2, settings=settings))


def use_checkpoint(path: Path, right: Path) -> None:
    """Everything that is read of a checkpoint."""
    saved = checkpoint.read(path)
    target = checkpoint.read(right).sections[MODEL]
    for name in saved.files:
        saved.complaint(name)
    for rank in range(2):
        saved.lines(MODEL, target, rank)
    for key in saved.values:
        saved.value(key)


def use_recording(path: Path, right: Path) -> None:
    """Everything that is read of a recording."""
    found = Recording.open(path)
    _ = found.steps_done(), found.losses(), found.perturbed_runs()
    for step in range(found.num_steps):
        for rank in range(found.manifest.world_size):
            _ = found.batch(step, rank), found.collectives(step, rank), found.grad_norm(step, rank)
    for step in found.recorded_steps():
        for name in found.manifest.params:
            for phase in ("reduce", "update"):
                if found.has(phase, step, name):
                    found.full(phase, step, name)
            for slot in found.state_slots(step, name):
                found.full("state", step, name, use=slot)
        for at in found.activations(step):
            found.activation(step, 0, *at)


def use_pair(path: Path, right: Path) -> None:
    """A comparison with what it was before."""
    for pair in ((path, right), (right, path)):
        compare(*map(Recording.open, pair))


def seal_index(path: Path, content: Any) -> None:
    """Write an index whose checksum is right."""
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    put(path / "index.json", {"content": content, "sha256": digest})


def put(path: Path, value: Any) -> str:
    """Write JSON, with raw text where a value begins with `RAW`; returns the text."""
    text = json.dumps(value)
    start = text.find(f'"{RAW}')
    if start >= 0:
        stop = text.index('"', start + 1)
        text = text[:start] + text[start + 1 + len(RAW) : stop] + text[stop + 1 :]
    path.write_text(text)
    return text


def replaced(tree: Any) -> Iterator[tuple[str, Any]]:
    """(what was done, a copy) of a JSON tree: each of its values gone, and replaced by each of `VALUES`."""
    for keys in list(_paths(tree)):
        *before, last = keys
        for i, value in enumerate(VALUES):
            changed = copy.deepcopy(tree)
            _at(changed, before)[last] = value
            yield f"{keys} = VALUES[{i}]", changed
        changed = copy.deepcopy(tree)
        del _at(changed, before)[last]
        yield f"{keys} gone", changed


def _paths(tree: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*before, key)
        yield from _paths(value, (*before, key))


def _at(tree: Any, keys: Any) -> Any:
    for key in keys:
        tree = tree[key]
    return tree


def _indexes(right: Path) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    content = json.loads((right / "index.json").read_text())["content"]
    for what, changed in replaced(content):
        yield f"index: {what}", lambda path, changed=changed: seal_index(path, changed)


def _manifests(right: Path) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    def change(path: Path, changed: Any) -> None:
        was = hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
        text = put(path / "manifest.json", changed)
        for rank in range(2):
            synthetic.edit_events(path, was, hashlib.sha256(text.encode()).hexdigest(), rank=rank)

    for what, changed in replaced(json.loads((right / "manifest.json").read_text())):
        yield f"manifest: {what}", lambda path, changed=changed: change(path, changed)


def _lines(right: Path) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    def change(path: Path, i: int, changed: Any, event: str) -> None:
        file = path / "rank00000" / "events.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        lines[i] = put(path / "scratch", changed) + "\n"
        (path / "scratch").unlink()
        file.write_text("".join(lines))
        synthetic.edit_events(path, "", "", seal=event != "end")

    seen = set()
    for i, line in enumerate((right / "rank00000" / "events.jsonl").read_text().splitlines()):
        fields = json.loads(line)
        if (kind := (fields["event"], fields.get("phase"))) not in seen:
            seen.add(kind)
            for what, changed in replaced(fields):
                yield (
                    f"line {kind}: {what}",
                    lambda path, i=i, changed=changed, event=kind[0]: change(path, i, changed, event),
                )


def _files(right: Path) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """Each file of a folder in other kinds and sizes."""

    def sparse(file: Path) -> None:
        with file.open("wb") as opened:
            opened.truncate(SPARSE)

    def device(name: str) -> Callable[[Path], None]:
        return lambda file: file.symlink_to(name)

    kinds: dict[str, Callable[[Path], Any]] = {
        "a pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "absent": lambda file: None,
        "a device without end": device("/dev/zero"),
        "a device without content": device("/dev/null"),
        "a link to itself": lambda file: file.symlink_to(file.name),
        "sparse": sparse,
        "empty": Path.touch,
        "a line without end": lambda file: file.write_bytes(b'{"a": "' + b"x" * (1 << 25)),
        "brackets without end": lambda file: file.write_bytes(b"[" * (1 << 20)),
        "many values": lambda file: file.write_bytes(b"[" + b"[]," * (1 << 24) + b"0]"),
        "bytes": lambda file: file.write_bytes(bytes(range(256)) * 64),
        "a header of exabytes": lambda file: file.write_bytes((1 << 62).to_bytes(8, "little") + b"{}"),
    }

    def change(path: Path, name: Path, make: Callable[[Path], Any]) -> None:
        (path / name).unlink()
        make(path / name)

    for name in sorted(file.relative_to(right) for file in right.rglob("*") if file.is_file()):
        for kind, make in kinds.items():
            yield f"{name} is {kind}", lambda path, name=name, make=make: change(path, name, make)


def _relabelled(right: Path) -> Iterator[tuple[str, Callable[[Path], Any]]]:
    """Other headers of tensors, all checksums redone."""

    def change(path: Path, old: bytes, new: bytes) -> None:
        file = path / "rank00000.safetensors"
        content = file.read_bytes()
        assert old in content, old
        content = content.replace(old, new)
        file.write_bytes(content)
        index = json.loads((path / "index.json").read_text())["content"]
        index["files"][file.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        seal_index(path, index)

    for old, new in (
        (b'"F32"', b'"I32"'),
        (b'"U16"', b'"F16"'),
        (b'"U8"', b'"I8"'),
        (b'"F32"', b"[[1]]"),
        (b"[0,", b"[4,"),
    ):
        yield f"{old} as {new}", lambda path, old=old, new=new: change(path, old, new)


SUITES = {
    "checkpoint": (make_checkpoint, (use_checkpoint,), (_indexes, _files, _relabelled)),
    "recording": (make_recording, (use_recording, use_pair), (_manifests, _lines, _files)),
}


def main(folder: Path, every: int) -> None:
    """Run each n-th case of those that are made by rule, and all others."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done after {MOST_SECONDS} seconds")

    signal.signal(signal.SIGALRM, late)
    with open("/proc/self/statm") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, size + MOST_BYTES))
    number = 0
    for name, (make, uses, families) in SUITES.items():
        right = folder / name / "right"
        right.parent.mkdir()
        make(right)
        for use in uses:
            use(right, right)
        for family in families:
            for what, change in family(right):
                number += 1
                if number % every and family not in (_relabelled,):
                    continue
                path = folder / name / "wrong"
                shutil.copytree(right, path)
                change(path)
                before = sorted(str(file) for file in path.rglob("*"))
                for use in uses:
                    if wrong := _answer(use, path, right):
                        print(json.dumps(f"{name}, {what}, {use.__name__}: {wrong}"))
                if sorted(str(file) for file in path.rglob("*")) != before:
                    print(f"{name}, {what}: files were made or deleted")
                shutil.rmtree(path)
    print(f"{number} cases, each {every}th run")


def _answer(use: Callable[[Path, Path], None], path: Path, right: Path) -> str:
    """What is wrong with the answer to a folder; "" for a result, or an error of the project's own kind that says where."""
    signal.alarm(MOST_SECONDS)
    try:
        use(path, right)
    except CrossframeError as error:
        said = str(error)
        if len(said.encode(errors="replace")) > LONGEST_MESSAGE:
            return f"a message of {len(said)} characters: {said[:200]}"
        return "" if path.name in said else f"the message does not say where: {said}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]} ({_last(error)})"
    finally:
        signal.alarm(0)
    return ""


def _last(error: BaseException) -> str:
    trace, at = error.__traceback__, ""
    while trace:
        at, trace = f"{trace.tb_frame.f_code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}", trace.tb_next
    return at


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

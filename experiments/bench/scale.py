"""What recording costs at scale: one rank of 64 of a model of eight billion parameters, and work on the recordings of all ranks.

Nothing is trained and no rank talks to another. One rank's shards are drawn, of the shapes that they have, and sketched and
written as at a recorded step. The recordings of all ranks are made up as in `experiments.bench.verdict_cost`, and the traces of
operators as in `experiments.bench.explain_cost`.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, Sketch, create_recording
from crossframe.recording.sample import num_sampled
from crossframe.recording.sketch import WHOLE
from experiments.bench.explain_cost import explain_traces, read_traces, write_traces
from experiments.bench.figure import Figure, Section
from experiments.bench.verdict_cost import (
    AS_IT_IS,
    QUICK,
    CompareSizes,
    Form,
    Piece,
    compare_recordings,
    manifest_of,
    map_recordings,
    measured,
    pieces_of,
    write_sketched,
)
from experiments.models.llama import LlamaConfig
from torch_backend.recorder._sketch import sample_of, sketches_of

# As Llama 3 8B.
EIGHT_BILLION = LlamaConfig(
    num_blocks=32, width=4096, mlp_width=14336, num_heads=32, num_kv_heads=8, head_width=128, vocabulary=128256
)
FULL = CompareSizes(EIGHT_BILLION, world_size=64, num_steps=10, few_steps=10)
SMALL = QUICK
EVERY = 100
"""A recorder's default: tensors of one step in a hundred."""


STEP_SECONDS = 10.0
"""How long a training step is assumed to take, for the load on a file system."""
RENAMED, TRANSPOSED = Form(prefix="net."), Form(prefix="net.", transposed=True)
BLOCKS = (8, 32)
"""Numbers of layers whose operators are matched."""


def scale_sections(sizes: CompareSizes, blocks: Sequence[int] = BLOCKS) -> Iterator[Section]:
    """Record one rank; compare and map the recordings of all; match operators."""
    with tempfile.TemporaryDirectory() as folder:
        yield rank_section(Path(folder, "one"), sizes)
    with tempfile.TemporaryDirectory() as folder:
        yield compare_section(Path(folder), sizes)
    with tempfile.TemporaryDirectory() as folder:
        yield map_section(Path(folder), sizes)
    with tempfile.TemporaryDirectory() as folder:
        yield explain_section(Path(folder), sizes, blocks)


def compare_section(folder: Path, sizes: CompareSizes) -> Section:
    """Compare recordings of these sizes, and of more parameters, ranks and steps."""
    larger = {
        f"{sizes.world_size} ranks": sizes,
        "parameters x 2": replace(sizes, model=replace(sizes.model, num_blocks=2 * sizes.model.num_blocks)),
        "ranks x 2": replace(sizes, world_size=2 * sizes.world_size),
        "steps x 10": replace(sizes, num_steps=10 * sizes.num_steps),
    }
    figures = []
    for what, each in larger.items():
        paths = folder / f"a {what}", folder / f"b {what}"
        for path, noise in zip(paths, (0.0, 1e-9), strict=True):
            write_sketched(path, each, noise=noise)
        if each is sizes:
            opened = measured(_opened, paths[0])
            figures.append(Figure("one recording, opened", opened.cpu_seconds, "CPU s"))
        cost = measured(compare_recordings, *paths)
        figures += [
            Figure(f"{what}: a recorded step compared", 1e3 * cost.cpu_seconds / each.num_steps, "CPU ms"),
            Figure(f"{what}: compared", cost.cpu_seconds, "CPU s"),
            Figure(f"{what}: compared, peak memory", cost.peak_bytes / 1e6, "MB"),
        ]
    how = (
        f"Recordings of {sizes.num_steps} recorded steps on {sizes.world_size} ranks, made up and read from the system's cache. "
        "CPU seconds and memory are those of one process, which compares gradients, both moments and parameters of each step."
    )
    return Section("Comparisons at scale", how, tuple(figures))


def map_section(folder: Path, sizes: CompareSizes) -> Section:
    """Map and compare recordings of programs with other names and other orders of dims."""
    paths = {name: folder / name for name in ("a", "renamed", "transposed")}
    for (name, path), form in zip(paths.items(), (AS_IT_IS, RENAMED, TRANSPOSED), strict=True):
        write_sketched(path, sizes, noise=0.0 if name == "a" else 1e-9, form=form)
    figures = []
    for name in ("renamed", "transposed"):
        cost = measured(map_recordings, paths["a"], paths[name])
        figures += [
            Figure(f"map, {name}", cost.cpu_seconds, "CPU s"),
            Figure(f"map, {name}: peak memory", cost.peak_bytes / 1e6, "MB"),
        ]
    cost = measured(compare_recordings, paths["a"], paths["renamed"])
    figures += [
        Figure(f"compared with other names: {sizes.num_steps} steps", cost.cpu_seconds, "CPU s"),
        Figure("compared with other names: peak memory", cost.peak_bytes / 1e6, "MB"),
    ]
    how = (
        f"`crossframe map` of two of these recordings, in one of which all parameters have other names, or all "
        f"{sum(len(shape) == 2 for shape in sizes.model.shapes.values())} matrices are transposed too. Norms have the value 1 "
        "and are told apart by their gradients. The map of other names is verified on all values, that of transposed matrices "
        "on signatures and samples."
    )
    return Section("Maps at scale", how, tuple(figures))


def explain_section(folder: Path, sizes: CompareSizes, blocks: Sequence[int]) -> Section:
    """Match the operators of two runs of a step."""
    figures = []
    for num_blocks in blocks:
        paths = write_traces(folder, replace(sizes.model, num_blocks=num_blocks))
        read, cost = measured(read_traces, *paths), measured(explain_traces, *paths)
        what = f"{num_blocks} layers"
        with open(paths[0], "rb") as file:
            figures.append(Figure(f"{what}: operators of a trace", sum(1 for _ in file) - 1, "operators"))
        figures += [
            Figure(f"{what}: a trace", paths[0].stat().st_size / 1e6, "MB"),
            Figure(f"{what}: both traces read", read.cpu_seconds, "CPU s"),
            Figure(f"{what}: operators matched", cost.cpu_seconds - read.cpu_seconds, "CPU s"),
            Figure(f"{what}: peak memory", cost.peak_bytes / 1e6, "MB"),
        ]
    how = (
        "`crossframe explain` repeats both runs, whose cost is theirs and is not simulated, and then reads and matches their "
        "operators. Two traces of forward and backward of one rank are made up, with the shapes of the model and random "
        "signatures, equal but for rounding up to the middle of forward and different from there on."
    )
    return Section("Operators at scale", how, tuple(figures))


def rank_section(path: Path, sizes: CompareSizes) -> Section:
    """Record two steps of rank 0 into `path`."""
    made = replace(manifest_of(sizes), schedule=Schedule(dense=0, every=1), steps=2)
    torch.set_num_threads(1)
    start = time.process_time()
    create_recording(path, made)
    begun = time.process_time() - start
    num_bytes = [(path / "manifest.json").stat().st_size]
    taken = []
    own = pieces_of(made, 0)
    with RecordingWriter(path, made, 0) as writer:
        for step in range(2):
            taken.append(_step(writer, step, own, made))
            num_bytes.append(sum(file.stat().st_size for file in writer.folder.iterdir()))
    numel = sum(stop - first for _, pieces in own for _, first, stop, _ in pieces)
    num_sampled_items = sum(1 + num_sampled(stop - first) for _, pieces in own for _, first, stop, _ in pieces)
    a_step, ranks = num_bytes[2] - num_bytes[1], sizes.world_size
    how = (
        f"Llama of {sizes.model.numel / 1e9:.2f} billion parameters ({len(sizes.model.shapes)} tensors) in float32, flat "
        f"layouts over {ranks} ranks, of which rank 0 is simulated: its {numel / 1e6:.0f} million elements of parameters, "
        "gradients and both moments are drawn, and sketched and written on one thread of a CPU. Each rank writes files of its "
        "own and waits for no other; at a recorded step it creates one file, renames it, and appends to another one. The first "
        "rank alone also writes the manifest, once. CPU seconds grow with the elements of a rank, bytes with the number of its "
        f"tensors. The load on a file system is that of all ranks, if a step takes {STEP_SECONDS:.0f} s and one in {EVERY} is "
        "recorded."
    )
    figures = (
        Figure("a recorded step of one rank: sketching and writing", taken[1], "CPU s"),
        Figure("the first step of one rank, with parameters and samples", taken[0], "CPU s"),
        Figure("a recorded step of one rank: written", a_step / 1e6, "MB"),
        Figure("samples of the first step of one rank: written", 8 * num_sampled_items / 1e3, "kB"),
        Figure("a recorded step of all ranks: written", ranks * a_step / 1e6, "MB"),
        Figure("a recorded step of all ranks: files created", ranks, "files"),
        Figure("file system, on average: written", ranks * a_step / (EVERY * STEP_SECONDS) / 1e3, "kB/s"),
        Figure("file system, on average: files created", 60 * ranks / (EVERY * STEP_SECONDS), "files/min"),
        Figure("file system, in a recorded step: written", ranks * a_step / STEP_SECONDS / 1e6, "MB/s"),
        Figure(f"a run of 10,000 steps, one in {EVERY} recorded: written", ranks * a_step * 10_000 / EVERY / 1e9, "GB"),
        Figure(f"a run of 10,000 steps, one in {EVERY} recorded: files", ranks * (10_000 // EVERY + 1) + 1, "files"),
        Figure("the first rank alone: the manifest, once", begun, "CPU s"),
        Figure("the first rank alone: the manifest", num_bytes[0] / 1e3, "kB"),
    )
    return Section("Recording at scale", how, figures)


def _step(writer: RecordingWriter, step: int, own: list[tuple[str, list[Piece]]], made: Manifest) -> float:
    """The CPU seconds that a recorded step takes, in which the drawing of values does not count."""
    seconds = 0.0
    writer.batch(step, "0" * 64, [0])
    writer.loss(step, 1.0)
    for unit, pieces in own:
        found: list[dict[str, Any]] = [{} for _ in range(4)]
        sampled: dict[str, Any] = {}
        for name, first, stop, numel in pieces:
            tensors = [torch.randn(stop - first) for _ in range(4)]
            start = time.process_time()
            kept: list[Any] = sketches_of(tensors, first) if numel > WHOLE else [each.numpy() for each in tensors]
            for each, value in zip(found, kept, strict=True):
                each[name] = (first, stop, value)
            if step == 0:
                is_sketch = isinstance(kept[0], Sketch)
                own_value = replace(kept[0], sample=sample_of(tensors[0], first)) if is_sketch else kept[0]
                sampled[name] = (first, stop, own_value)
            seconds += time.process_time() - start
        start = time.process_time()
        if step == 0:
            writer.parameters(step, unit, sampled)
        writer.reduced_grads(step, unit, found[1])
        writer.state(step, unit, "exp_avg", found[2])
        writer.state(step, unit, "exp_avg_sq", found[3])
        writer.updated(step, unit, found[0])
        writer.counts(step, dict.fromkeys(found[0], float(step + 1)))
        seconds += time.process_time() - start
    start = time.process_time()
    writer.end_step(step, [1e-4])
    return seconds + time.process_time() - start


def _opened(*paths: Path) -> None:
    assert all(Recording.open(path).num_steps for path in paths)

"""What recording costs at scale: one rank of 64 of a model of eight billion parameters, and the comparison of all ranks.

Nothing is trained and no rank talks to another. One rank's shards are drawn, of the shapes that they have, and sketched and
written as at a recorded step. The recordings of all ranks are made up as in `experiments.bench.verdict_cost`.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, create_recording
from crossframe.recording.sketch import WHOLE
from experiments.bench.figure import Figure, Section
from experiments.bench.verdict_cost import (
    QUICK,
    CompareSizes,
    Piece,
    compare_recordings,
    manifest_of,
    measured,
    pieces_of,
    write_sketched,
)
from experiments.models.llama import LlamaConfig
from torch_backend.recorder._sketch import sketches_of

# As Llama 3 8B.
EIGHT_BILLION = LlamaConfig(
    num_blocks=32, width=4096, mlp_width=14336, num_heads=32, num_kv_heads=8, head_width=128, vocabulary=128256
)
FULL = CompareSizes(EIGHT_BILLION, world_size=64, num_steps=40, few_steps=10)
SMALL = QUICK
EVERY = 100
"""A recorder's default: tensors of one step in a hundred."""


def scale_sections(sizes: CompareSizes) -> list[Section]:
    """Sketch and write the steps of one rank; compare the recordings of all."""
    with tempfile.TemporaryDirectory() as folder:
        one = rank_section(Path(folder, "one"), sizes)
        paths = Path(folder, "a"), Path(folder, "b")
        for path, noise in zip(paths, (0.0, 1e-9), strict=True):
            write_sketched(path, sizes, noise=noise)
        opened = measured(_opened, paths[0])
        cost = measured(compare_recordings, *paths)
    how = (
        f"Recordings of {sizes.num_steps} recorded steps on {sizes.world_size} ranks, made up and read from the system's cache. "
        "Time and memory are those of one process. Both grow in proportion to tensors, ranks and recorded steps."
    )
    figures = (
        Figure("one recording, opened", opened.seconds, "s"),
        Figure("compared: time a recorded step", 1e3 * cost.seconds / sizes.num_steps, "ms"),
        Figure("compared: time", cost.seconds, "s"),
        Figure("compared: peak memory", cost.peak_bytes / 1e6, "MB"),
    )
    return [one, Section("A comparison at scale", how, figures)]


def rank_section(path: Path, sizes: CompareSizes) -> Section:
    """Record two steps of rank 0 into `path`."""
    made = replace(manifest_of(sizes), schedule=Schedule(dense=0, every=1), steps=2)
    torch.set_num_threads(1)
    start = time.perf_counter()
    create_recording(path, made)
    begun = time.perf_counter() - start
    num_bytes = [(path / "manifest.json").stat().st_size]
    taken = []
    own = pieces_of(made, 0)
    with RecordingWriter(path, made, 0) as writer:
        for step in range(2):
            taken.append(_step(writer, step, own, made))
            num_bytes.append(sum(file.stat().st_size for file in writer.folder.iterdir()))
    numel = sum(stop - first for _, pieces in own for _, first, stop, _ in pieces)
    a_step = num_bytes[2] - num_bytes[1]
    ranks = sizes.world_size
    how = (
        f"Llama of {sizes.model.numel / 1e9:.2f} billion parameters ({len(sizes.model.shapes)} tensors) in float32, flat "
        f"layouts over {ranks} ranks, of which rank 0 is simulated: its {numel / 1e6:.0f} million elements of parameters, "
        "gradients and both moments are drawn, and sketched and written on one thread of a CPU. Each rank writes files of its "
        "own and waits for no other. Time grows with the elements of a rank, bytes with the number of its tensors."
    )
    figures = (
        Figure("a recorded step of one rank: sketching and writing", taken[1], "s"),
        Figure("a recorded step of one rank: written", a_step / 1e6, "MB"),
        Figure("a recorded step of all ranks: written", ranks * a_step / 1e6, "MB"),
        Figure("a recorded step of all ranks: files", ranks, "files"),
        Figure(f"a run of 10,000 steps, one in {EVERY} recorded: written", ranks * a_step * 10_000 / EVERY / 1e9, "GB"),
        Figure(f"a run of 10,000 steps, one in {EVERY} recorded: files", ranks * (10_000 // EVERY + 1) + 1, "files"),
        Figure("the first rank alone: the manifest, once", begun, "s"),
        Figure("the first rank alone: the manifest", num_bytes[0] / 1e3, "kB"),
    )
    return Section("Recording at scale", how, figures)


def _step(writer: RecordingWriter, step: int, own: list[tuple[str, list[Piece]]], made: Manifest) -> float:
    """The seconds that a recorded step takes, in which the drawing of values does not count."""
    seconds = 0.0
    writer.batch(step, "0" * 64, [0])
    writer.loss(step, 1.0)
    for unit, pieces in own:
        found: list[dict[str, Any]] = [{} for _ in range(4)]
        for name, first, stop, numel in pieces:
            tensors = [torch.randn(stop - first) for _ in range(4)]
            start = time.perf_counter()
            kept = sketches_of(name, tensors, first) if numel > WHOLE else [each.numpy() for each in tensors]
            for each, value in zip(found, kept, strict=True):
                each[name] = (first, stop, value)
            seconds += time.perf_counter() - start
        start = time.perf_counter()
        if step == 0:
            writer.parameters(step, unit, found[0])
        writer.reduced_grads(step, unit, found[1])
        writer.state(step, unit, "exp_avg", found[2])
        writer.state(step, unit, "exp_avg_sq", found[3])
        writer.updated(step, unit, found[0])
        writer.counts(step, dict.fromkeys(found[0], float(step + 1)))
        seconds += time.perf_counter() - start
    start = time.perf_counter()
    writer.end_step(step, [1e-4])
    return seconds + time.perf_counter() - start


def _opened(*paths: Path) -> None:
    assert all(Recording.open(path).num_steps for path in paths)

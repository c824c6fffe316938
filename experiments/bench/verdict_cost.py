"""What a comparison costs: two recordings of a model of a billion parameters, in sketches, on many ranks.

The recordings are made up: their steps are a few that numpy drew, which the files of all others repeat (hard links), so that the
disk need not hold them all. What reads them does not know that.
"""

import hashlib
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.alignment import align_either_way
from crossframe.alignment.models import read_models
from crossframe.cli.compare import equal_as_stated
from crossframe.errors import UsageError
from crossframe.layout import Layout
from crossframe.mesh import MeshSpec
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, Sketch, create_recording, event_format
from crossframe.recording.sample import Sample, nearest, num_sampled, sample_of
from crossframe.recording.sketch import NUM_SUMS, WHOLE
from crossframe.shapes import ModelShapes
from crossframe.verdict import compare
from experiments.bench.figure import Figure, Section
from experiments.models.llama import LlamaConfig

SECONDS_EQUAL = 1.0
"""How long it may take to say that two recordings are equal."""
DTYPE = "float32"


@dataclass(frozen=True)
class CompareSizes:
    """Sizes of a run of `python -m experiments bench compare`.

    Attributes:
        few_steps: at which memory is measured as well; it must not grow from there to `num_steps`.
        drawn: how many steps are drawn; the others repeat them.
    """

    model: LlamaConfig
    world_size: int
    num_steps: int
    few_steps: int
    drawn: int = 4

    def with_steps(self, steps: int | None) -> "CompareSizes":
        """The same with so many steps, and a fourth of them where memory is measured as well; UsageError for too few."""
        if steps is None:
            return self
        if steps < 4 * (self.drawn + 2):
            raise UsageError(f"steps: expected at least {4 * (self.drawn + 2)}, got {steps}")
        return replace(self, num_steps=steps, few_steps=steps // 4)


# As Llama 3.2 1B, but that its head is not tied to the embedding.
BILLION = LlamaConfig(num_blocks=16, width=2048, mlp_width=8192, num_heads=32, head_width=64)
FULL = CompareSizes(BILLION, world_size=64, num_steps=1000, few_steps=100)
QUICK = CompareSizes(
    LlamaConfig(num_blocks=1, width=64, mlp_width=64, num_heads=2, num_kv_heads=1, head_width=32, vocabulary=64),
    2,
    8,
    6,
)


def compare_section(sizes: CompareSizes) -> Section:
    """Record, and compare in processes of their own, whose memory is that of the comparison."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, name) for name in ("a", "b", "again", "a-few", "b-few")}
        for name, path in paths.items():
            steps = sizes.few_steps if name.endswith("few") else sizes.num_steps
            write_sketched(path, replace(sizes, num_steps=steps), noise=1e-9 if name.startswith("b") else 0.0)
        num_bytes = sum(file.stat().st_size for file in paths["a"].rglob("*") if file.is_file())
        differ = measured(compare_recordings, paths["a"], paths["b"])
        few = measured(compare_recordings, paths["a-few"], paths["b-few"])
        equal = measured(_stated, paths["a"], paths["again"])
    of = sizes.model
    how = (
        f"Llama of {of.numel / 1e9:.2f} billion parameters ({len(of.shapes)} tensors) in {DTYPE}, flat layouts over "
        f"{sizes.world_size} ranks; {sizes.num_steps} steps, all recorded as sketches: reduced gradients, both moments and "
        f"parameters; {num_bytes / 1e9:.2f} GB a recording. {sizes.drawn} steps are drawn and repeated by hard links, so that "
        "they are read from the system's cache. Time and memory are those of one process, its imports included in the memory."
    )
    figures = (
        Figure(f"{sizes.num_steps} steps that differ: time", differ.seconds, "s"),
        Figure(f"{sizes.num_steps} steps that differ: time a step", 1e3 * differ.seconds / sizes.num_steps, "ms"),
        Figure(f"{sizes.num_steps} steps that differ: peak memory", differ.peak_bytes / 1e6, "MB"),
        Figure(f"{sizes.few_steps} steps that differ: peak memory", few.peak_bytes / 1e6, "MB"),
        Figure(f"{sizes.num_steps} steps that are equal: time", equal.seconds, "s", SECONDS_EQUAL),
        Figure(f"{sizes.num_steps} steps that are equal: peak memory", equal.peak_bytes / 1e6, "MB"),
    )
    return Section("Cost of a comparison", how, figures)


@dataclass(frozen=True)
class Cost:
    """Seconds, those of the processor, and the most bytes that the process ever had in memory."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def measured(work: Callable[..., Any], *paths: Path) -> Cost:
    """What some work costs in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_cost, work, paths).result()


def _cost(work: Callable[..., Any], paths: tuple[Path, ...]) -> Cost:
    start, cpu = time.perf_counter(), time.process_time()
    work(*paths)
    return Cost(time.perf_counter() - start, time.process_time() - cpu, _peak_bytes())


def _peak_bytes() -> int:
    """The most memory of this process. Not by getrusage, whose figure a child of a larger process begins with."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    raise UsageError("/proc/self/status states no VmHWM; measure on Linux")


def compare_recordings(a: Path, b: Path) -> None:
    """Compare two recordings that differ by rounding."""
    found = compare(Recording.open(a), Recording.open(b))
    assert found.verdict.agrees or found.verdict.value == "inconclusive", found.reason


def map_recordings(a: Path, b: Path) -> None:
    """Derive the map between the parameters of two recordings, which decides all."""
    (values, gradients), (other_values, other_gradients) = read_models((a, b))
    found, _ = align_either_way(values, other_values, (gradients, other_gradients))
    assert not found.undecided, found.undecided[:2]


def _stated(a: Path, b: Path) -> None:
    assert equal_as_stated(a, b, read_anyway=0) is not None


@dataclass(frozen=True)
class Form:
    """How a second program has the model.

    Attributes:
        prefix: in front of all names.
        transposed: whether it has matrices with their dims in the other order.
    """

    prefix: str = ""
    transposed: bool = False

    def name(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if self.transposed else shape


AS_IT_IS = Form()


def write_sketched(path: Path, sizes: CompareSizes, *, noise: float, form: Form = AS_IT_IS) -> None:
    """A recording in sketches of a training run that never was.

    Args:
        noise: how far what is computed lies from that of a recording without noise, in parts of it.
        form: how the program that is recorded has the model.
    """
    units = sizes.model.units
    made = manifest_of(sizes, form)
    whole, world_size = replace(made, steps=sizes.num_steps), sizes.world_size
    create_recording(path, made)
    pieces = [pieces_of(made, rank) for rank in range(world_size)]
    samples = _Samples(sizes, form, pieces)
    assert len(made.units) == len(units) + 1
    for rank in range(world_size):
        with RecordingWriter(path, made, rank) as writer:
            for step in range(made.steps or 0):
                _write_step(writer, step, pieces[rank], noise, samples)
    (path / "manifest.json").write_bytes(whole.to_bytes())
    for rank in range(world_size):
        _repeat(path / event_format.rank_folder(rank), made, whole)


def manifest_of(sizes: CompareSizes, form: Form = AS_IT_IS) -> Manifest:
    """The manifest of the drawn steps."""
    own = {form.name(name): form.shape(shape) for name, shape in sizes.model.shapes.items()}
    specs = tuple(ParamSpec(name, shape, DTYPE) for name, shape in own.items())
    shapes = ModelShapes("llama", specs, tuple(map(form.name, sizes.model.units)))
    return Manifest(
        framework="torch",
        model="llama",
        dtype=DTYPE,
        mesh=MeshSpec(shard=sizes.world_size),
        steps=1 + sizes.drawn,
        learning_rate=1e-4,
        seed=0,
        terms=4096,
        schedule=Schedule(dense=0, every=1),
        param_map=identity_map(own),
        units=shapes.layouts("flat", sizes.world_size),
        detail="sketch",
        settings={"optimizer": "AdamW"},
    )


Piece = tuple[str, int, int, int]
"""Parameter, start, stop, and the parameter's elements."""


def pieces_of(made: Manifest, rank: int) -> list[tuple[str, list[Piece]]]:
    """What a rank has of each unit."""

    def of(layout: Layout) -> list[Piece]:
        found = layout.pieces(made.mesh.coordinate(rank)[1])
        return [(piece.name, piece.param_start, piece.param_stop, made.params[piece.name].numel) for piece in found]

    return [(unit, of(layout)) for unit, layout in made.units]


class _Samples:
    """The samples of made-up parameters: of a matrix the same elements whatever its dims, of a vector ones."""

    def __init__(self, sizes: CompareSizes, form: Form, pieces: list[list[tuple[str, list[Piece]]]]) -> None:
        """`pieces` are those of each rank."""
        wanted: dict[str, int] = {}
        for name, start, stop, _ in (piece for of_rank in pieces for _, own in of_rank for piece in own):
            wanted[name] = wanted.get(name, 0) + num_sampled(stop - start)
        self.moved = frozenset(
            form.name(name) for name, shape in sizes.model.shapes.items() if form.transposed and len(shape) > 1
        )
        self._of: dict[str, tuple[int, np.ndarray, np.ndarray]] = {}  # signature, places, values
        for i, (name, shape) in enumerate(sizes.model.shapes.items()):
            if len(shape) == 1:
                continue
            rng, numel = np.random.default_rng([i]), math.prod(shape)
            places = np.unique(rng.integers(numel, size=2 * wanted[form.name(name)]))
            values = rng.normal(size=len(places)).astype(DTYPE) / np.float32(numel)
            if form.transposed:
                places = np.ravel_multi_index(np.unravel_index(places, shape)[::-1], shape[::-1])
                order = np.argsort(places)
                places, values = places[order], values[order]
            self._of[form.name(name)] = int(rng.integers(2**63)), places, values

    def of(self, name: str, start: int, stop: int) -> Sample:
        if name not in self._of:
            return sample_of(np.ones(stop - start, DTYPE), start)
        signature, places, values = self._of[name]
        first, last = np.searchsorted(places, (start, stop))
        near, _ = nearest(values[first:last], np.arange(last - first), num_sampled(stop - start))
        own = places[first:last][near] - start
        return Sample.of_piece(0 if start else signature, own, values[first:last][near], stop - start, start)


def _write_step(
    writer: RecordingWriter, step: int, pieces: list[tuple[str, list[Piece]]], noise: float, samples: _Samples
) -> None:
    rng, other = np.random.default_rng([step, writer.rank]), np.random.default_rng([step, writer.rank, 1])

    def drawn(unit_pieces: list[Piece], size: float, exact: bool = False) -> dict[str, tuple[int, int, Any]]:
        found = {}
        for name, start, stop, numel in unit_pieces:
            count = stop - start
            if numel <= WHOLE:
                values: Any = (size * rng.normal(size=count)).astype(DTYPE)
            else:
                sums = size * np.sqrt(count / NUM_SUMS) * rng.normal(size=NUM_SUMS)
                if noise and not exact:
                    sums *= 1 + noise * other.normal(size=NUM_SUMS)
                prints = int(rng.integers(2**63)) + (0 if exact or not noise else step + 1)
                values = Sketch(count, DTYPE, prints, sums, float(size**2 * count))
                if exact:
                    prints += name in samples.moved
                    values = replace(values, fingerprint=prints, sample=samples.of(name, start, stop))
            found[name] = (start, stop, values)
        return found

    writer.batch(step, hashlib.sha256(f"{step} {writer.rank}".encode()).hexdigest(), [writer.rank])
    writer.loss(step, 10.0 / (1 + step))
    writer.grad_norm(step, 1.0)
    for unit, own in pieces:
        if step == 0:
            writer.parameters(step, unit, drawn(own, 1e-2, exact=True))
        writer.reduced_grads(step, unit, drawn(own, 1e-3))
        writer.state(step, unit, "exp_avg", drawn(own, 1e-3))
        writer.state(step, unit, "exp_avg_sq", drawn(own, 1e-6))
        writer.updated(step, unit, drawn(own, 1e-2))
        writer.counts(step, {name: float(step + 1) for name, *_ in own})
    writer.end_step(step, [1e-4])


def _repeat(folder: Path, made: Manifest, whole: Manifest) -> None:
    """Lengthen what a rank wrote of `made` to the steps of `whole`."""
    path = folder / event_format.EVENTS_NAME
    *texts, _ = path.read_text().splitlines(keepends=True)
    head, by_step = texts[0].replace(made.sha256, whole.sha256), {}
    for text in texts[1:]:
        by_step.setdefault(json.loads(text)["step"], []).append(text)
    for step in range(made.steps or 0, whole.steps or 0):
        of = 1 + (step - 1) % ((made.steps or 0) - 1)
        os.link(folder / event_format.step_file(of), folder / event_format.step_file(step))
        repeated = (text for text in by_step[of] if json.loads(text)["event"] not in event_format.STRUCTURE)
        by_step[step] = [_as_step(text, step) for text in repeated]
    body = "".join(text for texts in by_step.values() for text in texts)
    digests = {
        "sha256": hashlib.sha256((head + body).encode()).hexdigest(),
        "content": hashlib.sha256(body.encode()).hexdigest(),
    }
    path.write_text(head + body + event_format.encode("end", {"steps": whole.steps} | digests))


def _as_step(text: str, step: int) -> str:
    fields = json.loads(text)
    event = fields.pop("event")
    if event == "step":
        fields |= {"as": 1, "counts": float(step + 1)}
    return event_format.encode(event, fields | {"step": step})

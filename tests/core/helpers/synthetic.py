"""Small recordings that numpy makes up: two units, plain gradient descent, six samples a step over all ranks."""

import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from crossframe.dtypes import numpy_dtype
from crossframe.layout import FlatLayout, Layout, PerParamLayout
from crossframe.mesh import MeshSpec
from crossframe.param_map import identity_map
from crossframe.params import ParamSpec
from crossframe.plan import Strategy, plan_units, step_plan
from crossframe.recording import Manifest, Recording, RecordingWriter, Schedule, create_recording
from crossframe.recording.event_format import CHANGED, INITIAL
from crossframe.trace import collectives

SAMPLES = 6
LEARNING_RATE = 0.1
UNITS = {"": {"embed": (4, 3), "bias": (3,)}, "block": {"block.w": (5, 3), "block.k_bias": (3,)}}
SHAPES = {name: shape for params in UNITS.values() for name, shape in params.items()}

Tamper = Callable[[str, int, int, str, np.ndarray], np.ndarray]
"""(phase, or "input" or "output", step, rank, name of a parameter or unit, array in full) -> what is recorded instead. A loss and
a norm come as arrays of one element."""

Buffers = Callable[[int, int], dict[str, np.ndarray]]
"""(step, or -1 before the first one, rank) -> buffers by name."""


def manifest(
    world_size: int = 2, *, replicate: int = 1, kind: str = "flat", dtype: str = "float64", **other: Any
) -> Manifest:
    """The manifest of a run of three steps, all recorded, the first dense; `other` replaces fields."""
    shard = world_size // replicate

    def layout(params: dict[str, tuple[int, ...]]) -> Layout:
        specs = tuple(ParamSpec(name, shape, dtype) for name, shape in params.items())
        return FlatLayout(specs, shard, keep_original=True) if kind == "flat" else PerParamLayout(specs, shard)

    made = Manifest(
        framework="torch",
        model="toy",
        dtype=dtype,
        mesh=MeshSpec(shard=shard, replicate=replicate),
        steps=3,
        learning_rate=LEARNING_RATE,
        seed=0,
        terms=16,
        schedule=Schedule(dense=1, every=1),
        param_map=identity_map(SHAPES),
        units=tuple((unit, layout(params)) for unit, params in UNITS.items()),
        versions={"numpy": np.__version__},
    )
    return replace(made, **other)


def digest(text: str) -> str:
    """A sha256 in hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def initial(name: str, dtype: str) -> np.ndarray:
    """The parameter before step 0."""
    return _draw(SHAPES[name], 1, *name.encode()).astype(numpy_dtype(dtype))


def sample_grad(step: int, sample: int, name: str) -> np.ndarray:
    """The gradient that one sample gives; exactly zero in sum for `k_bias`, but for what rounding leaves."""
    grad = _draw(SHAPES[name], 2, step, sample, *name.encode())
    return grad * 1e-17 if name == "block.k_bias" else grad


def pieces_of(layout: Layout, rank: int, arrays: dict[str, np.ndarray]) -> dict[str, tuple[int, int, np.ndarray]]:
    """A rank's pieces of full arrays."""
    return {
        piece.name: (
            piece.param_start,
            piece.param_stop,
            arrays[piece.name].reshape(-1)[piece.param_start : piece.param_stop],
        )
        for piece in layout.pieces(rank)
    }


def write_run(
    directory: Path,
    made: Manifest,
    *,
    tamper: Tamper | None = None,
    stop_before: int | None = None,
    overwrite: bool = False,
    buffers: Buffers | None = None,
) -> None:
    """Record a run; `stop_before` kills every rank inside that step."""
    create_recording(directory, made, overwrite=overwrite)
    for rank in range(made.world_size):
        try:
            with RecordingWriter(directory, made, rank) as writer:
                for step, record in _steps(made, rank, tamper or (lambda *args: args[-1])):
                    record(writer)
                    for after, use in ((-1, INITIAL), (step, CHANGED)) if buffers else ():
                        if after == step or step == 0:
                            values = {name: (each, each.shape) for name, each in buffers(after, rank).items()}
                            writer.buffers(step, values, use)
                    if step == stop_before:
                        raise InterruptedError
                    writer.end_step(step)
        except InterruptedError:
            assert stop_before is not None


def record(directory: Path, made: Manifest | None = None, **options: Any) -> Recording:
    """A finished recording, opened."""
    write_run(directory, made or manifest(), **options)
    return Recording.open(directory)


def edit_events(directory: Path, old: str, new: str, *, rank: int = 0, seal: bool = True) -> None:
    """Change the first place of a rank's lines that reads so; `seal` makes their checksum right again."""
    path = directory / f"rank{rank:05d}" / "events.jsonl"
    text = path.read_text()
    assert old in text, old
    text = text.replace(old, new, 1)
    head, mark, end = text.rpartition('{"event": "end"')
    if seal and mark:
        was = end.split('"sha256": "')[1][:64]
        end = end.replace(was, hashlib.sha256(head.encode()).hexdigest())
    path.write_text(head + mark + end)


def jitter(seed: int, size: float, *, by_rank: bool = False) -> Tamper:
    """Everything that is computed moved by about `size` of a typical element, as another order of sums does.

    Args:
        by_rank: what is a rank's own differs between ranks.
    """

    def change(phase: str, step: int, rank: int, name: str, array: np.ndarray) -> np.ndarray:
        if phase in ("parameters", "unsharded"):
            return array
        own = [rank] if by_rank and phase in ("input", "output", "backward") else []
        noise = np.random.default_rng([seed, *own, step, *phase.encode(), *name.encode()]).normal(size=array.shape)
        # An update by what the gradient's noise makes of it, times the learning rate.
        return (array + size * (LEARNING_RATE if phase == "update" else 1.0) * noise).astype(array.dtype)

    return change


def both(*tampers: Tamper) -> Tamper:
    """One change after the other."""

    def change(phase: str, step: int, rank: int, name: str, array: np.ndarray) -> np.ndarray:
        for tamper in tampers:
            array = tamper(phase, step, rank, name, array)
        return array

    return change


@functools.cache
def _draw(shape: tuple[int, ...], *seed: int) -> np.ndarray:
    values = np.asarray(np.random.default_rng(seed).standard_normal(shape))
    values.flags.writeable = False
    return values


def _steps(made: Manifest, rank: int, tamper: Tamper) -> Iterable[tuple[int, Callable[[RecordingWriter], None]]]:
    world, dtype = made.world_size, numpy_dtype(made.dtype)
    weights = {name: initial(name, made.dtype) for name in SHAPES}
    moments = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
    for step in range(made.steps or 1):
        samples = [list(range(step * SAMPLES + r, (step + 1) * SAMPLES, world)) for r in range(world)]
        local = [{n: _mean([sample_grad(step, s, n) for s in mine], dtype) for n in SHAPES} for mine in samples]
        reduced = {n: _mean([grads[n] for grads in local], dtype) for n in SHAPES}
        updated = {n: (weights[n] - LEARNING_RATE * reduced[n].astype(np.float64)).astype(dtype) for n in SHAPES}
        loss = float(np.mean([1 + _draw((), 3, step, sample) ** 2 for sample in samples[rank]]))
        before, weights = weights, updated
        moments = {n: (0.9 * moments[n] + 0.1 * reduced[n]).astype(dtype) for n in SHAPES}

        def record(writer: RecordingWriter, step=step, before=before, local=local, reduced=reduced, updated=updated,
                   moments=moments, loss=loss, mine=samples[rank]) -> None:  # fmt: skip
            def changed(phase: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
                return {name: tamper(phase, step, rank, name, array.copy()) for name, array in arrays.items()}

            writer.batch(step, digest(str(mine)), mine)
            writer.loss(step, float(tamper("forward", step, rank, "", np.array([loss]))[0]))
            if step == 0:
                events = step_plan(plan_units(made.units, Strategy(made.strategy)), made.mesh, rank)
                writer.collectives(step, collectives(events))
            if made.schedule.is_dense(step):
                for unit, use in (("block", "input"), ("block", "output"), ("", "output")):
                    rows = [_draw((4,), 4, step, sample, *use.encode(), *unit.encode()) for sample in mine]
                    value = np.stack(rows).astype(dtype)
                    writer.activation(step, 0, unit, use, tamper(use, step, rank, unit, value))
            norm = np.sqrt(sum(np.square(grad.astype(np.float64)).sum() for grad in reduced.values()))
            writer.grad_norm(step, float(tamper("norm", step, rank, "", np.array([norm]))[0]))
            for unit, layout in made.units:
                names, at = [param.name for param in layout.params], rank % made.mesh.shard
                if step == 0:
                    own = {name: before[name] for name in names}
                    writer.parameters(step, unit, pieces_of(layout, at, changed("parameters", own)))
                if made.schedule.is_dense(step):
                    whole = _put_together(layout, made, rank, step, {name: before[name] for name in names}, tamper)
                    writer.unsharded(step, unit, changed("unsharded", whole))
                    writer.local_grads(step, unit, changed("backward", {name: local[rank][name] for name in names}))
                if writer.records(step):
                    own = {name: reduced[name] for name in names}
                    writer.reduced_grads(step, unit, pieces_of(layout, at, changed("reduce", own)))
                    own = {name: moments[name] for name in names}
                    writer.state(step, unit, "exp_avg", pieces_of(layout, at, changed("state", own)))
                    writer.counts(step, dict.fromkeys(names, float(step + 1)))
                    own = {name: updated[name] for name in names}
                    writer.updated(step, unit, pieces_of(layout, at, changed("update", own)))

        yield step, record


def _put_together(
    layout: Layout, made: Manifest, rank: int, step: int, arrays: dict[str, np.ndarray], tamper: Tamper
) -> dict[str, np.ndarray]:
    """What a rank gathers: of each piece what its owner says that it holds."""
    phase, last, found = ("update", step - 1, {}) if step else ("parameters", 0, {})
    for name, array in arrays.items():
        found[name] = array.copy()
        for owner in made.mesh.shard_group(rank):
            held = tamper(phase, last, owner, name, array.copy())
            start, stop, piece = pieces_of(layout, owner % made.mesh.shard, arrays | {name: held}).get(name, (0, 0, []))
            found[name].reshape(-1)[start:stop] = piece
    return found


def _mean(arrays: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    return np.mean(np.asarray(arrays, np.float64), axis=0).astype(dtype)


def only(phase, name, change, *, step=0, rank=None):
    """A change for `record`: of one quantity, in one step, on one rank or on all."""

    def tamper(at, when, who, what, array):
        return change(array) if (at, when, what) == (phase, step, name) and rank in (None, who) else array

    return tamper


OTHER_LOSS = only("forward", "", lambda loss: 1.5 * loss)
"""A consequence at step 0, without which an activation of another implementation is not the same value."""

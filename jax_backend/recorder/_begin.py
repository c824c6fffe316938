"""How a recording begins: what is known of the run before its first step, and the directory."""

import importlib.metadata
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from crossframe.errors import RecordingError
from crossframe.recording import WHOLE, Manifest, Schedule, create_recording
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.lines import perturbed_run_folder
from crossframe.recording.program import PROGRAM, program_of
from crossframe.recording.sketch import FULL_NUMEL
from crossframe.strategy import Strategy
from jax_backend.ranks._processes import everyones, together
from jax_backend.recorder._arrays import OfArrays, Pieces
from jax_backend.recorder._shards import OfShards
from jax_backend.recorder._sketch import sketch_of

_TITLE = "beginning of a recording"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "equinox", "numpy")


@dataclass(frozen=True)
class About:
    """What a Recorder was told of its run; the arguments of `Recorder`, which says what they mean."""

    schedule: Schedule
    detail: str
    steps: int | None
    name: str
    dtype: str | None
    strategy: str | None
    learning_rate: float | None
    seed: int | None
    terms: int | None
    settings: Mapping[str, Any]
    twin: int


def place_of(directory: str | Path, twin: int) -> Path:
    """Where a run, or one of its perturbed runs, is recorded."""
    return Path(directory, perturbed_run_folder(twin)) if twin else Path(directory)


def check_directory(path: Path, overwrite: bool) -> None:
    """Raise RecordingError if something is there that must not be replaced, before the first step runs: in the first process, and
    AgreementError in the others. All processes call it."""

    def check() -> None:
        if jax.process_index() == 0 and not overwrite and path.is_dir() and any(path.iterdir()):
            raise RecordingError(
                f"{path}: not empty; choose another directory, or overwrite a recording (overwrite=True)"
            )

    together(_TITLE, check)


def is_sketched(source: OfArrays | OfShards, detail: str) -> bool:
    """Whether large tensors are kept as sketches."""
    numel = sum(spec.numel for _, layout in source.units for spec in layout.params)
    return numel > FULL_NUMEL if detail == "auto" else detail == "sketch"


def kept(source: OfArrays | OfShards, params: Any, detail: str) -> dict[int, Pieces]:
    """What each rank of this process holds of the first parameters, kept until the recording begins, which is when the first step
    has told what is recorded. The step may destroy them (donation)."""
    pieces = source.pieces(params)
    if is_sketched(source, detail):
        sizes = {spec.name: spec.numel for _, layout in source.units for spec in layout.params}
        for by_unit in pieces.values():
            for by_name in by_unit.values():
                for name, (start, stop, values) in by_name.items():
                    if sizes[name] > WHOLE:
                        by_name[name] = (start, stop, sketch_of(name, values, start))
    return pieces


def manifest_of(source: OfArrays | OfShards, about: About, says: Mapping[str, Any]) -> Manifest:
    """The manifest of a run.

    Args:
        says: settings that the first step has told.
    """
    spec, stored = source.grid.spec, Counter[str]()
    for _, layout in source.units:
        stored.update({param.dtype: param.numel for param in layout.params})
    computed = source.tree.policy.param_dtype if isinstance(source, OfShards) else None
    strategy = Strategy.FULL_SHARD if spec.replicate == 1 else Strategy.HYBRID_SHARD
    if spec.shard == 1 < spec.replicate:
        strategy = Strategy.NO_SHARD
    found = dict(says) | {COMMAND: shlex.join(["python", *sys.argv]), PROGRAM: program()}
    found |= {"twin": about.twin} if about.twin else {}
    return Manifest(
        framework="jax",
        model=about.name,
        dtype=about.dtype or computed or stored.most_common(1)[0][0],
        mesh=spec,
        steps=about.steps,
        learning_rate=about.learning_rate,
        seed=about.seed,
        terms=about.terms,
        schedule=about.schedule,
        param_map=source.param_map,
        units=source.units,
        strategy=about.strategy or strategy.value,
        versions={name: importlib.metadata.version(name) for name in _PACKAGES if name in sys.modules},
        settings=found | dict(about.settings),
        detail="sketch" if is_sketched(source, about.detail) else "full",
    )


def program(device: Any = None) -> dict[str, Any]:
    """What JAX's bits depend on (`crossframe.recording.program`). Of a step that is not compiled nothing is known to say so.

    Args:
        device: one of those that compute; None: the first of the default platform.
    """
    device = device or jax.devices()[0]
    flags = os.environ.get("XLA_FLAGS", "")
    on_cpu = device.platform == "cpu"
    return program_of(
        device=device.platform if on_cpu else f"{device.platform} {device.device_kind}",
        deterministic=on_cpu or "xla_gpu_deterministic_ops=true" in flags,
        compiled=True,
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        matmul=str(getattr(jax.config, "jax_default_matmul_precision", None)),
        flags=flags,
        processes=jax.process_count(),
    )


def begun(path: Path, manifest: Manifest, *, overwrite: bool) -> Manifest:
    """Let the first process create the recording; all go on once it has.

    Raises:
        RecordingError: a directory that cannot be recorded to; AgreementError in the other processes.
    """

    def create() -> None:
        if jax.process_index() == 0:
            create_recording(path, manifest, overwrite=overwrite)

    together(_TITLE, create)
    if not jax.process_index():
        everyones(manifest.token)
        return manifest
    token = everyones("")[0]
    # The command line may differ between processes: what the first one wrote is the run's.
    return replace(manifest, settings=Manifest.read(path).settings, token=token)

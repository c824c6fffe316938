"""The beginning of a recording: the directory, and a manifest of the settings known before the first step."""

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
from crossframe.recording.event_format import perturbed_run_folder
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.program import PROCESSES, PROGRAM, program_of
from crossframe.recording.sample import sample_of
from crossframe.recording.sketch import FULL_NUMEL
from crossframe.strategy import Strategy
from jax_backend.ranks._processes import gather_values, together
from jax_backend.recorder._params_as_arrays import ArrayPieces, Pieces
from jax_backend.recorder._params_as_shards import ShardPieces
from jax_backend.recorder._sketch import sketch_of

_TITLE = "beginning of a recording"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "equinox", "numpy")


@dataclass(frozen=True)
class About:
    """The arguments of `Recorder` about the run; `Recorder` documents them."""

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
    perturbed_run: int


def place_of(directory: str | Path, perturbed_run: int) -> Path:
    """The directory of a run or of one of its perturbed runs."""
    return Path(directory, perturbed_run_folder(perturbed_run)) if perturbed_run else Path(directory)


def check_directory(path: Path, overwrite: bool) -> None:
    """Raise RecordingError if the directory must not be replaced, in the first process, and AgreementError in the others. All
    processes call it before the first step."""

    def check() -> None:
        if jax.process_index() == 0 and not overwrite and path.is_dir() and any(path.iterdir()):
            raise RecordingError(
                f"{path}: not empty; choose another directory, or overwrite a recording (overwrite=True)"
            )

    together(_TITLE, check)


def is_sketched(source: ArrayPieces | ShardPieces, detail: str) -> bool:
    """Whether large tensors are recorded as sketches."""
    numel = sum(spec.numel for _, layout in source.units for spec in layout.params)
    return numel > FULL_NUMEL if detail == "auto" else detail == "sketch"


def kept(source: ArrayPieces | ShardPieces, params: Any, detail: str) -> dict[int, Pieces]:
    """The initial parameters of each rank of this process, copied, since the first step may donate them. The recording begins
    after that step, when it is known what is recorded."""
    pieces = source.pieces(params)
    if is_sketched(source, detail):
        sizes = {spec.name: spec.numel for _, layout in source.units for spec in layout.params}
        for by_unit in pieces.values():
            for by_name in by_unit.values():
                for name, (start, stop, values) in by_name.items():
                    if sizes[name] > WHOLE:
                        made = replace(sketch_of(values, start), sample=sample_of(values, start))
                        by_name[name] = (start, stop, made)
    return pieces


def manifest_of(source: ArrayPieces | ShardPieces, about: About, says: Mapping[str, Any]) -> Manifest:
    """The manifest of a run.

    Args:
        says: settings that are known after the first step.
    """
    spec, stored = source.grid.spec, Counter[str]()
    for _, layout in source.units:
        stored.update({param.dtype: param.numel for param in layout.params})
    computed = source.tree.policy.param_dtype if isinstance(source, ShardPieces) else None
    strategy = Strategy.FULL_SHARD if spec.replicate == 1 else Strategy.HYBRID_SHARD
    if spec.shard == 1 < spec.replicate:
        strategy = Strategy.NO_SHARD
    found = dict(says) | {COMMAND: shlex.join(["python", *sys.argv]), PROGRAM: program()}
    found |= {"perturbed_run": about.perturbed_run} if about.perturbed_run else {}
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


def program(device: Any = None, *, compiled: bool = True) -> dict[str, Any]:
    """What JAX's bits depend on (`crossframe.recording.program`).

    Args:
        compiled: whether steps are jitted; True if that is not known.
        device: a device of the run; None: the first of the default platform.
    """
    device = device or jax.devices()[0]
    flags = os.environ.get("XLA_FLAGS", "")
    on_cpu = device.platform == "cpu"
    return program_of(
        device=device.platform if on_cpu else f"{device.platform} {device.device_kind}",
        deterministic=on_cpu or "xla_gpu_deterministic_ops=true" in flags,
        compiled=compiled,
        threads=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        matmul=str(getattr(jax.config, "jax_default_matmul_precision", None)),
        flags=flags,
        **{PROCESSES: jax.process_count()},
    )


def begun(path: Path, manifest: Manifest, *, overwrite: bool) -> Manifest:
    """Create the recording in the first process; all processes wait for it.

    Raises:
        RecordingError: a directory that cannot be recorded to; AgreementError in the other processes.
    """

    def create() -> None:
        if jax.process_index() == 0:
            create_recording(path, manifest, overwrite=overwrite)

    together(_TITLE, create)
    if not jax.process_index():
        gather_values(manifest.token)
        return manifest
    token = gather_values("")[0]
    # The command line may differ between processes; that of the first counts.
    return replace(manifest, settings=Manifest.read(path).settings, token=token)

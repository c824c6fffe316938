"""The beginning of a recording: the directory, and a manifest of the settings known before the first step."""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from crossframe.errors import RecordingError
from crossframe.recording import WHOLE, Manifest, create_recording
from crossframe.recording.program import MODE, PROCESSES, program_of
from crossframe.recording.run_options import RunOptions
from crossframe.recording.sample import sample_of
from crossframe.strategy import Strategy
from jax_backend.ranks._processes import gather_values, together
from jax_backend.recorder._params_as_arrays import ArrayPieces, Pieces
from jax_backend.recorder._params_as_shards import ShardPieces
from jax_backend.recorder._sketch import sketch_of

_TITLE = "beginning of a recording"
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "equinox", "numpy")


@dataclass(frozen=True)
class About:
    """The arguments of `Recorder` for fields of the manifest; `Recorder` documents them."""

    name: str
    dtype: str | None
    strategy: str | None
    learning_rate: float | None
    terms: int | None


def check_directory(path: Path, overwrite: bool) -> None:
    """Raise RecordingError if the directory must not be replaced, in the first process, and AgreementError in the others. All
    processes call it before the first step."""

    def check() -> None:
        if jax.process_index() == 0 and not overwrite and path.is_dir() and any(path.iterdir()):
            raise RecordingError(
                f"{path}: not empty; choose another directory, or overwrite a recording (overwrite=True)"
            )

    together(_TITLE, check)


def kept(source: ArrayPieces | ShardPieces, params: Any, options: RunOptions) -> dict[int, Pieces]:
    """The initial parameters of each rank of this process, copied, since the first step may donate them. The recording begins
    after that step, when it is known what is recorded."""
    pieces = source.pieces(params)
    if options.sketches(source.units):
        sizes = {spec.name: spec.numel for _, layout in source.units for spec in layout.params}
        for by_unit in pieces.values():
            for by_name in by_unit.values():
                for name, (start, stop, values) in by_name.items():
                    if sizes[name] > WHOLE:
                        made = replace(sketch_of(values, start), sample=sample_of(values, start))
                        by_name[name] = (start, stop, made)
    return pieces


def manifest_of(
    source: ArrayPieces | ShardPieces, about: About, options: RunOptions, says: Mapping[str, Any], mode: str | None
) -> Manifest:
    """The manifest of a run.

    Args:
        says: settings that are known after the first step.
        mode: as of `program`.
    """
    spec, stored = source.grid.spec, Counter[str]()
    for _, layout in source.units:
        stored.update({param.dtype: param.numel for param in layout.params})
    computed = source.tree.policy.param_dtype if isinstance(source, ShardPieces) else None
    strategy = Strategy.FULL_SHARD if spec.replicate == 1 else Strategy.HYBRID_SHARD
    if spec.shard == 1 < spec.replicate:
        strategy = Strategy.NO_SHARD
    return options.manifest(
        framework="jax",
        model=about.name,
        dtype=about.dtype or computed or stored.most_common(1)[0][0],
        mesh=spec,
        learning_rate=about.learning_rate,
        terms=about.terms,
        param_map=source.param_map,
        units=source.units,
        strategy=about.strategy or strategy.value,
        packages=_PACKAGES,
        program=program(mode=mode),
        stated=says,
    )


def program(device: Any = None, *, compiled: bool = True, mode: str | None = None) -> dict[str, Any]:
    """The facts on which JAX's bits depend (`crossframe.recording.program`).

    Args:
        compiled: whether steps are jitted; True if that is not known.
        device: a device of the run; None: the first of the default platform.
        mode: of a step of `jax_backend.value_and_grad`; None: the step is another one.
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
        **({} if mode is None else {MODE: mode}),
    )


def begun(options: RunOptions, manifest: Manifest) -> Manifest:
    """Create the recording in the first process; all processes wait for it.

    Raises:
        RecordingError: a directory that cannot be recorded to; AgreementError in the other processes.
    """

    def create() -> None:
        if jax.process_index() == 0:
            create_recording(options.path, manifest, overwrite=options.overwrite)

    together(_TITLE, create)
    if not jax.process_index():
        gather_values(manifest.token)
        return manifest
    token = gather_values("")[0]
    # The command line may differ between processes; that of the first counts.
    return replace(manifest, settings=Manifest.read(options.path).settings, token=token)

"""The environment of a rank, as its recording states it."""

from pathlib import Path

from crossframe.environment.facts import FRAMEWORK, MACHINE, PACKAGES, RUN, Environment, Fact, read_environment
from crossframe.recording.manifest import Manifest
from crossframe.recording.program import ENVIRONMENT, PROGRAM, SOURCE

_OF_MACHINE = ("processor", "python")


def recorded_environment(directory: Path, manifest: Manifest, rank: int = 0) -> Environment:
    """The environment that a rank stated, with the facts of the manifest about the run.

    Recordings without it have the versions and the program of the manifest, which are of the first rank.

    Raises:
        RecordingError: a damaged file.
    """
    stated = read_environment(directory, rank)
    if stated is None:
        stated = Environment({PACKAGES: _versions(manifest)} | _described(manifest), is_complete=False)
    run: dict[str, Fact] = {
        "framework": manifest.framework,
        "mesh": f"replicate {manifest.mesh.replicate}, shard {manifest.mesh.shard}",
        "strategy": manifest.strategy,
        "layout": ", ".join(sorted({layout.kind for _, layout in manifest.units})),
    }
    return Environment({**stated.sections, RUN: run}, stated.is_complete)


def recorded_environments(directory: Path, manifest: Manifest) -> dict[int, Environment]:
    """The environments of all ranks that stated one, by rank.

    Raises:
        RecordingError: a damaged file.
    """
    stated = {rank: read_environment(directory, rank) for rank in range(manifest.world_size)}
    return {rank: environment for rank, environment in stated.items() if environment is not None}


def _versions(manifest: Manifest) -> dict[str, Fact]:
    return {name: str(version) for name, version in manifest.versions.items()}


def _described(manifest: Manifest) -> dict[str, dict[str, Fact]]:
    program = dict(manifest.settings.get(PROGRAM) or {})
    framework = {name: x for name, x in program.items() if name not in (*_OF_MACHINE, SOURCE, ENVIRONMENT)}
    return {FRAMEWORK: framework, MACHINE: {name: program[name] for name in _OF_MACHINE if name in program}}

"""Compares what two recordings state of their runs, their initial parameters and their first batches."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from crossframe.check.result import Check
from crossframe.dtypes import coarser, numpy_dtype
from crossframe.environment import Difference, Environment, differences, odd_ranks, recorded_environments
from crossframe.environment.differences import device_of, made, ranked
from crossframe.environment.facts import MODULES, OPTIMIZER, PARAMETERS, RUN, SECTIONS, VALUES
from crossframe.environment.recorded import recorded_environment
from crossframe.param_map import ParamMap
from crossframe.recording import Recording, common_steps
from crossframe.recording.event_format import PARAMETERS as INITIAL
from crossframe.recording.manifest import Manifest
from crossframe.verdict.diagnosis.stated_optimizer import rule_of
from crossframe.verdict.initial_values import unrelated_parameters
from crossframe.verdict.measure.comparable import differing_batches, differing_settings, labels
from crossframe.verdict.measure.pair import Pair
from crossframe.verdict.one_naming import in_one_naming

# Settings of `differing_settings` that belong to the run instead of to its optimizer.
_OF_RUN = frozenset({"model", "steps", "dtype", "seed", "accumulate", "clip"})


def check_recordings(a: Recording, b: Recording, *, param_map: ParamMap | None = None) -> Check:
    """The differences of two recorded runs: settings, environments, parameters, initial values and batches.

    Args:
        param_map: as of `crossframe.verdict.compare`.

    Raises:
        MappingError: the map does not fit the recordings.
        RecordingError: a damaged recording.
    """
    naming = in_one_naming(a, b, param_map)
    a, b = naming.a, naming.b
    names = labels(a, b)
    environments = [recorded_environment(each.directory, each.manifest) for each in (a, b)]
    first, second = (
        Environment({**environment.sections, PARAMETERS: _parameters(recording.manifest)}, environment.is_complete)
        for environment, recording in zip(environments, (a, b), strict=True)
    )
    device = device_of(first, second)
    sections = SECTIONS
    if a.manifest.framework != b.manifest.framework:
        sections = tuple(section for section in SECTIONS if section != MODULES)
    found = [*differences(first, second, sections), *_settings(a, b, names, device), *_values(a, b, device)]
    notes = [text for text in (naming.note, naming.problem) if text]
    notes += [
        f"{label} does not state its environment; record it again with this version"
        for label, environment in zip(names, environments, strict=True)
        if not environment.is_complete
    ]
    if a.manifest.world_size != b.manifest.world_size:
        notes.append("the world sizes differ, so batches were not compared")
    odd = [
        (label, each)
        for label, run in zip(names, (a, b), strict=True)
        for each in odd_ranks(recorded_environments(run.directory, run.manifest))
    ]
    return Check(names, ranked(found), tuple(odd), tuple(notes))


def check_ranks_of(directory: Path) -> Check:
    """The ranks of one recorded run whose environment differs from that of the others. The run may still be going on.

    Raises:
        RecordingError: no recording, or a damaged one.
    """
    manifest = Manifest.read(directory)
    stated = recorded_environments(directory, manifest)
    name = directory.resolve().name
    missing = manifest.world_size - len(stated)
    notes = [f"{missing} of {manifest.world_size} ranks state no environment"] if missing else []
    return Check((name, name), (), tuple((name, each) for each in odd_ranks(stated)), tuple(notes))


def _parameters(manifest: Manifest) -> dict[str, str]:
    return {
        name: f"{spec.dtype}{list(spec.shape)}" + ("" if spec.requires_grad else ", frozen")
        for name, spec in manifest.params.items()
    }


def _settings(a: Recording, b: Recording, names: tuple[str, str], device: str) -> Iterator[Difference]:
    one_rule = rule_of(a) is not None and rule_of(a) == rule_of(b)
    for setting in differing_settings(a, b):
        if not (setting.name == "optimizer" and one_rule):  # class names may differ
            section = RUN if setting.name in _OF_RUN else OPTIMIZER
            x, y = (value if isinstance(value, str | int | float) else str(value) for value in (setting.a, setting.b))
            yield made(section, setting.name, x, y, device, setting.describe(names))


def _values(a: Recording, b: Recording, device: str) -> Iterator[Difference]:
    """Differences of initial values and of batches."""
    if not common_steps(a, b):
        return
    pair = Pair(a, b)
    shared = [name for name in pair.names() if pair.has(INITIAL, 0, name)]
    if apart := [name for name in shared if _differs(pair, name)]:
        how = "drawn independently" if unrelated_parameters(pair) else "related: rounded or moved"
        some = f"{len(apart)} of {len(shared)} parameters"
        text = f"the initial values of {some} differ, first those of {apart[0]!r}; they are {how}"
        yield made(VALUES, "initial values", "", "", device, text)
    if (batches := differing_batches(a, b)) is not None:
        yield made(VALUES, "batches", "", "", device, batches.text)
    elif a.manifest.world_size == b.manifest.world_size:
        for step in common_steps(a, b):
            if pair.reordered(step):
                text = f"from step {step} on, ranks have the same samples in another order or in other microbatches"
                yield made(VALUES, "order of samples", "", "", device, text)
                return


def _differs(pair: Pair, name: str) -> bool:
    """Whether the initial values of a parameter differ, after a cast to the coarser of two dtypes."""
    specs = [recording.manifest.params[name] for recording in (pair.a, pair.b)]
    if specs[0].shape != specs[1].shape:
        return False  # reported as another parameter
    x, y, sketches = pair.assemble(INITIAL, 0, name, (0, 0))
    if sketches is not None:
        return specs[0].dtype == specs[1].dtype and not sketches[0].equals(sketches[1])
    dtype = numpy_dtype(coarser(specs[0].dtype, specs[1].dtype))
    return not np.array_equal(x.astype(dtype), y.astype(dtype), equal_nan=True)

"""From pairs of recordings to what a report says."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crossframe.recording import Recording
from crossframe.recording.manifest import Manifest
from crossframe.verdict import Bounds, PairVerdict, bounds_for, compare, overall
from experiments.report.traces import trace_of, trace_table


@dataclass(frozen=True)
class PairSeries:
    """What is drawn of one pair, and how it was run.

    Attributes:
        a, b: what the recordings are called.
        losses_a, losses_b: mean loss over ranks at every step.
        loss_differences: relative, largest over ranks, at every step that was compared.
        parameter_differences: (step, relative and largest over parameters) at every recorded step that was compared.
        bounds: what was known beforehand of how far rounding goes; None where twins measured it.
        run: (what, in a, in b) for the table of how it was run.
        command: the command line that led here, or None.
    """

    a: str
    b: str
    dtype: str
    world_size: str
    losses_a: tuple[float, ...]
    losses_b: tuple[float, ...]
    loss_differences: tuple[float, ...]
    parameter_differences: tuple[tuple[int, float], ...]
    bounds: Bounds | None
    run: tuple[tuple[str, str, str], ...]
    command: str | None


def report_of(
    pairs: Sequence[tuple[Recording, Recording]], *, command: str | None = None
) -> tuple[dict, tuple[PairSeries, ...]]:
    """Compare pairs of recordings.

    Args:
        command: the command line that made them, for the page.

    Returns:
        The report, `{"verdict", "pairs": [...], "trace": {"plan", A, B, "equal"} or None}`, where A and B are what the two
        recordings are called (frameworks, where they differ); and what a page draws beside it.
        The trace is that of rank 0 at step 0, of the first pair whose collectives are not the planned ones, else of the first
        that recorded any; "equal" holds for all pairs.

    Raises:
        RecordingError: tensors that are damaged, or that should be there and are not.
    """
    verdicts = [compare(a, b) for a, b in pairs]
    traces = [trace_of(verdict.a, a, verdict.b, b) for verdict, (a, b) in zip(verdicts, pairs, strict=True)]
    report = {
        "verdict": overall(verdict.verdict for verdict in verdicts).value,
        "pairs": [verdict.to_json() for verdict in verdicts],
        "trace": trace_table([trace for trace in traces if trace is not None]),
    }
    series = tuple(_series(verdict, a, b, command) for verdict, (a, b) in zip(verdicts, pairs, strict=True))
    return report, series


def _series(verdict: PairVerdict, a: Recording, b: Recording, command: str | None) -> PairSeries:
    return PairSeries(
        a=verdict.a,
        b=verdict.b,
        dtype=verdict.dtype,
        world_size=world_text(verdict.to_json()["world_size"]),
        losses_a=_mean_losses(a),
        losses_b=_mean_losses(b),
        loss_differences=verdict.loss_differences,
        parameter_differences=verdict.parameter_differences,
        bounds=bounds_for(verdict.dtype) if verdict.envelope_used is None else None,
        run=_run_rows(a.manifest, b.manifest),
        command=command,
    )


def world_text(world_size: int | Sequence[int]) -> str:
    """A world size as `PairVerdict.to_json` gives it, in words.

    >>> world_text(1), world_text([2, 3])
    ('1 rank', '2 and 3 ranks')
    """
    if isinstance(world_size, int):
        return f"{world_size} rank{'s' if world_size != 1 else ''}"
    return " and ".join(str(size) for size in world_size) + " ranks"


def _mean_losses(recording: Recording) -> tuple[float, ...]:
    return tuple(float(loss) for loss in np.mean(recording.losses(), axis=1))


def _run_rows(a: Manifest, b: Manifest) -> tuple[tuple[str, str, str], ...]:
    def facts(manifest: Manifest) -> dict[str, str]:
        mesh, layouts = manifest.mesh, [layout.kind for _, layout in manifest.units]
        numel = sum(param.numel for param in manifest.params.values())
        return (
            {
                "framework": manifest.framework,
                "model": f"{manifest.model}, {numel:,} parameters in {len(manifest.units)} units",
                "dtype": manifest.dtype,
                "mesh": f"replicate {mesh.replicate}, shard {mesh.shard}",
                "layout": ", ".join(sorted(set(layouts))).replace("_", " "),
                "strategy": manifest.strategy,
                "steps": str(manifest.steps),
                "learning rate": f"{manifest.learning_rate:g}",
                "seed": str(manifest.seed),
            }
            | {name.replace("_", " "): str(value) for name, value in manifest.settings.items()}
            | {f"version of {name}": str(version) for name, version in manifest.versions.items()}
        )

    ours, theirs = facts(a), facts(b)
    names = [*ours, *(name for name in theirs if name not in ours)]
    return tuple((name, ours.get(name, "-"), theirs.get(name, "-")) for name in names)

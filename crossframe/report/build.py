"""Builds the content of a report from pairs of recordings."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from crossframe.layout import Sharding
from crossframe.param_map import ParamMap
from crossframe.recording import Recording
from crossframe.recording.event_format import INPUT, OUTPUT, perturbed_run_folder
from crossframe.recording.manifest import SKETCH, Manifest
from crossframe.recording.program import PROGRAM
from crossframe.report.traces import trace_of, trace_table
from crossframe.verdict import Bounds, PairVerdict, bounds_for, compare, overall
from crossframe.verdict.activation_dims import in_one_order
from crossframe.verdict.one_naming import in_one_naming


@dataclass(frozen=True)
class PairSeries:
    """The curves of one pair, and how it was run.

    Attributes:
        verdict: of the comparison.
        losses_a, losses_b: mean loss over ranks at every step.
        bounds: what was known beforehand of how far rounding goes; None where perturbed runs measured it.
        perturbed_runs: (what a recording is called, how many perturbed runs it has), of those that have any.
        sharding: of the second recording: its layout says whose elements are off.
        shape: of the activation where both part first; None where they do not, or elsewhere.
        sketched: whether a recording keeps its large tensors as sketches.
        run: (what, in a, in b) for the table of how it was run.
        command: the command line that led here, or None.
    """

    verdict: PairVerdict
    losses_a: tuple[float, ...]
    losses_b: tuple[float, ...]
    bounds: Bounds | None
    perturbed_runs: tuple[tuple[str, int], ...]
    sharding: Sharding
    shape: tuple[int, ...] | None
    sketched: bool
    run: tuple[tuple[str, str, str], ...]
    command: str | None

    @property
    def parted(self) -> str:
        """Name of the first quantity that differs (`crossframe.verdict.result.Judged`); "" if there is none."""
        return self.verdict.parted.name if self.verdict.parted else ""


def report_of(
    pairs: Sequence[tuple[Recording, Recording]],
    *,
    command: str | None = None,
    repeats: Sequence[Recording] = (),
    param_map: ParamMap | None = None,
    bitwise: bool | None = None,
) -> tuple[dict, tuple[PairSeries, ...]]:
    """Compare pairs of recordings.

    Args:
        command: the command line that made them, for the page.
        repeats, param_map, bitwise: as of `crossframe.verdict.compare`.

    Returns:
        The report, `{"verdict", "pairs": [...], "trace": {"plan", A, B, "equal"} or None}`, where A and B are what the two
        recordings are called (frameworks, where they differ); and what a page draws beside it.
        The trace is that of rank 0 at step 0, of the first pair whose collectives are not the planned ones, else of the first
        that recorded any; "equal" holds for all pairs.

    Raises:
        MappingError: the map does not fit the recordings.
        RecordingError: tensors that are damaged, or that should be there and are not.
    """
    verdicts = [compare(a, b, repeats=repeats, param_map=param_map, bitwise=bitwise) for a, b in pairs]
    traces = [trace_of(verdict.a, a, verdict.b, b) for verdict, (a, b) in zip(verdicts, pairs, strict=True)]
    report = {
        "verdict": overall(verdict.verdict for verdict in verdicts).value,
        "pairs": [verdict.to_json() for verdict in verdicts],
        "trace": trace_table([trace for trace in traces if trace is not None]),
    }
    named = [in_one_naming(a, b, param_map) for a, b in pairs]
    series = tuple(_series(verdict, each.a, each.b, command) for verdict, each in zip(verdicts, named, strict=True))
    return report, series


def _series(verdict: PairVerdict, a: Recording, b: Recording, command: str | None) -> PairSeries:
    perturbed_runs = tuple((label, _num_perturbed_runs(run)) for label, run in ((verdict.a, a), (verdict.b, b)))
    return PairSeries(
        verdict=verdict,
        losses_a=_mean_losses(a),
        losses_b=_mean_losses(b),
        bounds=bounds_for(verdict.dtype) if verdict.limit_used is None else None,
        perturbed_runs=tuple((label, num) for label, num in perturbed_runs if num),
        sharding=Sharding(b.manifest.units, b.manifest.mesh),
        shape=_shape(verdict, in_one_order(a, b)[1]),
        sketched=SKETCH in (a.manifest.detail, b.manifest.detail),
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


def _shape(verdict: PairVerdict, run: Recording) -> tuple[int, ...] | None:
    where, first = verdict.first_divergence, verdict.parted
    if where is None or first is None or where.event not in (INPUT, OUTPUT) or where.rank is None:
        return None  # without a rank, the elements are those of a sample that came to other ranks
    of = {
        f"{use} of {module or 'the model'}": (microbatch, module, use)
        for microbatch, module, use in run.activations(where.step)
    }
    return run.activation_shape(where.step, where.rank, *of[first.name])


def _num_perturbed_runs(run: Recording) -> int:
    if run.stored_spread is not None:
        return run.stored_spread.num_runs
    return next(i for i in count() if not (run.directory / perturbed_run_folder(i + 1)).is_dir())


def _mean_losses(recording: Recording) -> tuple[float, ...]:
    return tuple(float(loss) for loss in np.mean(recording.losses(), axis=1))


def _setting_text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


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
                "steps": _setting_text(manifest.steps),
                "learning rate": _setting_text(manifest.learning_rate),
                "seed": _setting_text(manifest.seed),
                "recorded": f"every {manifest.schedule.every} steps, {manifest.detail}",
            }
            | {name.replace("_", " "): str(value) for name, value in manifest.settings.items() if name != PROGRAM}
            | {name.replace("_", " "): str(value) for name, value in manifest.settings.get(PROGRAM, {}).items()}
            | {f"version of {name}": str(version) for name, version in manifest.versions.items()}
        )

    ours, theirs = facts(a), facts(b)
    names = [*ours, *(name for name in theirs if name not in ours)]
    return tuple((name, ours.get(name, "-"), theirs.get(name, "-")) for name in names)

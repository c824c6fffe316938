"""What a recorder costs: steps with and without it, in one run."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from crossframe.errors import UsageError
from crossframe.monitoring import Monitor
from experiments.bench.figure import TIMES, Figure, Section, median_figure
from experiments.bench.ranks import GLOO, on_ranks
from experiments.bench.sizes import Sizes
from experiments.bench.timing import Times, alternate, slowest
from experiments.bench.training import LEARNING_RATE, definition_of, losses, meet
from experiments.models.gpt import GPTConfig
from torch_backend.recorder import Recorder

WORLD_SIZE = 2
ENGINES = ("our FSDP1", "torch DDP")
# Kinds of steps differ by more than contestants do: fewer rounds tell them apart.
ROUNDS = 15
WITHOUT, AGAIN, BETWEEN, RECORDED = "without", "without, again", "between", "recorded"
# The same steps with a monitor that judges each of them at once. By default it judges sixteen in a row, which is less work.
JUDGED, RECORDED_JUDGED = "between, judged", "recorded, judged"
# Each kind of step by the schedule of a recorder all of whose timed steps are such; the first step of all is recorded anyway.
_NEVER = 10**9
SCHEDULES = {
    BETWEEN: {"every": _NEVER, "dense": 0},
    RECORDED: {"every": 1, "dense": 0},
    JUDGED: {"every": _NEVER, "dense": 0},
    RECORDED_JUDGED: {"every": 1, "dense": 0},
}
DEFAULT_PERIOD, LIMIT = 100, 1.05


def recorder_section(sizes: Sizes, engines: Sequence[str] = ()) -> Section:
    """Time steps of each kind in alternation.

    Args:
        engines: some of ENGINES; all of them if empty.

    Raises:
        UsageError: an engine that there is not, or a rank that failed.
    """
    if unknown := [engine for engine in engines if engine not in ENGINES]:
        raise UsageError(f"engine: expected some of {', '.join(ENGINES)}, got {', '.join(unknown)}")
    measured = tuple(engines) or ENGINES
    with tempfile.TemporaryDirectory() as folder:
        rounds = min(sizes.step_rounds, ROUNDS)
        by_rank = on_ranks(WORLD_SIZE, GLOO, _times, measured, sizes.gpt, sizes.step_batch, rounds, folder)
    how = (
        f"GPT of {definition_of(sizes.gpt).numel / 1e6:.1f} million parameters in float32, {sizes.step_batch} x "
        f"{sizes.gpt.context} tokens a rank, AdamW; {WORLD_SIZE} ranks of one thread, gloo; {rounds} rounds; the rank "
        f"that takes longest. With the recorder's defaults one step in {DEFAULT_PERIOD} is recorded, in sketches, of gradients, "
        "parameters and the optimizer's state; the loss and a digest of the batch are of every step. The first two steps, "
        f"which are dense, are not in this. The monitor judges every step at once; by default it "
        "judges sixteen in a row, which is less work. CPU time is that of the first rank, which judges."
    )
    wall = slowest([times["wall"] for times in by_rank])
    return Section("Cost of recording", how, recorder_figures(wall, by_rank[0]["processor"], measured))


def _times(
    _rank: int, engines: Sequence[str], config: GPTConfig, batch_size: int, rounds: int, folder: str
) -> Mapping[str, Times]:
    with ExitStack() as stack:
        steps: dict[str, Callable[[], None]] = {}
        for engine in engines:
            steps[f"{engine}, {WITHOUT}"] = _step(engine, config, batch_size)
            steps[f"{engine}, {AGAIN}"] = _step(engine, config, batch_size)
            for kind, schedule in SCHEDULES.items():
                directory = Path(folder, f"{engine}-{kind}".replace(" ", "-"))
                given = dict(schedule) | ({"monitor": Monitor(every=1)} if kind in (JUDGED, RECORDED_JUDGED) else {})
                steps[f"{engine}, {kind}"] = _step(engine, config, batch_size, stack, directory, given)
        return alternate(steps, rounds, lambda: meet("cpu"))


def _step(
    engine: str,
    config: GPTConfig,
    batch_size: int,
    stack: ExitStack | None = None,
    directory: Path | None = None,
    schedule: Mapping[str, Any] | None = None,
) -> Callable[[], None]:
    model, loss_of = losses(engine, config, batch_size, config.context, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    recorder = None
    if stack is not None and directory is not None:
        recorder = Recorder(directory, model=model, optimizer=optimizer, detail="sketch", **(schedule or {}))
        stack.enter_context(recorder)

    def step() -> None:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        if recorder is not None:
            recorder.step(loss=loss)
        optimizer.zero_grad()

    return step


def recorder_figures(wall: Times, processor: Times, engines: Sequence[str] = ENGINES) -> tuple[Figure, ...]:
    """Of each engine what a step costs on average at the default period, within LIMIT, and what of that each kind of step is.

    Args:
        processor: CPU times of the first rank.
    """
    found: list[Figure] = []
    for engine in engines:
        taken = {kind: wall[f"{engine}, {kind}"] for kind in (WITHOUT, AGAIN, *SCHEDULES)}
        ratios = {
            kind: [a / b for a, b in zip(taken[kind], taken[WITHOUT], strict=True)] for kind in taken if kind != WITHOUT
        }
        # Medians: one disturbed round of one kind of step is not to count a hundredfold.
        between, recorded, judged, recorded_judged = (
            median_figure("", ratios[kind], TIMES).value for kind in SCHEDULES
        )
        average = ((DEFAULT_PERIOD - 1) * between + recorded) / DEFAULT_PERIOD
        monitored = ((DEFAULT_PERIOD - 1) * judged + recorded_judged) / DEFAULT_PERIOD
        found += [
            Figure(
                f"{engine}: a step on average, one in {DEFAULT_PERIOD} recorded, to one without", average, TIMES, LIMIT
            ),
            Figure(f"{engine}: the same with a monitor that judges every step", monitored, TIMES, LIMIT),
            median_figure(f"{engine}: a step that is not recorded to one without", ratios[BETWEEN], TIMES),
            median_figure(f"{engine}: one that is judged to one without", ratios[JUDGED], TIMES),
            median_figure(f"{engine}: a recorded step to one without", ratios[RECORDED], TIMES),
            median_figure(f"{engine}: a recorded step that is judged to one without", ratios[RECORDED_JUDGED], TIMES),
            median_figure(f"{engine}: a step without to one without: noise", ratios[AGAIN], TIMES),
            median_figure(f"{engine}: without", [1e3 * seconds for seconds in taken[WITHOUT]], "ms"),
            median_figure(
                f"{engine}: what a recorded step takes longer",
                [1e3 * (a - b) for a, b in zip(taken[RECORDED], taken[WITHOUT], strict=True)],
                "ms",
            ),
            *(
                median_figure(
                    f"{engine}: what judging takes, {kind}{clock}",
                    [
                        1e3 * (a - b)
                        for a, b in zip(of[f"{engine}, {judged_kind}"], of[f"{engine}, {kind}"], strict=True)
                    ],
                    "ms",
                )
                for clock, of in (("", wall), (", CPU", processor))
                for judged_kind, kind in ((JUDGED, BETWEEN), (RECORDED_JUDGED, RECORDED))
            ),
        ]
    return tuple(found)

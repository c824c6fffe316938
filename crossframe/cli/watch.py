"""`crossframe watch RUN`: shows a run while it is being recorded, with alarms."""

import json
import math
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from crossframe.cli.console import LONGEST_MESSAGE
from crossframe.cli.exit_status import AGREE, FOUND, UNSETTLED
from crossframe.draw.timeline import HEIGHTS
from crossframe.errors import UsageError
from crossframe.inspection.values import finite_or_none
from crossframe.monitoring import Alarm, Follower
from crossframe.monitoring.baseline import BaselineRule
from crossframe.processes import run

POLL_SECONDS = 0.5
ACTION_SECONDS = 60.0
"""The time that the line of --on-alarm may take."""
_MOST_UNITS = 12
_MOST_ALARMS = 8
_LEAST_WIDTH, _WIDEST = 20, 60


def watch(
    directory: Path,
    *,
    baseline: Path | None,
    once: bool,
    timeout: float | None,
    on_alarm: str | None = None,
    as_json: bool,
    console: Console,
    errors: Console,
) -> int:
    """Follow a run until it ends; returns the exit status.

    Args:
        directory: of the recording.
        baseline: a golden, or a recording with perturbed runs.
        once: show the run as it is now.
        timeout: seconds without a new step after which to stop; None: wait.
        on_alarm: a line for the shell, which is run for each alarm; None: nothing is run.
        as_json: print the result as JSON.

    Raises:
        RecordingError: there is no recording, or it is damaged or replaced by another run.
        UsageError: an invalid option.
    """
    if timeout is not None and not 0 < timeout < math.inf:
        raise UsageError(f"watch: --timeout: expected a positive number of seconds, got {timeout}")
    follower = Follower(directory, None if baseline is None else BaselineRule(baseline))
    if once:
        _act(on_alarm, directory, follower.advance()[0], errors)
    elif as_json or not console.is_terminal:
        for alarms in _new_alarms(follower, timeout):
            if not as_json:
                _print(console, alarms)
            _act(on_alarm, directory, alarms, errors)
    else:
        with Live(console=console, auto_refresh=False) as live:
            for alarms in _new_alarms(follower, timeout):
                live.update(view(follower, directory, console.width), refresh=True)
                _act(on_alarm, directory, alarms, errors)
    if as_json:
        print(json.dumps(to_json(follower, directory), indent=1))
    elif once or not console.is_terminal:
        width = console.width if console.is_terminal else LONGEST_MESSAGE
        console.print(view(follower, directory, width, with_alarms=once))
    if follower.alarms:
        return FOUND
    return AGREE if once or follower.ended else UNSETTLED


def _new_alarms(follower: Follower, timeout: float | None) -> Iterator[list[Alarm]]:
    """The new alarms at each look at the recording, until the run ends, or no step has ended for `timeout` seconds."""
    while True:
        alarms, _ = follower.advance()
        yield alarms
        waited = time.monotonic() - follower.changed_at
        if follower.ended or (timeout is not None and waited >= timeout):
            return
        time.sleep(POLL_SECONDS if timeout is None else min(POLL_SECONDS, timeout))


def _act(on_alarm: str | None, directory: Path, alarms: Sequence[Alarm], errors: Console) -> None:
    """Run the user's line for each alarm. If it fails, that is reported, and watching goes on."""
    if on_alarm is None:
        return
    for alarm in alarms:
        environment = {
            "CROSSFRAME_RUN": str(directory),
            "CROSSFRAME_ALARM": alarm.describe(),
            "CROSSFRAME_ALARM_KIND": alarm.kind.value,
            "CROSSFRAME_ALARM_STEP": str(alarm.step),
        }
        try:
            status, _ = run(
                ["sh", "-c", on_alarm], prints_to_stderr=True, environment=environment, timeout=ACTION_SECONDS
            )
            failure = f"exit status {status}" if status else ""
        except TimeoutError as error:
            failure = str(error)
        if failure:
            errors.print(f"watch: --on-alarm failed at the alarm of step {alarm.step}: {failure}", style="yellow")


def _lines(text: str, width: int, style: str = "") -> list[Text]:
    """A sentence as lines of a terminal, which a live view does not wrap by itself."""
    return [Text(line, style=style) for line in textwrap.wrap(text, width, break_on_hyphens=False)]


def _print(console: Console, alarms: list[Alarm]) -> None:
    for alarm in alarms:
        console.print(Text(alarm.describe(), style="bold red"), soft_wrap=True)


def view(follower: Follower, directory: Path, width: int, *, with_alarms: bool = True) -> RenderableType:
    """The run in a terminal: its progress, its loss, the norms of its units, alarms and notes."""
    manifest, last = follower.manifest, follower.last
    steps = f"{follower.num_steps}{f' of {manifest.steps}' if manifest.steps else ''} steps"
    if follower.ended:
        state = "ended"
    else:
        state = f"the last one seen {time.monotonic() - follower.changed_at:.0f} s ago"
    ranks = "1 rank" if manifest.world_size == 1 else f"{manifest.world_size} ranks"
    head = f"{directory}: {manifest.model} ({manifest.framework}, {manifest.dtype}, {ranks}), {steps}, {state}"
    shown: list[RenderableType] = [*_lines(head, width)]
    counts = follower.steps_by_rank
    if max(counts) > min(counts) + 1:
        slowest = counts.index(min(counts))
        shown.append(Text(f"rank {slowest} is {max(counts) - min(counts)} steps behind", style="yellow"))
    if follower.losses:
        losses = list(follower.losses)
        line = sparkline(losses, min(max(width - _LEAST_WIDTH, _LEAST_WIDTH), _WIDEST))
        shown.append(Text(f"loss {losses[-1]:.5g}  {line}"))
    if last is not None and last.gradients:
        shown.append(_units(follower))
    for note in follower.notes:
        shown += _lines(f"note: {note}", width)
    if with_alarms:
        hidden = len(follower.alarms) - _MOST_ALARMS
        if hidden > 0:
            shown.append(Text(f"{hidden} earlier alarms; --json lists all", style="red"))
        for alarm in follower.alarms[-_MOST_ALARMS:]:
            shown += _lines(alarm.describe(), width, "bold red")
    count = len(follower.alarms)
    shown.append(
        Text(f"{count} alarm{'s' * (count != 1)}", style="bold red") if count else Text("no alarm", style="green")
    )
    return Group(*shown)


def _units(follower: Follower) -> Table:
    last = follower.last
    assert last is not None
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in (f"unit, at step {last.step}", "gradient norm", "parameter norm"):
        table.add_column(title, justify="left" if "unit" in title else "right")
    units = list(last.gradients)
    for unit in units[:_MOST_UNITS]:
        table.add_row(unit or "(root)", f"{last.gradients[unit]:.4g}", f"{last.parameters.get(unit, math.nan):.4g}")
    if len(units) > _MOST_UNITS:
        table.add_row(f"and {len(units) - _MOST_UNITS} more units", "", "")
    return table


def sparkline(values: list[float], width: int) -> str:
    """Values as a line of bars, of at most `width` characters: each is the mean of as many values.

    >>> sparkline([4.0, 2.0, 0.0, float("nan")], 10), sparkline([4.0, 2.0, 1.0, -1.0], 2)
    ('█▅▁?', '█▁')
    """
    per_bar = math.ceil(len(values) / width)
    means = [sum(part) / len(part) for i in range(0, len(values), per_bar) if (part := values[i : i + per_bar])]
    finite = [value for value in means if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(HEIGHTS) - 1) / (high - low) if high > low else 0.0
    return "".join(HEIGHTS[math.floor((each - low) * scale + 0.5)] if math.isfinite(each) else "?" for each in means)


def to_json(follower: Follower, directory: Path) -> dict:
    """The run as a JSON object."""
    losses = follower.losses
    return {
        "recording": str(directory),
        "steps": follower.num_steps,
        "of": follower.manifest.steps,
        "ended": follower.ended,
        "steps_by_rank": follower.steps_by_rank,
        "loss": finite_or_none(losses[-1]) if losses else None,
        "alarms": [alarm.to_json() for alarm in follower.alarms],
        "notes": follower.notes,
    }

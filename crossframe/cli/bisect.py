"""`crossframe bisect -- A -- B`: records two commands more and more densely up to where they diverge, and explains it there.

`crossframe bisect --settings -- A -- B`: runs A with some of the settings of B, until those that make the runs diverge are found.
"""

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from crossframe.bisect import Outcome, find_causes
from crossframe.check import check_recordings
from crossframe.cli.bisect_settings import SettingsOfTwo
from crossframe.cli.exit_status import AGREE, FOUND, UNSETTLED, exit_status
from crossframe.cli.explain import explain
from crossframe.cli.kept_runs import KeptRuns
from crossframe.cli.option_values import check_perturbed_runs, check_size
from crossframe.cli.record import DENSE, MAX_STEPS
from crossframe.cli.training_command import EXAMPLES, TrainingCommand
from crossframe.environment import Difference, Effect
from crossframe.environment.facts import COMMAND, CONFIGURATION, VARIABLES
from crossframe.errors import FailedRunError, UsageError
from crossframe.quoting import quote
from crossframe.recording import Recording
from crossframe.recording.event_format import PARAMETERS
from crossframe.verdict import PairVerdict, Verdict, bounds_for, compare

FOLDER = Path("runs", "bisect")
SIDES = ("a", "b")
_STEP, _SIDE = "{step}", "{side}"
_FEWER, _MOST_DENSE, _MOST_OTHERS = 10, 4, 8


@dataclass(frozen=True)
class Options:
    """How commands are recorded.

    Attributes:
        every: steps between two recorded ones, in the first recordings.
        steps: number of steps after which commands are ended; None: they run to their end.
        perturbed_runs: of the first command, in each of its recordings.
        resume: words that make a command go on from a checkpoint, with {step} for the number of steps that are done, and {side}
            for "a" or "b"; "" if it cannot.
        timeout: seconds that each run of `explain` may take.
    """

    every: int
    steps: int | None
    perturbed_runs: int
    resume: str
    timeout: float

    def __post_init__(self) -> None:
        check_size("every", self.every, 1, MAX_STEPS)
        if self.steps is not None:
            check_size("steps", self.steps, 1, MAX_STEPS)
        check_perturbed_runs(self.perturbed_runs)
        if self.resume and _STEP not in self.resume:
            raise UsageError(
                f"bisect: --resume: expected words with {_STEP}, such as '--resume checkpoints/{_SIDE}/{_STEP}.pt', got "
                f"{quote(self.resume)}"
            )

    @property
    def in_bits(self) -> bool:
        """Whether runs of one program should have equal bits. Perturbed runs are asked for where they round differently."""
        return not self.perturbed_runs

    def first(self) -> dict[str, Any]:
        """The options of the first recordings."""
        return {"every": self.every, "dense": DENSE, "stop_after": self.steps}


def two_commands(words: Sequence[str]) -> tuple[TrainingCommand, TrainingCommand]:
    """The commands of `A -- B`.

    Raises:
        UsageError: not two of them.

    >>> two_commands(["train.py", "--lr", "1", "--", "train.py"])[0].arguments
    ('--lr', '1')
    """
    if words.count("--") != 1:
        raise UsageError(f"bisect: expected two training commands, as in -- A -- B, each such as {EXAMPLES}")
    at = list(words).index("--")
    first, second = (TrainingCommand.parse(part, command="bisect") for part in (words[:at], words[at + 1 :]))
    return first, second


def bisect(
    words: Sequence[str],
    *,
    settings: bool,
    output: Path,
    framework: str | None,
    options: Options,
    overwrite: bool,
    as_json: bool = False,
    console: Console,
    errors: Console,
) -> int:
    """Find where two commands diverge, or which settings make them; returns the exit status.

    Args:
        words: `A -- B`.
        settings: find the settings.
        output: folder of all recordings. The runs in it are not repeated.
        as_json: print the result as a JSON object, and the text to standard error.

    Raises:
        UsageError: not two commands; the folder is of another search; options that do not fit.
        FailedRunError: a command that fails.
    """
    pair = two_commands(words)
    if settings and options.resume:
        raise UsageError("bisect: --resume is for the search of steps; --settings runs commands from their start")
    search = {
        "settings": settings,
        "commands": [str(each) for each in pair],
        "options": asdict(replace(options, timeout=0.0)),
    }
    runs = KeptRuns(output, search, overwrite=overwrite, framework=framework, console=errors)
    if as_json:
        console = errors
    first = options.first()
    coarse = (
        runs.record("first/a", pair[0], **first, perturbed_runs=options.perturbed_runs),
        runs.record("first/b", pair[1], **first),
    )
    said = compare(*coarse, bitwise=not settings and options.in_bits)
    console.print(f"first recordings: {said.verdict.value}: {said.reason}")
    runs.conclude({"verdict": said.verdict.value, "reason": said.reason})
    status = AGREE
    if not said.verdict.agrees:
        search_of = _SettingsSearch if settings else _StepSearch
        status = search_of(runs, pair, coarse, options, console).search(said)
    if as_json:
        counted = {"runs": runs.num_runs, "reused": runs.num_kept, "folder": str(runs.folder), "exit_status": status}
        print(json.dumps(runs.result | counted, indent=1))
    return status


class _StepSearch:
    """The search of the step at which two commands diverge."""

    def __init__(
        self,
        runs: KeptRuns,
        pair: tuple[TrainingCommand, TrainingCommand],
        coarse: tuple[Recording, Recording],
        options: Options,
        console: Console,
    ) -> None:
        self.runs, self.pair, self.coarse, self.options, self.console = runs, pair, coarse, options, console
        self._resume = options.resume

    def search(self, said: PairVerdict) -> int:
        if said.first_divergence is None:
            self.console.print("no value differs beyond its bound; crossframe bisect --settings tests the settings")
            return exit_status(said.verdict)
        stop, recordings, start = self._step_of(said), self.coarse, 0
        last = _last_before(recordings, stop, -1)
        while stop - last > 1 and not _is_dense(recordings, stop - start):
            every = max(1, math.ceil((stop - last) / _FEWER))
            dense = every == 1 and stop - last <= _MOST_DENSE
            found = self._recorded(last, stop, every, dense)
            if found is None:
                break
            recordings, start, said = found
            before = stop - last
            stop = self._step_of(said) + start
            # A denser recording may also differ before steps that agreed.
            last = min(max(last, _last_before(recordings, stop - start, -1) + start), stop - 1)
            if stop - last >= before and not dense:
                break
        if not _is_dense(recordings, stop - start):
            found = self._recorded(max(last, stop - _MOST_DENSE), stop, 1, True)
            if found is not None:
                recordings, start, said = found
                stop = self._step_of(said) + start
        return self._explain(recordings, start, stop, said)

    def _step_of(self, said: PairVerdict) -> int:
        """The step at which two runs diverge: without perturbed runs in bits, else beyond rounding."""
        assert said.first_divergence is not None
        beyond = (each.step for each in said.judged if each.beyond)
        return said.first_divergence.step if self.options.in_bits else next(beyond, said.first_divergence.step)

    def _explain(self, recordings: tuple[Recording, Recording], start: int, stop: int, said: PairVerdict) -> int:
        of_whole = f", which is step {stop - start} of runs that go on after {start} steps" if start else ""
        self.console.print(f"the runs diverge at step {stop}{of_whole}: {said.reason}", style="bold")
        self.console.print(f"{self.runs.num_runs} runs, {self.runs.num_kept} reused; in {self.runs.folder}")
        folders = [recording.directory for recording in recordings]
        self.console.print(f"explained: crossframe explain {shlex.join(map(str, folders))}")
        where = said.first_divergence
        self.runs.conclude(
            {
                "verdict": said.verdict.value,
                "reason": said.reason,
                "step": stop,
                "start": start,
                "first_divergence": None if where is None else where.to_json(),
                "recordings": list(map(str, folders)),
            }
        )
        try:
            explain(
                (folders[0], folders[1]),
                folder=None,
                timeout=self.options.timeout,
                param_map=None,
                bitwise=self.options.in_bits,
                svg=None,
                as_json=False,
                console=self.console,
            )
        except UsageError as error:
            self.console.print(f"not explained: {error}")
        return exit_status(said.verdict)

    def _recorded(
        self, last: int, stop: int, every: int, dense: bool
    ) -> tuple[tuple[Recording, Recording], int, PairVerdict] | None:
        """Recordings up to a step, the number of steps that were skipped, and the verdict; None if nothing differs in them.

        Args:
            last: the last step that agrees.
            stop: the first step that differs.
        """
        start = self._checkpoint(last + 1)
        window = (max(last + 1, 0) - start, stop + 1 - start)
        options: dict[str, Any] = {
            "every": every,
            "dense": 0,
            "windows": (window,) if dense else (),
            "stop_after": stop + 1 - start,
        }
        name = f"{'dense' if dense else 'every'}-{every}-from-{start}-to-{stop}"
        words = [shlex.split(self._resumed(side, start)) if start else [] for side in SIDES]
        commands = [
            replace(each, arguments=(*each.arguments, *more)) for each, more in zip(self.pair, words, strict=True)
        ]
        # Perturbed runs measure rounding of recorded steps alone, so each recording of A needs its own.
        a = self.runs.record(f"{name}/a", commands[0], **options, perturbed_runs=self.options.perturbed_runs)
        b = self.runs.record(f"{name}/b", commands[1], **options)
        said = compare(a, b, bitwise=self.options.in_bits)
        where = said.first_divergence
        if start and (why := self._unlike((a, b), start) or (where and where.phase == PARAMETERS and "their values")):
            self.console.print(
                f"runs that go on after {start} steps are not like those from the start ({why} differ); the commands run from "
                "their start"
            )
            self._resume = ""
            return self._recorded(last, stop, every, dense)
        return None if where is None else ((a, b), start, said)

    def _checkpoint(self, most: int) -> int:
        """The largest number of steps, up to this one, of which both commands have a checkpoint; 0 if there is none."""
        if not self._resume:
            return 0
        for step in range(most, 0, -1):
            words = list(chain.from_iterable(shlex.split(self._resumed(side, step)) for side in SIDES))
            paths = [word.rpartition("=")[2] for word in words if str(step) in word]
            if paths and all(Path(path).exists() for path in paths):
                return step
        return 0

    def _resumed(self, side: str, step: int) -> str:
        return self._resume.replace(_STEP, str(step)).replace(_SIDE, side)

    def _unlike(self, resumed: tuple[Recording, Recording], start: int) -> str:
        """What differs between runs from a checkpoint and those from the start; "" if their losses agree."""
        for recording, whole in zip(resumed, self.coarse, strict=True):
            losses, expected = recording.losses(), whole.losses()[start : start + recording.num_steps]
            bound = bounds_for(recording.manifest.dtype).loss
            if losses.shape != expected.shape or not all(
                math.isclose(x, y, rel_tol=bound) for x, y in zip(losses.flat, expected.flat, strict=True)
            ):
                return f"losses of {recording.directory}"
        return ""


def _last_before(recordings: tuple[Recording, Recording], step: int, otherwise: int) -> int:
    """The last step before this one whose tensors both recorded."""
    common = set(recordings[0].recorded_steps()) & set(recordings[1].recorded_steps())
    return max((each for each in common if each < step), default=otherwise)


def _is_dense(recordings: tuple[Recording, Recording], step: int) -> bool:
    return all(recording.manifest.schedule.is_dense(step) for recording in recordings)


class _SettingsSearch:
    """The search of settings that make two commands diverge."""

    def __init__(
        self,
        runs: KeptRuns,
        pair: tuple[TrainingCommand, TrainingCommand],
        coarse: tuple[Recording, Recording],
        options: Options,
        console: Console,
    ) -> None:
        self.runs, self.coarse, self.options, self.console = runs, coarse, options, console
        self.both = SettingsOfTwo(*pair, runs.folder)
        self._said: dict[tuple[int, ...], str] = {}
        self._unresolved: dict[tuple[int, ...], str] = {}

    def search(self, said: PairVerdict) -> int:
        switched = self.both.differences
        others = self._others()
        if not switched:
            self.console.print("the commands have the same settings; what else differs:")
            self._list(others)
            return UNSETTLED
        every = tuple(range(len(switched)))
        self._said[every] = said.reason
        if self._outcome(said, every) is not Outcome.DIVERGES:
            self.console.print("the verdict is undecided; measure rounding with --perturbed-runs 4")
            return UNSETTLED
        found = find_causes(len(switched), self._test)
        self.console.print(
            f"{len(switched)} settings differ; {self.runs.num_runs} runs, {self.runs.num_kept} reused, "
            f"{len(self._unresolved)} undecided; in {self.runs.folder}"
        )
        for cause in found:
            which = "this setting alone makes"
            if len(cause) > 1:
                which = f"these {len(cause)} settings together, and not without any one, make"
            self.console.print(f"{which} the runs diverge:", style="bold red")
            for each in cause:
                self.console.print(f"  {self._describe(switched[each][1])}")
            self.console.print(f"    {self._said[cause]}")
        rest = [each for each in every if each not in chain.from_iterable(found)]
        if rest:
            self.console.print("without those, the others do not make the runs diverge:", style="green")
            self._list([switched[each][1] for each in rest])
        if others:
            self.console.print("not tested, since no command sets it:")
            self._list(others)
        for subset, why in self._unresolved.items():
            names = ", ".join(switched[each][0].label for each in subset)
            self.console.print(f"undecided with {names}: {why}", style="yellow")
        self.runs.conclude(
            {
                "verdict": said.verdict.value,
                "reason": said.reason,
                "causes": [[self._describe(switched[each][1]) for each in cause] for cause in found],
                "without_effect": [self._describe(switched[each][1]) for each in rest],
                "not_tested": [self._describe(each) for each in others],
                "undecided": len(self._unresolved),
            }
        )
        return FOUND

    def _test(self, subset: tuple[int, ...]) -> Outcome:
        settings = [self.both.differences[each][0] for each in subset]
        number = int("".join("1" if i in subset else "0" for i in range(len(self.both.differences))), 2)
        command = self.both.command(settings, number)
        self.console.print(f"A with {', '.join(each.label for each in settings)} of B", style="dim")
        try:
            run = self.runs.record(f"settings/combination-{number}", command, **self.options.first())
        except FailedRunError as error:
            self._unresolved[subset] = str(error)
            return Outcome.UNRESOLVED
        said = compare(self.coarse[0], run, bitwise=False)
        self._said[subset] = said.reason
        return self._outcome(said, subset)

    def _outcome(self, said: PairVerdict, subset: tuple[int, ...]) -> Outcome:
        if said.verdict.agrees:
            return Outcome.AGREES
        if said.verdict in (Verdict.BUG, Verdict.INCOMPARABLE):
            return Outcome.DIVERGES
        self._unresolved[subset] = said.reason
        return Outcome.UNRESOLVED

    def _others(self) -> list[Difference]:
        """What else may change the numbers, and no command sets."""
        own = (COMMAND, CONFIGURATION)
        variables = {each.name for each, _ in self.both.differences if each.section == VARIABLES}
        return [
            each
            for each in check_recordings(*self.coarse).differences
            if each.effect is not Effect.HARDLY
            and each.section not in own
            and not (each.section == VARIABLES and each.name in variables)
        ]

    def _list(self, differences: Sequence[Difference]) -> None:
        for each in differences[:_MOST_OTHERS]:
            self.console.print(f"  {self._describe(each)}")
        if len(differences) > _MOST_OTHERS:
            self.console.print(f"  and {len(differences) - _MOST_OTHERS} more")

    def _describe(self, difference: Difference) -> str:
        return difference.describe(("A", "B"))

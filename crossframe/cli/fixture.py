"""The fixture `training` of the pytest plugin: compares a training run with its golden, or records the golden again."""

import inspect
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from crossframe.baseline import condense
from crossframe.cli.baseline import FOLDER, MAX_KB, PERTURBED_RUNS, Options, check_limits, run_to_compare
from crossframe.cli.compare import answer
from crossframe.cli.console import PlainConsole
from crossframe.cli.exit_status import AGREE
from crossframe.cli.record import MODULES
from crossframe.cli.script_imports import is_of_jax
from crossframe.cli.training_command import TrainingCommand
from crossframe.errors import UsageError
from crossframe.quoting import quote
from crossframe.recording import Recording, Schedule
from crossframe.recording.golden_file import SUFFIX
from crossframe.recording.known_settings import COMMAND
from crossframe.recording.manifest import SKETCH

_NAME = re.compile(r"[\w.+=-]{1,100}")
_WIDTH = 110

Train = Callable[[], Any]


class Record(Protocol):
    """Records a run: the options, the folder, the number of perturbed runs, and the detail."""

    def __call__(self, options: Options, folder: Path, perturbed_runs: int, *, detail: str = ...) -> Recording: ...


@dataclass(frozen=True)
class Training:
    """Compares training runs with their goldens.

    Attributes:
        folder: that of the test's file.
        scratch: a folder for recordings and reports.
        updates: record goldens instead of comparing with them.
        of: the test's id, for the manifests.
        tell: prints a line at the end of the tests.
    """

    folder: Path
    scratch: Path
    updates: bool
    of: str
    tell: Callable[[str], None]

    def matches(
        self,
        name: str,
        train: Train | None = None,
        *,
        script: str | Path | None = None,
        args: Sequence[str] = (),
        nproc_per_node: int | None = None,
        framework: str | None = None,
        every: int = 1,
        dense: int = 2,
        perturbed_runs: int = PERTURBED_RUNS,
        max_kb: int = MAX_KB,
        bitwise: bool = False,
    ) -> None:
        """Train, and fail the test unless the run equals its golden up to rounding.

        With `--update-baselines`, train once, and once for each perturbed run, and write the golden.

        Args:
            name: name of the golden, `baselines/NAME.golden` next to the test's file.
            train: a function that trains: it seeds, makes the model, the optimizer and in JAX the jitted functions, and runs the
                loop, as a script would. It runs in this process.
            script: instead of `train`, a training script, relative to the folder of the test's file, for a process of its own.
            args: arguments of the script.
            nproc_per_node: processes that torchrun starts for the script.
            framework: "torch" or "jax". None: JAX if the script, or the file of `train`, imports JAX and not torch.
            every, dense: the steps that a golden has: tensors of every so many, and activations in the first ones.
            perturbed_runs: number of perturbed runs of a golden.
            max_kb: maximum size of a golden in kB.
            bitwise: also fail if the same program computes other bits.

        Raises:
            UsageError: not one of `train` and `script`; an invalid option; a run that failed or cannot be recorded.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(f"training.matches: expected a file name without a folder as name, got {quote(name)}")
        if (train is None) == (script is None) or (train is not None and not callable(train)):
            raise UsageError("training.matches: expected a function that trains, or script=, one of both")
        if train is not None and (args or nproc_per_node is not None):
            raise UsageError("training.matches: args= and nproc_per_node= are those of a script")
        path = self.folder / FOLDER / f"{name}{SUFFIX}"
        run = self._script(script, args, nproc_per_node) if train is None else InProcess(train, self.of).record
        scratch = self.scratch / name
        if self.updates:
            check_limits(perturbed_runs, max_kb)
            self._update(path, run, Options(Schedule(dense, every), framework), perturbed_runs, max_kb, scratch)
            return
        if not path.exists():
            _fail(f"{path}: there is no golden yet; record it with pytest --update-baselines, and commit it")
        golden = Recording.open(path)
        options = Options.of(golden, framework)
        made = run_to_compare(golden, lambda detail: run(options, scratch / "this_run", 0, detail=detail))
        status, text = _compared(golden, made, scratch, bitwise)
        if status != AGREE:
            _fail(f"{path}\n{text}")

    def _update(
        self,
        path: Path,
        run: Record,
        options: Options,
        perturbed_runs: int,
        max_kb: int,
        scratch: Path,
    ) -> None:
        made = run(options, scratch / "this_run", perturbed_runs)
        golden = condense(made, made.perturbed_runs(), most_bytes=1000 * max_kb)
        before = ""
        if path.exists():
            before = "; before: " + _compared(Recording.open(path), made, scratch, True)[1].splitlines()[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        golden.write(path)
        self.tell(f"{path}: {path.stat().st_size / 1000:.0f} kB{before}")

    def _script(self, script: str | Path | None, args: Sequence[str], nproc_per_node: int | None) -> Record:
        assert script is not None
        command = TrainingCommand(self.folder / script, tuple(map(str, args)), nproc_per_node=nproc_per_node)

        def record(options: Options, folder: Path, perturbed_runs: int, *, detail: str = SKETCH) -> Recording:
            return options.record(command, folder, perturbed_runs, PlainConsole(file=io.StringIO()), detail=detail)

        return record


@dataclass(frozen=True)
class InProcess:
    """Records a function that trains, in this process."""

    train: Train
    of: str

    def record(self, options: Options, folder: Path, perturbed_runs: int, *, detail: str = SKETCH) -> Recording:
        """Run the function once, and once for each perturbed run."""
        framework = options.framework or ("jax" if self._is_of_jax() else "torch")
        if framework not in MODULES:
            raise UsageError(f"training.matches: framework: expected torch or jax, got {framework!r}")
        recorder_of = import_module(MODULES[framework]).ScriptRecorder
        for perturbed_run in range(perturbed_runs + 1):
            recorder = recorder_of(
                folder,
                every=options.schedule.every,
                dense=options.schedule.dense,
                windows=options.schedule.windows,
                detail=detail,
                perturbed_run=perturbed_run,
                overwrite=True,
                settings={COMMAND: f"pytest {self.of}"},
            )
            try:
                with recorder.watching():
                    self.train()
            except BaseException as error:
                recorder.finish(error)
                raise
            recorder.finish()
        return Recording.open(folder)

    def _is_of_jax(self) -> bool:
        file = inspect.getsourcefile(inspect.unwrap(self.train)) if inspect.isroutine(self.train) else None
        return file is not None and Path(file).is_file() and is_of_jax(Path(file))


def _compared(golden: Recording, run: Recording, folder: Path, bitwise: bool) -> tuple[int, str]:
    """The exit status, and the text of the verdict with the path of the report."""
    text = io.StringIO()
    has_pages = find_spec("jinja2") is not None and find_spec("matplotlib") is not None
    console = PlainConsole(file=text, width=_WIDTH)
    status = answer([(golden, run)], folder if has_pages else None, bitwise=bitwise, console=console)
    return status, text.getvalue().rstrip()


def _fail(text: str) -> None:
    import pytest

    pytest.fail(text, pytrace=False)

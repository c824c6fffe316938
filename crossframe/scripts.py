"""Runs a training script in this process, and records it. `crossframe record SCRIPT` starts such processes."""

import gc
import io
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Protocol

from crossframe.errors import CrossframeError, UsageError
from crossframe.operators.source import call_file

NOT_RECORDED = 3
"""Exit status of a script that ran but was not recorded."""
_RUN_AGAIN = "run_again.{}.json"


def run_again_file(directory: Path, rank: str) -> Path:
    """The file of a recording without steps in which a rank states options of the recorder with which there would be steps, in
    JSON. The command records again with them (`crossframe.cli.record.run_program`).

    Args:
        rank: its number; "*": a pattern of the files of all ranks.
    """
    return directory / _RUN_AGAIN.format(rank)


class RunAgainError(UsageError):
    """The script was not recorded, but would be with the options of `run_again_file`."""


class ScriptRecorder(Protocol):
    """Records a script that does not know of it."""

    def watching(self) -> AbstractContextManager[None]:
        """A context in which the script runs."""
        ...

    def finish(self, error: BaseException | None = None) -> None:
        """End the recording, unless the script failed.

        Raises:
            UsageError: the script succeeded without training.
        """
        ...


def run_script(recorder: ScriptRecorder, words: Sequence[str]) -> int:
    """Run a script or module as `python WORDS` would, and record it; returns its exit status, or NOT_RECORDED.

    Args:
        words: of `program_of`.
    """
    return run_recorded(recorder, program_of(words))


def program_of(words: Sequence[str]) -> Callable[[], dict[str, Any]]:
    """What runs a script or module as `python WORDS` would. Its sys.argv and sys.path are those of this process from now on.

    Args:
        words: `SCRIPT ARGUMENTS`, or `-m MODULE ARGUMENTS`.

    Raises:
        UsageError: there is no such script or module.
    """
    is_module = words[0] == "-m"
    script, *arguments = words[is_module:]
    file = str(module_file(script)) if is_module else script
    if not Path(file).is_file():
        raise UsageError(f"expected a script, but {file} is no file")
    sys.argv = [file, *arguments]
    sys.path.insert(0, os.getcwd() if is_module else str(Path(script).resolve().parent))
    return partial(run_as_main, file, script if is_module else None)


def module_file(name: str) -> Path:
    """The file that `python -m NAME` runs in the current folder. Imports nothing.

    Raises:
        UsageError: there is no such module, or it is a package without `__main__`.
    """
    folders: Sequence[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for part in accumulate(name.split("."), "{}.{}".format):
        spec = PathFinder.find_spec(part, folders) if folders is not None else None
        folders = None if spec is None else spec.submodule_search_locations
    if spec is not None and folders is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", folders)
    if spec is None or not (spec.origin or "").endswith(".py"):
        raise UsageError(f"expected a module that `python -m {name}` would run in {os.getcwd()}, but there is none")
    return Path(str(spec.origin))


def run_recorded(recorder: ScriptRecorder, run: Callable[[], Any]) -> int:
    """Call a function, and record it; returns the exit status of the process, or NOT_RECORDED."""
    try:
        with recorder.watching():
            try:
                run()
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise
        recorder.finish()
    except SystemExit as ended:
        recorder.finish(ended)
        raise
    except RunAgainError as error:
        recorder.finish(error)
        print(f"crossframe: {error}", file=sys.stderr)
        return NOT_RECORDED
    except CrossframeError as error:
        recorder.finish(error)
        traceback.print_exception(error.with_traceback(_of_script(error.__traceback__)))
        print(f"crossframe: not recorded: {error}", file=sys.stderr)
        return NOT_RECORDED
    except BaseException as error:
        recorder.finish(error)
        raise
    return 0


def run_as_main(script: str, module_name: str | None = None) -> dict[str, Any]:
    """Run a script as the module `__main__`, which it remains until the process ends; returns its variables.

    With the name of a module, the file is its own, whose relative imports are from its package.

    Processes that the script starts by multiprocessing's spawn import `__main__` again, also those of its exit handlers. As
    under `python SCRIPT`, its path is absolute in `__file__` and in tracebacks, and as given in sys.argv. (`runpy.run_path`
    uses the same path for all of them: a traceback then has no code after a change of folder.)
    """
    path = os.path.abspath(script)
    call_file(path, script)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __cached__=None, __loader__=loader, __annotations__={})
    if module_name is not None:
        name = f"{module_name}.__main__" if Path(path).name == "__main__.py" else module_name
        package = name.rpartition(".")[0]
        module.__dict__.update(__spec__=ModuleSpec(name, loader, origin=path), __package__=package)
        if package:
            import_module(package)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)
    return module.__dict__


def _of_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the script's first frame on; None for an error of its syntax; all of it for an error elsewhere."""
    outer = trace
    while outer is not None and outer.tb_frame.f_code is not run_as_main.__code__:
        outer = outer.tb_next
    return trace if outer is None else outer.tb_next


def print_from_script_on() -> None:
    """Let the hook that prints an uncaught error show it as `python SCRIPT` would."""
    own = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = _of_script(trace)
        own(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def held_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What a variable of a script holds, with names: elements of a list or dict, or attributes of an object.

    >>> list(held_in("nets", [1, 2])), list(held_in("nets", {"critic": 3, 0: 4}))
    ([('nets_0', 1), ('nets_1', 2)], [('critic', 3)])
    """
    if isinstance(value, list | tuple):
        inner: Mapping[Any, Any] = {f"{name}_{i}": each for i, each in enumerate(value)}
    elif isinstance(value, dict):
        inner = value
    elif isinstance(value, type | ModuleType) or not hasattr(value, "__dict__"):
        inner = {}
    else:
        inner = vars(value)
    for each, held in tuple(inner.items()):
        if isinstance(each, str) and each.isidentifier():
            yield each, held


def flush_files() -> None:
    """Flush all files, for a process that ends without finalizing the interpreter, which would."""
    for kind in (io.TextIOBase, io.BufferedIOBase):  # a text is written to a buffer
        for file in [each for each in gc.get_objects() if issubclass(type(each), kind)]:
            with suppress(ValueError, OSError):  # closed files, and those that are read
                file.flush()


def main(run: Callable[..., int]) -> int:
    """Run and record: OPTIONS WORDS are on the command line, OPTIONS as JSON, WORDS of `run_script`. Returns the exit status.

    An error of the script is printed by Python, as that of the script alone.

    Args:
        run: a function of the words and the options.
    """
    options, *words = sys.argv[1:]
    given: dict[str, Any] = json.loads(options)
    given["windows"] = [tuple(window) for window in given["windows"]]
    if (watch := given.pop("watch", None)) is not None:
        from crossframe.monitoring import Monitor

        given["monitor"] = Monitor(**watch)
    try:
        return run(words, **given)
    except KeyboardInterrupt:
        flush_files()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise
    except BaseException:
        print_from_script_on()
        raise

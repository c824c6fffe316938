"""Runs a training script in this process, and records it. `crossframe record SCRIPT` starts such processes."""

import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from crossframe.errors import CrossframeError

NOT_RECORDED = 3
"""Exit status of a script that ran but was not recorded."""


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


def run_script(recorder: ScriptRecorder, script: str, arguments: Sequence[str]) -> int:
    """Run a script as `python SCRIPT ARGUMENTS` would, and record it; returns its exit status, or NOT_RECORDED."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        with recorder.watching():
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    raise
        recorder.finish()
    except SystemExit as ended:
        recorder.finish(ended)
        raise
    except CrossframeError as error:
        recorder.finish(error)
        traceback.print_exc()
        print(f"crossframe: not recorded: {error}", file=sys.stderr)
        return NOT_RECORDED
    except BaseException as error:
        recorder.finish(error)
        raise
    return 0


def main(run: Callable[..., int]) -> int:
    """Run and record: OPTIONS SCRIPT ARGUMENTS are on the command line, OPTIONS as JSON. Returns the exit status.

    Args:
        run: a function of the script, its arguments and the options.
    """
    options, script, *arguments = sys.argv[1:]
    given: dict[str, Any] = json.loads(options)
    given["windows"] = [tuple(window) for window in given["windows"]]
    if (watch := given.pop("watch", None)) is not None:
        from crossframe.monitoring import Monitor

        given["monitor"] = Monitor(**watch)
    try:
        return run(script, arguments, **given)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        raise

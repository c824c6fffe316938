"""`crossframe compare` on two stored models, which a backend unpacks if their format is that of its framework."""

import json
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from crossframe.checkpoint_comparison import (
    CheckpointVerdict,
    Format,
    StoredModel,
    compare_checkpoints,
    format_of,
    open_stored,
    read_unpacked,
)
from crossframe.cli.exit_status import exit_status
from crossframe.errors import UsageError
from crossframe.processes import module_command, run
from crossframe.quoting import quote_path
from crossframe.shapes.stored import is_recording
from crossframe.verdict.verdicts import Verdict

_BACKENDS = {Format.DCP: "torch_backend", Format.TORCH: "torch_backend", Format.ORBAX: "jax_backend"}
_FRAMEWORKS = {"torch_backend": "torch", "jax_backend": "jax"}
_SHOWN, _LAST_LINES = 20, 8


def are_checkpoints(a: Path, b: Path) -> bool:
    """Whether both are stored models instead of recordings.

    Raises:
        UsageError: one is a recording, and the other one a stored model.
    """
    stored = [not is_recording(path) and format_of(path) is not None for path in (a, b)]
    if stored[0] != stored[1] and any(map(is_recording, (a, b))):
        run, other = (b, a) if stored[0] else (a, b)
        raise UsageError(
            f"compare: expected two recordings or two checkpoints, but {run} is a recording and {other} a checkpoint"
        )
    return all(stored)


def compare_stored(a: Path, b: Path, *, given: Mapping[str, object], as_json: bool, console: Console) -> int:
    """Print the verdict on two stored models; returns the exit status.

    Args:
        given: options for recordings by name, and whether they were given.

    Raises:
        UsageError: such an option; a checkpoint that cannot be read.
        CheckpointError: a damaged checkpoint.
    """
    if unused := [name for name, value in given.items() if value]:
        raise UsageError(f"compare: {unused[0]} is for recordings, and {a} and {b} are checkpoints; leave it out")
    with tempfile.TemporaryDirectory(prefix="crossframe-compare-") as temporary:
        first, second = (_opened(path, Path(temporary, name)) for path, name in ((a, "a"), (b, "b")))
        found = compare_checkpoints(first, second)
    if as_json:
        print(json.dumps(found.to_json(), indent=1))
    else:
        _print(found, console)
    return exit_status(found.verdict)


def _opened(path: Path, folder: Path) -> StoredModel:
    found = format_of(path)
    backend = _BACKENDS.get(found) if found is not None else None
    if found is None or backend is None:
        return open_stored(path)
    if find_spec(_FRAMEWORKS[backend]) is None:
        raise ModuleNotFoundError(name=_FRAMEWORKS[backend])
    folder.mkdir()
    command = module_command(f"{backend}.state.unpack_checkpoint:main", [str(path), str(folder)])
    status, printed = run(command, captured=True)
    if status:
        last = "\n".join(printed.splitlines()[-_LAST_LINES:])
        raise UsageError(f"{quote_path(path)}: expected a checkpoint of {found.value}, cannot read it:\n{last}")
    return read_unpacked(folder, path.name)


def _print(found: CheckpointVerdict, console: Console) -> None:
    style = "green" if found.verdict.agrees else "yellow" if found.verdict is Verdict.INCONCLUSIVE else "bold red"
    console.print(f"{found.verdict.value}: {found.reason}", style=style, soft_wrap=True, highlight=False)
    console.print(
        f"{found.num_tensors} tensors are in both, {found.num_equal} of them equal in every bit", highlight=False
    )
    for each in found.differences[:_SHOWN]:
        console.print(f"  {each.kind.value}: {each.text}", soft_wrap=True, highlight=False)
    if len(found.differences) > _SHOWN:
        console.print(f"  and {len(found.differences) - _SHOWN} more; --json prints all", highlight=False)

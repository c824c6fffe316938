"""`crossframe compare` on two stored models, which a backend unpacks if their format is that of its framework."""

import json
import tempfile
from collections.abc import Mapping, Sequence
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
from crossframe.cli.compare_many import print_groups
from crossframe.cli.exit_status import exit_status
from crossframe.errors import UsageError
from crossframe.processes import module_command, run
from crossframe.quoting import quote_path
from crossframe.shapes.stored import is_recording
from crossframe.verdict.verdicts import Verdict

_BACKENDS = {Format.DCP: "torch_backend", Format.TORCH: "torch_backend", Format.ORBAX: "jax_backend"}
_FRAMEWORKS = {"torch_backend": "torch", "jax_backend": "jax"}
_SHOWN, _LAST_LINES = 20, 8


def are_checkpoints(paths: Sequence[Path]) -> bool:
    """Whether all are stored models instead of recordings.

    Raises:
        UsageError: some are recordings, and others stored models.
    """
    stored = [path for path in paths if not is_recording(path) and format_of(path) is not None]
    runs = [path for path in paths if is_recording(path)]
    if stored and runs:
        raise UsageError(
            f"compare: expected recordings or checkpoints alone, but {runs[0]} is a recording and {stored[0]} a checkpoint"
        )
    return len(stored) == len(paths)


def compare_stored(paths: Sequence[Path], *, given: Mapping[str, object], as_json: bool, console: Console) -> int:
    """Print the verdict on two stored models, or the groups of more of them that agree; returns the exit status.

    Args:
        given: options for recordings by name, and whether they were given.

    Raises:
        UsageError: such an option; a checkpoint that cannot be read.
        CheckpointError: a damaged checkpoint.
    """
    if unused := [name for name, value in given.items() if value]:
        raise UsageError(
            f"compare: {unused[0]} is for recordings, and {paths[0]} and {paths[1]} are checkpoints; leave it out"
        )
    with tempfile.TemporaryDirectory(prefix="crossframe-compare-") as temporary:
        stored = [_opened(path, Path(temporary, str(i))) for i, path in enumerate(paths)]
        if len(stored) > 2:
            return print_groups(stored, list(map(str, paths)), compare_checkpoints, as_json=as_json, console=console)
        found = compare_checkpoints(*stored)
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

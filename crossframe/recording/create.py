"""Creates a recording: its directory, its manifest, and the removal of an earlier recording. One process does this."""

import errno
import json
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from crossframe.errors import RecordingError
from crossframe.files import folder_lock
from crossframe.quoting import quote, quote_path
from crossframe.recording import event_format
from crossframe.recording.manifest import MANIFEST_NAME, Manifest

# Names of the files and folders of a recording, besides its manifest.
_RANK, _PERTURBED_RUN = re.compile(r"rank\d{5,}"), re.compile(r"twin\d{5,}")
_STEP = re.compile(r"step\d{5,}\.safetensors(\.part)?")
_ENDS = ("part", "replaced", "replaced")
_FILES = (MANIFEST_NAME, event_format.EVENTS_NAME, event_format.ENVIRONMENT_NAME)
# Files that an interrupted creation leaves: the new manifest, and the one that it replaces.
_BEGUN = re.compile(rf"{re.escape(MANIFEST_NAME)}\.([0-9a-f]{{16}}\.)?(part|replaced)")


def create_recording(directory: str | Path, manifest: Manifest, *, overwrite: bool = False) -> Path:
    """Create a recording: make the directory and write `manifest.json`. One process calls this, before any writer opens.

    [Note: ownership of a recording] Jobs that create a recording in the same directory at the same time do not mix. If the disk
    has locks, one job continues and the others raise at once. The following also holds without locks, as on some network disks.
    A manifest appears complete and only if there is none (by a hard link); a job that overwrites removes the old manifest first
    (by a rename, which succeeds for one job). So one job continues and the others raise. Files of the old recording are deleted
    afterwards: each folder is first moved aside, and moved back if the manifest has become that of another job. A writer makes
    its folder under the same lock, shared, so that it does not appear in the recording of another job. A writer whose recording
    was overwritten detects it by the token of the manifest, at the latest when it finishes.

    Args:
        overwrite: replace an existing recording. Only the files of a recording are deleted.

    Raises:
        RecordingError: the directory holds something else, or a recording although `overwrite` is false; another job creates a
            recording in it at the same time; or the disk cannot be written.
    """
    path = Path(directory)
    try:
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise RecordingError(
                f"{quote_path(path)}: expected a directory to record into, or none, but it is a file or a link"
            )
        try:
            json.dumps(manifest.to_json(), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RecordingError(f"manifest fields 'settings' and 'versions': expected JSON, but {error}") from None
        path.mkdir(parents=True, exist_ok=True)
        with folder_lock(path) as held:
            if not held:
                raise RecordingError(_taken(path))
            _publish(path, manifest, _replaceable(path, overwrite))
    except OSError as error:
        raise RecordingError(
            f"{quote_path(path)}: no recording can begin there ({error.strerror or error}); make space, or pass another directory"
        ) from error
    return path


def _publish(path: Path, manifest: Manifest, old: list[Path]) -> None:
    """Write the manifest and remove the recording that it replaces; see [Note: ownership of a recording]."""
    target, content = path / MANIFEST_NAME, manifest.to_bytes()
    part, replaced, aside = (path / f"{MANIFEST_NAME}.{secrets.token_hex(8)}.{end}" for end in _ENDS)
    part.write_bytes(content)
    try:
        if target in old:
            target.rename(replaced)
        try:
            _link(part, target)
        finally:
            if target.exists():  # until then the old manifest shows that there was a recording
                replaced.unlink(missing_ok=True)
    except (FileExistsError, FileNotFoundError):
        raise RecordingError(_taken(path)) from None
    finally:
        part.unlink()
    for entry in (entry for entry in old if entry != target):
        with suppress(FileNotFoundError):  # another job has moved it
            entry.rename(aside)
            if not _holds(target, content):
                aside.rename(entry)
                raise RecordingError(_taken(path))
            _delete(aside)


def _taken(path: Path) -> str:
    return f"{quote_path(path)}: another job began to record here at the same time; record into another directory"


def _link(part: Path, target: Path) -> None:
    """Give a file a second name; FileExistsError if the name exists."""
    try:
        os.link(part, target)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        with open(target, "xb") as file:  # a disk without hard links
            file.write(part.read_bytes())


def _holds(file: Path, content: bytes) -> bool:
    try:
        return file.stat().st_size == len(content) and file.read_bytes() == content
    except FileNotFoundError:
        return False


def _delete(entry: Path) -> None:
    """Delete a file or folder of a recording; OSError if a folder holds anything else."""
    if entry.is_dir():
        foreign = list(_foreign(entry))
        for inside in entry.iterdir():
            if inside not in foreign:
                _delete(inside)
        entry.rmdir()
    else:
        entry.unlink()


def _is_folder(entry: Path) -> bool:
    """Whether this is a folder of a rank or of a perturbed run."""
    named = _RANK.fullmatch(entry.name) or _PERTURBED_RUN.fullmatch(entry.name)
    return bool(named) and entry.is_dir() and not entry.is_symlink()


def _is_begun(entry: Path) -> bool:
    """Whether an interrupted creation left this file."""
    return bool(_BEGUN.fullmatch(entry.name)) and not entry.is_symlink()


def _replaceable(path: Path, overwrite: bool) -> list[Path]:
    """The entries of a directory that a new recording replaces.

    Raises:
        RecordingError: the directory is not empty, and holds no recording (or remains of an interrupted creation), a recording
            although `overwrite` is false, or other files in the folders of a recording.
    """
    entries = list(path.iterdir())
    if not entries:
        return []
    try:
        Manifest.read(path)
    except RecordingError as error:
        begun = [entry for entry in entries if _is_begun(entry)]
        if not begun or not all(_is_begun(entry) or _is_folder(entry) for entry in entries):
            raise RecordingError(
                f"{quote_path(path)}: not empty and not a recording that can be read, so nothing in it is deleted; choose "
                f"another directory ({error})"
            ) from None
    if not overwrite:
        raise RecordingError(
            f"{quote_path(path)}: holds a recording already; choose another directory, or overwrite it (--overwrite, "
            "overwrite=True)"
        )
    old = [entry for entry in entries if _is_folder(entry) or _is_begun(entry)]
    if foreign := [each.name for entry in old for each in _foreign(entry)]:
        raise RecordingError(
            f"{quote_path(path)}: {quote(foreign[0])} is not part of a recording; move it, nothing was deleted"
        )
    return [entry for entry in entries if entry.name == MANIFEST_NAME] + old


def _foreign(entry: Path) -> Iterator[Path]:
    """The files in a folder of a recording that are not part of the recording."""
    for inside in entry.iterdir() if entry.is_dir() else ():
        file = inside.is_file() and not inside.is_symlink()
        if _is_folder(inside):
            yield from _foreign(inside)
        elif not file or not (inside.name in _FILES or _STEP.fullmatch(inside.name) or _is_begun(inside)):
            yield inside

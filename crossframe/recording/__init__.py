"""A run on disk, in canonical names: by step, rank, phase and use, whatever framework, layout and world size it had.

DIRECTORY/manifest.json              which run it is (`Manifest`)
DIRECTORY/rank00000/events.jsonl     what the rank saw, a line each (`crossframe.recording.lines`)
DIRECTORY/rank00000/step00000.safetensors   the tensors of a recorded step
DIRECTORY/twin00001/                 the same of a perturbed run of the run, if it has perturbed runs
(`crossframe.recording.twins`)
"""

from crossframe.recording.create import create_recording
from crossframe.recording.index import Batch
from crossframe.recording.manifest import Manifest
from crossframe.recording.reader import Recording
from crossframe.recording.schedule import Schedule
from crossframe.recording.sketch import WHOLE, Sketch
from crossframe.recording.writer import RecordingWriter

__all__ = [
    "WHOLE",
    "Batch",
    "Manifest",
    "Recording",
    "RecordingWriter",
    "Schedule",
    "Sketch",
    "create_recording",
]

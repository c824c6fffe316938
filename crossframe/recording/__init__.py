"""Recordings: a run on disk, by step, rank, phase and use, in names that do not depend on framework, layout and world size.

DIRECTORY/manifest.json                      describes the run (`Manifest`)
DIRECTORY/rank00000/events.jsonl             the events of a rank, one on each line (`crossframe.recording.event_format`)
DIRECTORY/rank00000/step00000.safetensors    the tensors of a recorded step
DIRECTORY/twin00001/                         the recording of a perturbed run (`crossframe.recording.perturbed_runs`)
"""

from crossframe.recording.batches import Batch
from crossframe.recording.create import create_recording
from crossframe.recording.manifest import Manifest
from crossframe.recording.reader import Recording, common_steps
from crossframe.recording.recorded_steps import Schedule
from crossframe.recording.silent_writer import SilentWriter
from crossframe.recording.sketch import WHOLE, Sketch
from crossframe.recording.writer import RecordingWriter

__all__ = [
    "WHOLE",
    "Batch",
    "Manifest",
    "Recording",
    "RecordingWriter",
    "Schedule",
    "SilentWriter",
    "Sketch",
    "common_steps",
    "create_recording",
]

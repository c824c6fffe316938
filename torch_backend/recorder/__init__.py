"""Recording training loops of torch: `Recorder`. What a recording is, and what is made of it, is in crossframe.recording."""

from torch_backend.recorder.recorder import Recorder

__all__ = ["Recorder"]

"""`Recorder`: records a training loop in torch. crossframe.recording defines recordings, crossframe.verdict compares them."""

from torch_backend.recorder._recorder import Recorder

__all__ = ["Recorder"]

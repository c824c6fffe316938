"""Monitors a training run: alarms from what its recording has so far, while it is being written.

`Monitor` is passed to a `Recorder`. `crossframe watch RUN` makes the same judgements in another process.
"""

from crossframe.monitoring.alarm import Alarm, Kind
from crossframe.monitoring.follow import Follower
from crossframe.monitoring.monitor import Monitor

__all__ = ["Alarm", "Follower", "Kind", "Monitor"]

"""Compares two configuration files key by key."""

from pathlib import Path

from crossframe.check.result import Check
from crossframe.environment import Environment, differences
from crossframe.environment.configuration import read_configuration
from crossframe.environment.facts import CONFIGURATION


def check_configurations(a: Path, b: Path) -> Check:
    """The keys whose values differ; formats may differ.

    Raises:
        UsageError: a file that cannot be read.
    """
    labels = (a.name, b.name) if a.name != b.name else (str(a), str(b))
    first, second = (Environment({CONFIGURATION: read_configuration(path)}) for path in (a, b))
    return Check(labels, differences(first, second))

"""Measures the CPU time of tests, and lists the slow ones in `slow.txt`: `pytest -p tests.cpu_time`.

`make test` leaves these out, and `make slow` runs them. Next to other programs tests take about as much CPU time as alone,
unlike time on the clock.
"""

import os
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("slow.txt")
SLOW = 0.75
"""Seconds of CPU time, with processes that a test starts or uses."""
_SECONDS = "CPU seconds"
_before: dict[str, float] = {}
_measured: dict[str, float] = {}


def seconds() -> float:
    """The CPU time of this process and its descendants, also of those that have ended and were waited for."""
    spent, children = {}, {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        spent[pid] = sum(map(int, fields[11:15]))
        children.setdefault(fields[1], []).append(pid)
    found, waiting = 0, [str(os.getpid())]
    while waiting:
        found += spent[pid := waiting.pop()]
        waiting += children.get(pid, [])
    return found / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    """Begin to measure."""
    _before[item.nodeid] = seconds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, object, object]:
    """Send what was measured to the process that writes the list."""
    if call.when == "teardown":
        item.user_properties.append((_SECONDS, seconds() - _before.pop(item.nodeid)))
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect what was measured."""
    if (spent := dict(report.user_properties).get(_SECONDS)) is not None:
        _measured[report.nodeid] = spent


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the list, in the process that has the reports of all others."""
    if not hasattr(session.config, "workerinput"):
        listed = updated(LIST.read_text().splitlines(), _measured, session.config.rootpath)
        LIST.write_text("".join(f"{each}\n" for each in listed))


def updated(listed: Iterable[str], measured: Mapping[str, float], root: Path) -> list[str]:
    """The list after a run: that of the files whose tests ran is new, and that of the other ones remains.

    Args:
        listed: the list before.
        measured: seconds of CPU time by test.
        root: the folder of all tests' paths.
    """
    ran = {_file(test) for test in measured}
    kept = (test for test in listed if _file(test) not in ran and (root / _file(test)).is_file())
    return sorted({*kept, *(test for test, spent in measured.items() if spent > SLOW)})


def _file(test: str) -> str:
    return test.partition("::")[0]

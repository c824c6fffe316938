"""The list of slow tests, and how it is made."""

import ast
import os
import subprocess
import sys
import time

from tests.cpu_time import LIST, SLOW, seconds, updated

ROOT = LIST.parent.parent
LISTED = LIST.read_text().splitlines()


def test_every_listed_test_exists():
    functions: dict[str, set[str]] = {}
    for path in {each.partition("::")[0] for each in LISTED}:
        file = ROOT / path
        nodes = ast.walk(ast.parse(file.read_text())) if path.endswith(".py") and file.exists() else ()
        functions[path] = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    pairs = ((each, each.partition("[")[0].split("::")) for each in LISTED)
    lost = [each for each, (path, *names) in pairs if not set(names) <= functions[path]]
    assert not lost, f"make slow-list writes the list again; these tests are gone: {lost}"


def test_the_time_of_descendants_counts_and_that_of_waiting_does_not():
    work = "import time\nwhile time.process_time() < 0.3: pass"
    before = seconds()
    subprocess.run([sys.executable, "-c", work], check=True)
    after = seconds()
    time.sleep(0.2)
    rounding = 4 / os.sysconf("SC_CLK_TCK")  # a process has four numbers of whole ticks
    assert after - before >= 0.3 - rounding and seconds() - after < 0.2


def test_a_run_replaces_what_is_listed_of_its_files_alone(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.py").touch()
    measured = {"a.py::x": SLOW + 0.1, "a.py::y": SLOW - 0.1, "c.py::z": 0.0}
    listed = ["a.py::y", "b.py::x[1]", "c.py::z", "gone.py::x"]
    assert updated(listed, measured, tmp_path) == ["a.py::x", "b.py::x[1]"]

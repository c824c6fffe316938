"""The mutation command itself: which faults it makes, and that it tells those seen from those not seen."""

import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.mutate.operators import MODULE, mutants_of
from tests.mutate.probes import ALONE, PROBES, with_probes
from tests.mutate.suite import COPIED, QUICK, SLOW

ROOT = Path(__file__).parents[2]


def edits(source: str) -> set[str]:
    text = source.encode()
    return {mutant.apply(text).decode() for mutant in mutants_of("x.py", text)}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a <= b", {"x = (a < b)", "x = (a > b)"}),
        ("x = a not in b", {"x = (a in b)"}),
        ("x = a + b", {"x = (a - b)"}),
        ("x = a and b", {"x = (a or b)", "x = a", "x = b"}),
        ("x = not a", {"x = a"}),
        ("x = a if b else c", {"x = (a if not b else c)"}),
        ("x = 3", {"x = 2", "x = 4"}),
        ("x = True", {"x = False"}),
        ("x = 'kind'", {"x = 'kind!'"}),
        ("f(a, b, key=c)", {"f(b, a, key=c)", "f(a, b)", "pass"}),
        ("x = max(a)", {"x = min(a)"}),
        ("x = a[b:c]", {"x = a[:c]", "x = a[b:]"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if (not c)]"}),
        ("def f():\n    return a", {"def f():\n    return None"}),
        ("def f():\n    return False", {"def f():\n    return True"}),
        ("def f():\n    return ''", {"def f():\n    return '!'"}),
        ("if a:\n    raise b", {"if not a:\n    raise b", "if a:\n    pass"}),
        ("for a in b:\n    continue", {"for a in b:\n    break", "for a in b:\n    pass"}),
        ("a.b = c", {"pass"}),
        ("a = f(a)", {"pass"}),
    ],
)
def test_each_kind_of_fault(source, expected):
    assert edits(source) == {text for text in expected if text in edits(source)} >= expected - {"x = a", "x = b"}
    assert {text.replace("(", "").replace(")", "") for text in edits(source)} == {
        text.replace("(", "").replace(")", "") for text in expected
    }


@pytest.mark.parametrize(
    "source",
    [
        "'''A docstring of 3.'''",
        "import a",
        "if TYPE_CHECKING:\n    import a",
        "assert a < 3",
        "x: tuple[3] = a",
        "@f(frozen=3)\ndef g(a: 3) -> 4: ...",
        "x = f'{a + 3}'",
        "x = 'a message of some words'",
        "x = zip(a, strict=c)",
        "x = f(a.b, a.b)",
        "x = distance(a, b)",
        "x = math.hypot(a, b)",
        "x = a.reshape(-1)",
        "__all__ = ['a']",
        "T = TypeVar('T', str, int)",
        "class A(Protocol):\n    x = 3",
    ],
)
def test_what_no_test_should_see_is_left_alone(source):
    assert edits(source) == set()


def test_every_fault_of_the_core_compiles_and_changes_its_source():
    sources = {path: path.read_bytes() for path in sorted((ROOT / "crossframe").rglob("*.py"))}
    every = [(mutant, source) for path, source in sources.items() for mutant in mutants_of(str(path), source)]
    assert len(every) > 1000
    for mutant, source in random.Random(1).sample(every, 40):
        compile(mutant.apply(source), mutant.path, "exec")
        assert mutant.diff(source), mutant


def test_a_fault_knows_its_function_and_its_line():
    source = b"x = 1\n\n\n@d\ndef f():\n    return [a\n        for a in b if a < 2]\n"
    places = {(mutant.what, mutant.line, mutant.function) for mutant in mutants_of("x.py", source)}
    assert ("constant", 1, MODULE) in places and ("return None", 6, 4) in places and ("comparison", 7, 4) in places


def test_probes_of_the_core_compile():
    functions = []
    for path in sorted((ROOT / "crossframe").rglob("*.py"))[::8]:
        compile(with_probes(str(path), path.read_bytes(), functions), path, "exec")
    assert len(functions) > 100


@pytest.mark.exhaustive
def test_a_seen_fault_is_told_from_an_unseen_one_and_from_one_that_never_ends(tmp_path):
    for folder in (*(name for name in COPIED if "." not in name), *QUICK, *SLOW, "tests/mutate"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "__init__.py").touch()
    for name in ("notes.py", "probes.py"):
        (tmp_path / "tests/mutate" / name).write_text((ROOT / "tests/mutate" / name).read_text())
    (tmp_path / "README.md").touch()
    (tmp_path / "crossframe/pytest_plugin.py").touch()
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--doctest-modules'\n")
    (tmp_path / "crossframe/parts.py").write_text(
        'def f(a):\n    """\n    >>> f(2)\n    True\n    """\n    while a:\n        a -= 1\n    return a == 0\n'
    )
    (tmp_path / "crossframe/child.py").write_text("import sys\n\n\ndef g():\n    sys.exit(3)\n\n\ng()\n")
    (tmp_path / "tests/core/test_parts.py").write_text(
        "from crossframe.parts import f\n\n\ndef test_f():\n    assert f(4)\n"
    )
    (tmp_path / "tests/core/test_child.py").write_text(
        "import subprocess, sys\n\n\ndef test_a_process():\n"
        "    assert subprocess.run([sys.executable, '-m', 'crossframe.child']).returncode == 3\n"
    )
    (tmp_path / "crossframe/apart.py").write_text("import sys\n\n\ndef h():\n    sys.exit(4)\n\n\nh()\n")
    (tmp_path / "tests/across/test_commands.py").write_text(
        "import subprocess, sys\n\n\ndef test_a_command():\n"
        "    assert subprocess.run([sys.executable, '-m', 'crossframe.apart']).returncode == 4\n"
    )
    code = (
        "import sys; from pathlib import Path; from tests.mutate import suite; from tests.mutate.__main__ import main; "
        "suite.LEAST_SECONDS = 1.0; "  # its tests take milliseconds
        f"sys.argv = ['mutate', '--sample', '99']; sys.exit(main(Path({str(tmp_path)!r})))"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1, ended.stderr
    assert "crossframe/parts.py:7  constant, survived\n    -        a -= 1\n    +        a -= 2\n" in ended.stdout
    # Seen: nothing comes back; the loop never ends, as it subtracts nothing or is not left.
    assert "return None" not in ended.stdout and "a -= 0" not in ended.stdout
    assert "seen by tests/across/test_commands.py::test_a_command" in ended.stdout
    counts = ended.stdout[ended.stdout.index("\nall") :].split()[1:4]
    core, apart = (
        sum(len(edits((tmp_path / "crossframe" / name).read_text())) for name in names)
        for names in (("parts.py", "child.py"), ("apart.py",))
    )
    assert list(map(int, counts)) == [core - 1, apart, 1]


def test_functions_note_that_they_run():
    source = (
        b"def f(a):\n    '''A docstring.'''\n    @g\n    def inner():\n        return a\n    return inner\n\n\n"
        b"def g(a): return a\n\n\nclass C:\n    @property\n    def h(self):\n        return 1\n\n\ndef i():\n    '''Nothing.'''\n"
    )
    functions, hits = [], []
    names = {"__import__": lambda _: SimpleNamespace(_probe=SimpleNamespace(hit=hits.append))}
    exec(with_probes("x.py", source, functions), names)
    assert not hits and names["f"].__doc__ == "A docstring."

    def executed(call):
        hits.clear()
        return call(), [functions[number] for number in hits]

    assert executed(names["f"](3)) == (3, ["x.py:f.inner"])
    assert executed(lambda: names["f"](3)())[1] == ["x.py:f", "x.py:g", "x.py:f.inner"]
    assert executed(lambda: names["C"]().h) == (1, ["x.py:C.h"])
    assert executed(names["i"]) == (None, ["x.py:i"])
    hits.clear()
    exec(with_probes("y.py", b"A = 1", functions), names)
    assert [functions[number] for number in hits] == ["y.py:"]


def test_a_script_that_finds_the_packages_notes_that_it_runs_without_them(tmp_path, monkeypatch):
    functions, names = ["x.py:f"], {}
    exec(with_probes(ALONE, b"def g():\n    return 3\n", functions), names)
    assert names["g"]() == 3 and functions[1:] == [f"{ALONE}:g"]
    monkeypatch.setenv(PROBES, str(tmp_path))
    assert (names["g"](), names["g"](), [path.name for path in tmp_path.iterdir()]) == (3, 3, ["1"])

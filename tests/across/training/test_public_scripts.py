"""Scripts of public repositories: how they are prepared, and how answers are judged."""

import subprocess

import pytest

from crossframe.errors import UsageError
from experiments.public_scripts import run as subject
from experiments.public_scripts.run import Mistake, Script, Work, judge, scripts_of, table_of


@pytest.mark.parametrize("name", subject.SETS)
def test_cases_are_complete(name):
    scripts = scripts_of(name)
    assert len({script.name for script in scripts}) == len(scripts)
    assert all(len(script.commit) == 40 and script.repository.count("/") == 1 for script in scripts)
    assert all(script.steps for script in scripts if script.mistake)


@pytest.fixture
def clone(tmp_path):
    """A repository whose script imports from its root and reads data beside it."""
    folder = tmp_path / "clones" / "owner+name"
    (folder / "package").mkdir(parents=True)
    (folder / "scripts").mkdir()
    (folder / "package" / "of_the_root.py").write_text("WORD = 'here'\n")
    (folder / "scripts" / "train.py").write_text(
        "import sys\nfrom package.of_the_root import WORD\nprint(WORD, open('data.txt').read(), sys.argv[1:], 'loss: 1.5')\n"
    )
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", "-C", folder, *command], check=True)
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", folder, *who, "commit", "--quiet", "--message", "one"], check=True)
    return subprocess.run(
        ["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_script_runs_where_it_lies_with_its_data_and_replacements(tmp_path, clone):
    script = Script(
        "one", "owner/name", clone, "scripts/train.py", take=("scripts", "package"), root=".", options="--a 1",
        before="open('data.txt', 'w').write('data')", replace=(("package/of_the_root.py", "here", "there"),),
    )  # fmt: skip
    work = Work(script, tmp_path / "clones", tmp_path, tmp_path / "work")
    assert work.run("plain", script.replace) == (0, "there data ['--a', '1'] loss: 1.5\n")
    with pytest.raises(UsageError, match=r"one: expected a text of train.py to replace, got 'absent'"):
        work.run("edited", [("absent", "")])
    with pytest.raises(UsageError, match=r"expected a clone at .*git clone https://github.com/owner/other"):
        Work(Script("two", "owner/other", clone, "a.py"), tmp_path, tmp_path, tmp_path).run("plain", ())


class _Said(Work):
    """Answers instead of runs."""

    def __init__(self, script, runs, verdicts, folder):
        super().__init__(script, folder, folder, folder)
        self._runs, self._verdicts = iter(runs), iter(verdicts)

    def run(self, name, replace, *, recorded=False):
        return next(self._runs)

    def compare(self, a, b):
        return next(self._verdicts)


@pytest.mark.parametrize(
    ("steps", "runs", "verdicts", "wrong"),
    [
        (2, [(0, "loss 1"), (0, "loss 1"), (0, ""), (0, "")], ["equal", "bug"], []),
        (3, [(0, "loss 1"), (0, "loss 2"), (0, ""), (0, "")], ["rounding", "rounding"], [
            "recorded, 2 steps instead of recorded, 3 steps", "the script prints other losses than without recording",
            "the same run again is rounding, ", "the mistake is rounding, "]),
        (2, [(1, "")], [], ["the script itself ends with 1"]),
        (2, [(0, ""), (2, "crossframe: not recorded: Recorder")], [], ["refused instead of recorded, 2 steps"]),
        (0, [(0, ""), (2, "crossframe: not recorded: Recorder")], [], []),
        (0, [(0, ""), (1, "Traceback")], [], ["crashed instead of refused"]),
    ],
)  # fmt: skip
def test_answers_are_judged(tmp_path, monkeypatch, steps, runs, verdicts, wrong):
    monkeypatch.setattr(subject.Recording, "open", lambda path: type("Found", (), {"num_steps": 2}))
    mistake = Mistake("wrong", (), 1, ("reduce/*",)) if steps else None
    script = Script("one", "owner/name", "", "a.py", steps=steps, mistake=mistake)
    where = {"phase": "reduce", "event": "reduce", "step": 1, "parameter": "w"}
    said = [{"verdict": each, **({"first_divergence": where} if each == "bug" else {})} for each in verdicts]
    found = judge(_Said(script, runs, said, tmp_path))
    assert found["wrong"] == wrong
    row = {"case": "one", "expected": script.expected, **found, "first": found}
    assert ("(wrong)" in table_of([row])) is bool(wrong)

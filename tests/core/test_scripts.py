"""Running a script under a recorder: its exit status, its arguments, and what the recorder is told of its end."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from crossframe.errors import UsageError
from crossframe.operators import SourceLine
from crossframe.operators.source import line_of
from crossframe.scripts import NOT_RECORDED, main, run_script


class Recorder:
    """Notes the order of calls; `refuses` at a successful end, as without training."""

    def __init__(self, refuses=False):
        self.refuses, self.notes = refuses, []

    @contextmanager
    def watching(self):
        self.notes.append("watching")
        try:
            yield
        finally:
            self.notes.append("watched")

    def finish(self, error=None):
        self.notes.append(error)
        if self.refuses and error is None:
            raise UsageError("nothing was trained")


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text):
        (tmp_path / "beside.py").write_text("value = 7\n")
        (tmp_path / "train.py").write_text(text)
        return str(tmp_path / "train.py")

    yield write
    sys.modules.pop("beside", None)


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(0)"])
def test_a_script_runs_as_main_with_its_arguments_and_its_folder(script, end):
    recorder = Recorder()
    text = "import sys, beside\nassert __name__ == '__main__' and sys.argv[1:] == ['--lr', '1'] and beside.value == 7\n"
    path = script(text + end)
    assert run_script(recorder, [path, "--lr", "1"]) == 0
    assert recorder.notes == ["watching", "watched", None] and sys.argv[0] == path


def test_lines_of_a_script_state_its_path_as_given(script, tmp_path, monkeypatch):
    path = script("x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert run_script(Recorder(), ["train.py"]) == 0
    assert line_of(path, 1, "<module>") == SourceLine("train.py", 1, "<module>", "x = 1")


def test_a_script_that_fails_ends_as_it_would_alone(script):
    recorder = Recorder()
    with pytest.raises(SystemExit) as ended:
        run_script(recorder, [script("raise SystemExit(3)")])
    assert ended.value.code == 3 and recorder.notes == ["watching", "watched", ended.value]
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError) as failed:
        run_script(recorder, [script("1 / 0")])
    assert recorder.notes == ["watching", "watched", failed.value]


def test_a_script_that_trains_nothing_is_not_recorded(script, capsys):
    recorder = Recorder(refuses=True)
    assert run_script(recorder, [script("")]) == NOT_RECORDED == 3
    assert isinstance(recorder.notes[-1], UsageError)
    assert capsys.readouterr().err.endswith("crossframe: not recorded: nothing was trained\n")


def test_options_are_json_and_windows_are_pairs(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["child", '{"windows": [[2, 5]], "detail": "full"}', "train.py", "--lr", "1"])
    assert main(lambda *arguments, **options: (arguments, options)) == (
        (["train.py", "--lr", "1"],),
        {"windows": [(2, 5)], "detail": "full"},
    )


def test_an_interrupted_script_ends_by_the_signal(monkeypatch):
    sent = []
    monkeypatch.setattr(sys, "argv", ["child", '{"windows": []}', "train.py"])
    monkeypatch.setattr(signal, "signal", lambda *what: sent.append(what))
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))

    def interrupted(*_, **options):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        main(interrupted)
    assert sent == [(signal.SIGINT, signal.SIG_DFL), (os.getpid(), signal.SIGINT)]


# A process that records a script with a recorder of nothing.
PROGRAM = """
import sys
from contextlib import ExitStack, contextmanager
from crossframe.operators import SourceLine
from crossframe.operators.source import line_of
from crossframe.scripts import main, run_script

class Recorder:
    @contextmanager
    def watching(self):
        with ExitStack() as stack:
            stack.callback(len, "")
            yield

    def finish(self, error=None):
        pass

sys.exit(main(lambda words, **options: run_script(Recorder(), words)))
"""
ENDS = {
    "plain": "def f(x):\n    return 1 / x\n\nf(0)\n",
    "syntax": "x = 1\ndef f(:\n    pass\n",
    "indentation": "if True:\nx = 1\n",
    "syntax of an import": "import wrong\n",
    "encoding": "# coding: latin-1\nraise ValueError('\xe9')\n",
    "cause": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('b') from error\n",
    "context": "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('b')\n",
    "group": "raise ExceptionGroup('both', [ValueError(1), TypeError(2)])\n",
    "another folder": "import os\nos.chdir('/')\nwarnings = __import__('warnings')\nwarnings.warn('w')\nraise ValueError\n",
    "own hook": "import sys\nsys.excepthook = lambda *error: print(error[1].__traceback__.tb_lineno, file=sys.stderr)\n1 / 0\n",
    "as given": "import sys\nraise ValueError(sys.argv, __file__, __spec__, __package__, __name__, __doc__)\n",
    "no status": "raise SystemExit\n",
    "status": "raise SystemExit(5)\n",
    "message": "import sys\nsys.exit('wrong')\n",
}


def ends_of(folder):
    """The ends of train.py by itself and recorded."""
    python = [sys.executable, "-B"]
    return (
        subprocess.run([*python, *rest], cwd=folder, capture_output=True, text=True, check=False)
        for rest in (["train.py", "--lr"], ["-P", "-c", PROGRAM, '{"windows": []}', "train.py", "--lr"])
    )


@pytest.mark.parametrize("name", ENDS)
def test_a_script_that_ends_prints_what_it_prints_alone(tmp_path, name):
    (tmp_path / "train.py").write_text(ENDS[name], encoding="latin-1")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    alone, recorded = ends_of(tmp_path)
    assert (recorded.returncode, recorded.stderr) == (alone.returncode, alone.stderr)


def test_an_error_of_crossframe_is_printed_from_the_script_on(tmp_path):
    (tmp_path / "train.py").write_text("from crossframe.errors import UsageError\nraise UsageError('no')\n")
    alone, recorded = ends_of(tmp_path)
    assert recorded.returncode == NOT_RECORDED
    assert recorded.stderr == alone.stderr + "crossframe: not recorded: no\n"


def test_an_interrupted_script_loses_nothing_that_it_wrote(tmp_path):
    text = (
        "import os, signal\nfile = open('log', 'w')\nfile.write('a')\nprint('b')\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    (tmp_path / "train.py").write_text(text)
    command = [sys.executable, "-P", "-c", PROGRAM, '{"windows": []}', "train.py"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=buffered)
    assert ended.returncode == -signal.SIGINT
    assert (ended.stdout, (tmp_path / "log").read_text()) == ("b\n", "a")

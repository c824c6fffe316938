"""Running a script under a recorder: its exit status, its arguments, and what the recorder is told of its end."""

import os
import signal
import sys
from contextlib import contextmanager

import pytest

from crossframe.errors import UsageError
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
    assert run_script(recorder, path, ["--lr", "1"]) == 0
    assert recorder.notes == ["watching", "watched", None] and sys.argv[0] == path


def test_a_script_that_fails_ends_as_it_would_alone(script):
    recorder = Recorder()
    with pytest.raises(SystemExit) as ended:
        run_script(recorder, script("raise SystemExit(3)"), [])
    assert ended.value.code == 3 and recorder.notes == ["watching", "watched", ended.value]
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError) as failed:
        run_script(recorder, script("1 / 0"), [])
    assert recorder.notes == ["watching", "watched", failed.value]


def test_a_script_that_trains_nothing_is_not_recorded(script, capsys):
    recorder = Recorder(refuses=True)
    assert run_script(recorder, script(""), []) == NOT_RECORDED == 3
    assert isinstance(recorder.notes[-1], UsageError)
    assert capsys.readouterr().err.endswith("crossframe: not recorded: nothing was trained\n")


def test_options_are_json_and_windows_are_pairs(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["child", '{"windows": [[2, 5]], "detail": "full"}', "train.py", "--lr", "1"])
    assert main(lambda *arguments, **options: (arguments, options)) == (
        ("train.py", ["--lr", "1"]),
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

"""The lessons: what stands in them is what their code gives, and together they explain every rule."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from crossframe.errors import UsageError
from experiments.spec.rules import TITLES
from experiments.teach import refused
from experiments.teach.run import FOLDER, LESSONS, PICTURES, run
from tests.commands import status_of

ROOT = Path(__file__).parents[3]
TICKS = "```"


def teach(*arguments: object, without: tuple[str, ...] = (), seed: str = "0") -> subprocess.CompletedProcess[str]:
    """`python -m experiments teach` in an interpreter of its own, as if some modules were not installed."""
    code = f"""
import runpy, sys
sys.modules |= dict.fromkeys({without!r})
sys.argv = ["experiments", "teach", *{[str(each) for each in arguments]!r}]
runpy.run_module("experiments", run_name="__main__", alter_sys=False)
"""
    environment = os.environ | {"PYTHONHASHSEED": seed, "TZ": "Asia/Kolkata", "COLUMNS": "40"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)


def written(folder: Path, *parts: str) -> Path:
    """A lesson of these parts; "code:" marks code and "text:" its output."""
    fences = {"code:": "python", "text:": "text"}
    lesson = folder / "lesson.md"
    lesson.write_text(
        "\n\n".join(f"{TICKS}{fences[part[:5]]}\n{part[5:]}\n{TICKS}" if part[:5] in fences else part for part in parts)
        + "\n"
    )
    return lesson


# The longest starts both frameworks.
SHORT_AND_LONG = [pytest.param(n, marks=[pytest.mark.exhaustive] * (n == "two_frameworks.md")) for n in LESSONS]


@pytest.mark.parametrize("name", SHORT_AND_LONG)
def test_a_lesson_and_its_pictures_are_what_its_code_gives(name):
    # In another hash seed, time zone and terminal than those that it was written in: nothing hangs on them.
    result = teach(FOLDER / name, seed=str(1 + LESSONS.index(name)))
    assert (result.returncode, result.stdout) == (0, f"{name}: unchanged\n"), result.stdout + result.stderr


def test_every_lesson_of_the_folder_is_listed_and_every_picture_is_of_a_lesson():
    assert sorted(LESSONS) == sorted(path.name for path in FOLDER.glob("*.md"))
    shown = {name for lesson in LESSONS for name in re.findall(r"!\[[^]]{20,}]\(pictures/([^)]+)\)", read(lesson))}
    assert shown == {path.name for path in (FOLDER / PICTURES).iterdir()}
    for lesson in LESSONS:
        assert "![" in read(lesson), f"{lesson} shows no picture"


def test_a_lesson_is_known_by_its_name_and_another_name_lists_them(tmp_path, capsys):
    assert teach(LESSONS[0]).stdout == f"{LESSONS[0]}: unchanged\n"
    for wrong in ("flat.md", tmp_path / LESSONS[0], tmp_path):
        assert status_of("teach", wrong) == 2
        said = f"crossframe: no lesson {str(wrong)!r}: expected a file, or one of {', '.join(LESSONS)}\n"
        assert capsys.readouterr() == ("", said)


def test_the_core_s_part_of_every_lesson_stands_without_torch_and_jax():
    result = teach(without=("torch", "jax", "flax", "optax"))
    assert result.returncode == 0, result.stdout + result.stderr
    both = "two_frameworks.md"
    expected = [f"{name}: unchanged{', without jax, torch' * (name == both)}" for name in LESSONS]
    assert result.stdout.splitlines() == expected


def test_every_rule_is_explained_in_a_sentence_of_some_lesson():
    explained = {}
    for lesson in LESSONS:
        _, _, listed = read(lesson).partition("## The rules of this lesson\n")
        for rule, sentence in re.findall(r"^- (R\d\d): ((?:.|\n  )+)$", listed, re.MULTILINE):
            assert sentence.endswith(".") and len(sentence.split()) >= 8, (lesson, rule, sentence)
            explained.setdefault(rule, []).append(lesson)
    assert explained.keys() == TITLES.keys()


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_ends_with_three_questions_and_hidden_answers(lesson):
    _, _, end = read(lesson).partition("## Questions\n")
    questions, _, answers = end.partition("<details><summary>Answers</summary>")
    assert re.findall(r"^(\d)\. ", questions, re.MULTILINE) == ["1", "2", "3"]
    hidden, closed, _ = answers.partition("</details>")
    assert closed and all(f"{number}: " in hidden for number in (1, 2, 3))


def test_a_wrong_output_is_found_and_put_right(tmp_path):
    lesson = written(tmp_path, "A sum.", "code:print(2 + 2)", "text:5", "The end.")
    assert [line for line in run(lesson).differences() if line[0] in "+-"][2:] == ["-5", "+4"]
    result = teach(lesson)
    assert result.returncode == 1 and "\n-5\n+4\n" in result.stdout and result.stdout.endswith("lesson.md: differs\n")
    assert teach("--update", lesson).stdout == "lesson.md: updated\n"
    assert lesson.read_text() == written(tmp_path, "A sum.", "code:print(2 + 2)", "text:4", "The end.").read_text()
    assert teach(lesson).returncode == 0


@pytest.mark.parametrize(
    ("parts", "right"),
    [
        (("code:print('a ')", "text:a"), ("code:print('a ')", "text:a ")),
        (("code:print('a')", "After it."), ("code:print('a')", "text:a", "After it.")),
        (("code:x = 1", "text:1", "After it."), None),
        (("code:x = 1", "code:print(x)", "text:2"), ("code:x = 1", "code:print(x)", "text:1")),
        (("code:print('a', end='')", "text:b"), ("code:print('a', end='')", "text:a")),
    ],
)
def test_outputs_are_compared_to_the_last_space_and_none_may_be_missing_or_left_over(tmp_path, parts, right):
    lesson = run(written(tmp_path, *parts))
    assert lesson.differences()
    if right is None:
        assert "1\n```" not in lesson.text.partition("Behind")[0].partition("x = 1\n```")[2]
    else:
        assert lesson.text == written(tmp_path, *right).read_text()


def test_a_picture_that_differs_or_is_missing_is_found(tmp_path):
    draw = "code:from pathlib import Path\n_ = Path('pictures/a.svg').write_text('<svg/>')"
    assert run(written(tmp_path, draw)).differences() == ["lesson.md: pictures/a.svg is drawn and not stored"]
    run(written(tmp_path, draw)).write()
    assert run(written(tmp_path, draw)).differences() == []
    (tmp_path / PICTURES / "a.svg").write_text("<svg/>\n")
    assert run(written(tmp_path, draw)).differences() == ["lesson.md: pictures/a.svg is not what is drawn"]


def test_code_that_raises_is_reported_with_its_line(tmp_path):
    lesson = written(tmp_path, "Text.", "code:def f():\n    return 1 / 0", "code:\nf()")
    with pytest.raises(UsageError, match=r"^lesson.md, line 5: ZeroDivisionError: division by zero$"):
        run(lesson)
    with pytest.raises(UsageError, match=r"^lesson.md, line 4: SyntaxError: "):
        run(written(tmp_path, "Text.", "code:def f(:"))
    assert teach(lesson).returncode == 2 and teach(tmp_path / "none.md").returncode == 2


@pytest.mark.exhaustive
def test_a_torch_rank_that_raises_ends_the_lesson_and_is_named(tmp_path):
    code = "code:from experiments.teach.ranks import on_ranks\non_ranks(2, lambda rank: 1 // rank)"
    result = teach(written(tmp_path, code))
    assert result.returncode == 2 and "line 3: UsageError: torch ranks [0] ended without a result" in result.stderr


def test_refused_wants_a_refusal():
    with pytest.raises(UsageError, match="none was raised"), refused():
        pass
    with pytest.raises(ZeroDivisionError), refused():
        _ = 1 / 0


def read(lesson: str) -> str:
    return (FOLDER / lesson).read_text(encoding="utf-8")

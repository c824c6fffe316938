"""The clients are whole, and their results keep the first answer of each case."""

import ast

import pytest

from crossframe.errors import UsageError
from crossframe.verdict.diagnosis import SIGNATURES
from experiments.clients.run import _edited, _said, clients_of, summary_of, table_of
from experiments.results import with_first_answers
from experiments.untouched.cases import UNNAMED

VERDICTS = {"equal", "rounding", "different computation", "incomparable", "inconclusive", "bug"}


def test_clients_are_whole():
    clients = clients_of()
    assert len(clients) >= 5
    for client in clients:
        assert client.script.is_file(), client.name
        assert client.pairs, client.name
        wanted = {verdict for pair in client.pairs for verdict in pair.expected} | set(client.fault.verdicts)
        assert wanted <= VERDICTS, client.name
        assert client.fault.diagnosis in (*SIGNATURES, UNNAMED), client.name
        options = _options(client.script.read_text())
        for run in (client.right, client.wrong, *(run for pair in client.pairs for run in (pair.a, pair.b))):
            assert {each for each in run.options.split() if each.startswith("--")} <= options, (client.name, run)
            script = client.script.read_text()
            assert all(script.count(old) == 1 for old, _ in run.edits), (client.name, run)


def _options(script):
    """The options that a script takes."""
    calls = [node for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Call)]
    texts = [each.value for call in calls for each in call.args if isinstance(each, ast.Constant)]
    return {text for text in texts if isinstance(text, str) and text.startswith("--")}


def test_a_client_that_does_not_exist_raises():
    with pytest.raises(UsageError, match=r"expected names of \[.*'torchtitan'"):
        clients_of(["nobody"])


def test_edits_are_made_in_a_copy(tmp_path):
    script = tmp_path / "one" / "train.py"
    script.parent.mkdir()
    script.write_text("a = 1\nb = 1\n")
    script.with_name("data.py").write_text("x = 1\n")
    copy = _edited(script, [("a = 1", "a = 2")], tmp_path / "copy")
    assert copy.read_text() == "a = 2\nb = 1\n" != script.read_text()
    assert copy.with_name("data.py").is_file()
    assert _edited(script, [], tmp_path / "none") == script
    with pytest.raises(UsageError, match="has ' = 1' 2 times"):
        _edited(script, [(" = 1", " = 2")], tmp_path / "twice")


def test_pinned_packages_are_those_of_the_release():
    for client in clients_of():
        if client.requirements is not None:
            pinned = client.requirements.read_text().splitlines()
            for release in client.release.split(", "):
                name, _, version = release.rpartition(" ")
                assert f"{name}=={version}" in pinned


def test_answers_have_no_paths_of_a_machine():
    lines = (
        'File "/home/me/.venv/lib/python3.11/site-packages/torch/x.py", line 1',
        'File "/tmp/cache/ode-20cdc1e2a35c/ode/y.py"',
        "of binary: /home/me/.venv/bin/python in .venv/lib/site-packages/z.py",
    )
    assert _said({"verdict": "failed", "reason": "\n".join(lines)})["reason"].splitlines() == [
        'File "site-packages/torch/x.py", line 1',
        'File "ode-20cdc1e2a35c/ode/y.py"',
        "of binary: bin/python in .venv/lib/site-packages/z.py",
    ]


def test_the_first_answer_is_kept_next_to_later_ones():
    def results(verdict, right, expected="rounding"):
        said = {"verdict": verdict, "place": "", "reason": f"why {verdict}", "quantities": 7}
        said |= {"max_relative_parameter_difference": 2e-8}
        case = {"case": "`a` on 2, `b` on 1", "expected": expected, "said": said, "right": right, "false_alarm": False}
        return {"client": "one", "what": "a trainer", "release": "one 1.0", "cases": [case]}

    first = with_first_answers(results("bug", False), {})
    assert "| one: one 1.0 | `a` on 2, `b` on 1 | rounding | bug | bug | no |" in table_of([first])
    second = with_first_answers(results("rounding", True), first)
    third = with_first_answers(results("equal", True, "equal"), second)
    row = "| one: one 1.0 | `a` on 2, `b` on 1 | equal (was rounding) | bug | equal, 7 quantities | yes |"
    assert row in table_of([third])
    assert "| rounding | bug | rounding, parameters differ by 2e-08 | yes |" in table_of([second])
    assert "why" not in table_of([third])


def test_a_summary_counts_pairs_and_the_mistake():
    def case(text, verdict, **more):
        return {"case": text, "said": {"verdict": verdict}, "right": verdict != "bug", **more}

    cases = [
        case("`--fsdp torch` on 2, `--fsdp crossframe` on 2", "equal", false_alarm=False),
        case("`--fsdp torch` on 2, `--fsdp none` on 2", "equal", false_alarm=False),
        case("`--fsdp crossframe` on 2, `--fsdp none` on 1", "bug", false_alarm=True),
        case("a mistake", "bug", found=True, located=False),
    ]
    assert "| one: one 1.0 | 3 | 2 | 2 | 1 of 2 | 1 | found |" in summary_of(
        [{"client": "one", "release": "one 1.0", "cases": cases}]
    )

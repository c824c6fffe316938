"""docs/rules.md: a section for each rule, with an example that runs, and with functions and tests that exist."""

import ast
import doctest
import functools
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.cli.commands import app
from experiments.spec.rules import DOCUMENT, SECTIONS, TITLES

ROOT = Path(__file__).parents[2]
ALL = [f"R{number:02}" for number in range(1, 40)]
LABELS = ["Rule.", "Why.", "Example.", "Decided by", "Proved by"]
PACKAGES = ("crossframe", "torch_backend", "jax_backend")
FOLDERS = (*PACKAGES, "docs", "experiments", "tests")
UNTOUCHED = ROOT / "experiments" / "untouched"
CITED = re.compile(r"(?<![A-Za-z0-9])R\d{2,}(?![A-Za-z0-9])")
EXAMPLE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@functools.cache
def definitions(path):
    """The dotted names of the functions and classes that a source defines."""

    def names(body, prefix=""):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield prefix + node.name
                yield from names(node.body, f"{prefix}{node.name}.") if isinstance(node, ast.ClassDef) else ()

    return frozenset(names(ast.parse(path.read_text()).body)) if path.is_file() else frozenset()


def is_defined(dotted):
    """Whether a dotted path is a function or class of the module that defines it."""
    parts = dotted.split(".")
    return any(
        ".".join(parts[stop:]) in definitions(ROOT.joinpath(*parts[:stop]).with_suffix(".py"))
        for stop in range(1, len(parts))
    )


def named(section, label):
    """What a section lists in code style after a label."""
    listed = re.findall(r"`([^`]+)`", section.partition(f"**{label}**")[2].partition("\n\n")[0])
    assert listed, label
    return listed


def is_in_suite(name):
    """Whether `path::function` is a test of the suite."""
    path, _, function = name.partition("::")
    return path.startswith("tests/") and function.startswith("test_") and function in definitions(ROOT / path)


def test_each_rule_has_one_section():
    assert re.findall(r"^## (.{3}): \S", DOCUMENT.read_text(), re.MULTILINE) == ALL
    assert list(TITLES) == ALL and all(TITLES.values())


@pytest.mark.parametrize("rule", ALL)
def test_section_has_all_labels(rule):
    assert re.findall(r"^\*\*(.+?)\*\*", SECTIONS[rule], re.MULTILINE) == LABELS


@pytest.mark.parametrize("rule", ALL)
def test_examples_run(rule):
    examples = EXAMPLE.findall(SECTIONS[rule])
    assert examples
    runner = doctest.DocTestRunner(verbose=False)
    for example in examples:
        test = doctest.DocTestParser().get_doctest(example, {}, rule, str(DOCUMENT), 0)
        assert test.examples and not runner.run(test).failed


@pytest.mark.parametrize("rule", ALL)
def test_deciding_functions_exist(rule):
    # Read from the sources, since this folder runs without torch and JAX.
    functions = named(SECTIONS[rule], "Decided by")
    assert [name for name in functions if name.partition(".")[0] not in PACKAGES or not is_defined(name)] == []


@pytest.mark.parametrize("rule", ALL)
def test_proving_tests_exist(rule):
    assert [name for name in named(SECTIONS[rule], "Proved by") if not is_in_suite(name)] == []


def test_functions_and_tests_that_do_not_exist_are_found():
    assert is_defined("crossframe.lifecycle.UnitState.after") and not is_defined("crossframe.lifecycle.UnitState.gone")
    assert is_defined("crossframe.unit_assignment.assign_units") and not is_defined(
        "crossframe.plan.assign_units"
    )  # imported there
    here = "tests/core/test_rules.py::test_each_rule_has_one_section"
    assert is_in_suite(here) and not is_in_suite(f"{here}s") and not is_in_suite(here.replace("rules", "gone"))


def test_cited_rules_have_sections():
    sources = [path for folder in FOLDERS for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind)]
    cited = {
        rule
        for path in (*sources, ROOT / "README.md")
        if UNTOUCHED not in path.parents
        for rule in CITED.findall(path.read_text(encoding="utf-8"))
    }
    assert sorted(cited) == ALL


def test_the_command_prints_rules():
    result = CliRunner().invoke(app, ["spec", "--rule", "r08", "--rule", "R34", "--rule", "R08"])
    assert (result.exit_code, result.output) == (0, f"{SECTIONS['R08']}\n{SECTIONS['R34']}")


def test_the_command_rejects_unknown_rules():
    result = CliRunner().invoke(app, ["spec", "--rule", "R08", "--rule", "x8"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "expected numbers from R01 to R39, got 'x8'" in result.output

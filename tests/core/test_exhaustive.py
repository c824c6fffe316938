"""A dispatch over the members of an enum says what becomes of the others: none falls through without a word."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("crossframe", "torch_backend", "jax_backend", "experiments")


def _enums(test: ast.expr) -> set[tuple[str, str]]:
    """The (subject, enum) pairs that a condition compares, by `is` or `==`."""
    found = set()
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.Eq):
            other = node.comparators[0]
            if isinstance(other, ast.Attribute) and other.attr.isupper():
                found.add((ast.unparse(node.left), ast.unparse(other.value)))
    return found


def _open_dispatches(tree: ast.AST) -> Iterator[int]:
    """Lines of `if` chains over one enum without an `else`, and of matches on members without a `case _`."""
    inner = {id(node.orelse[0]) for node in ast.walk(tree) if isinstance(node, ast.If) and len(node.orelse) == 1}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and id(node) not in inner:
            tests, last = [node.test], node
            while len(last.orelse) == 1 and isinstance(last.orelse[0], ast.If):
                last = last.orelse[0]
                tests.append(last.test)
            compared = Counter(pair for test in tests for pair in _enums(test))
            if not last.orelse and max(compared.values(), default=0) > 1:
                yield node.lineno
        elif isinstance(node, ast.Match):
            patterns = [case.pattern for case in node.cases]
            members = any(
                isinstance(part, ast.MatchValue) and isinstance(part.value, ast.Attribute)
                for pattern in patterns
                for part in ast.walk(pattern)
            )
            if members and not any(isinstance(p, ast.MatchAs) and p.pattern is None for p in patterns):
                yield node.lineno


@pytest.mark.parametrize("package", PACKAGES)
def test_dispatch_over_an_enum_is_exhaustive(package):
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in _open_dispatches(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("if a is E.X:\n    f()\nelif a is E.Y:\n    g()", [1]),
        ("if a is E.X:\n    f()\nelif a is E.Y:\n    g()\nelse:\n    h()", []),
        ("match a:\n    case E.X:\n        f()", [1]),
        ("match a:\n    case E.X:\n        f()\n    case _:\n        g()", []),
        ("if a is E.X:\n    f()\nelif b:\n    g()", []),
    ],
)
def test_open_dispatches_are_found(source, lines):
    assert list(_open_dispatches(ast.parse(source))) == lines

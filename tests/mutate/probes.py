"""Probes: sources whose functions note that they run, in whichever process."""

import ast
from collections.abc import Iterator

PROBES = "CROSSFRAME_MUTATE_PROBES"
"""The environment variable with the folder in which a function makes a file, named by its number."""
MODULE_PATH = "crossframe/_probe.py"
ALONE = "crossframe/child.py"
"""A script that finds the packages of the project, and can import none of them before."""
MODULE_SOURCE = f"""import os

SEEN = None  # in the process of pytest: what ran in a test so far

def hit(number):
    if SEEN is not None:
        if number in SEEN:
            return
        SEEN.add(number)
    folder = os.environ.get({PROBES!r})
    if folder and not os.path.exists(f"{{folder}}/{{number}}"):
        open(f"{{folder}}/{{number}}", "w").close()
"""


def with_probes(path: str, source: bytes, names: list[str]) -> bytes:
    """A source whose functions note that they run, by their place in `names`, to which they are added as "path:name".

    A module without functions notes that it is imported, as "path:".
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    insertions = []
    for name, node, _ in functions_of(source):
        documented = ast.get_docstring(node) is not None and len(node.body) > 1
        first = node.body[documented]
        begin = min([first, *getattr(first, "decorator_list", [])], key=lambda each: each.lineno)
        column = begin.col_offset - (begin is not first)  # the @ of a decorator
        separator = "; " if begin.lineno == node.lineno else "\n" + " " * column
        hit = _hit_alone(len(names)) if path == ALONE else f'__import__("crossframe._probe")._probe.hit({len(names)})'
        insertions.append((starts[begin.lineno - 1] + column, f"{hit}{separator}"))
        names.append(f"{path}:{name}")
    if not insertions:
        insertions.append((len(source), f'\n__import__("crossframe._probe")._probe.hit({len(names)})\n'))
        names.append(f"{path}:")
    for place, hit in sorted(insertions, reverse=True):
        source = source[:place] + hit.encode() + source[place:]
    return source


def _hit_alone(number: int) -> str:
    """The same, of a source that cannot import it."""
    return f'[open(f"{{folder}}/{number}", "a").close() for folder in [__import__("os").environ.get({PROBES!r})] if folder]'


def functions_of(source: bytes) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Each function with its name, which includes those around it, and its first line, decorators included."""
    waiting: list[tuple[str, ast.AST]] = [("", ast.parse(source))]
    while waiting:
        outer, node = waiting.pop()
        for child in ast.iter_child_nodes(node):
            inner = outer
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (
                    f"{outer}{child.name}",
                    child,
                    min(child.lineno, *(d.lineno for d in child.decorator_list), child.lineno),
                )
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{outer}{child.name}."
            waiting.append((inner, child))

"""Which faults are put into a source, as edits of its text.

Left alone are what no test should see: docstrings, annotations, type variables, decorators, imports, `assert` (what cannot
happen), the text of messages, `zip(..., strict=True)` (which asserts too), and what is the same program: two equal arguments
swapped, another negative number for the -1 of `reshape`, imports for types alone, None for another value that counts as false.
"""

import ast
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
# Functions to which the order of arguments is the same.
UNORDERED = (
    *("min", "max", "distance", "common_steps"),
    *("np.array_equal", "np.maximum", "np.minimum", "math.gcd", "math.hypot", "math.lcm"),
)
MODULE = 0


@dataclass(frozen=True)
class Mutant:
    """One edit of one file: bytes `start:stop` of its source become `text`.

    Attributes:
        path: of the file, from the root of the repository.
        line: on which the edit begins.
        function: first line of the innermost function around it, decorators included; MODULE outside of any.
        what: the kind of fault.
    """

    path: str
    start: int
    stop: int
    text: str
    line: int
    function: int
    what: str

    def apply(self, source: bytes) -> bytes:
        """The source with the fault in it."""
        return source[: self.start] + self.text.encode() + source[self.stop :]

    def diff(self, source: bytes) -> list[str]:
        """The lines that it changes, each with "-" or "+" in front."""
        before, after = source.decode().splitlines(), self.apply(source).decode().splitlines()
        return [
            line for line in difflib.unified_diff(before, after, n=0, lineterm="") if line[:3] not in ("---", "+++")
        ][1:]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every fault that can be put into a source, in the order of its text.

    >>> [mutant.apply(b"if a < 1: f()").decode() for mutant in mutants_of("x.py", b"if a < 1: f()")]
    ['if not a < 1: f()', 'if (a <= 1): f()', 'if (a >= 1): f()', 'if a < 0: f()', 'if a < 2: f()', 'if a < 1: pass']
    """
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found: dict[tuple[int, int, str], Mutant] = {}
    for node, text, function, what in _Walk().body(ast.parse(source).body, MODULE):
        assert node.end_lineno is not None and node.end_col_offset is not None
        start, stop = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        if source[start:stop].decode() != text:
            found.setdefault((start, stop, text), Mutant(path, start, stop, text, node.lineno, function, what))
    return sorted(found.values(), key=lambda mutant: mutant.start)


Edit = tuple[ast.stmt | ast.expr, str, int, str]


class _Walk:
    """Edits as (node, new text, function, kind of fault)."""

    def body(self, statements: list[ast.stmt], function: int) -> Iterator[Edit]:
        for statement in statements:
            yield from self.statement(statement, function)

    def statement(self, node: ast.stmt, function: int) -> Iterator[Edit]:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for default in (*node.args.defaults, *node.args.kw_defaults):
                    if default is not None:
                        yield from self.expression(default, function)
                yield from self.body(node.body, min(node.lineno, *(d.lineno for d in node.decorator_list), node.lineno))
            case ast.ClassDef():
                if not any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
                    yield from self.body(node.body, function)
            case (
                ast.Import() | ast.ImportFrom() | ast.Assert() | ast.Pass() | ast.If(test=ast.Name(id="TYPE_CHECKING"))
            ):
                return
            case ast.Raise():
                yield node, "pass", function, "removed raise"
            case ast.Expr(value=ast.Constant()):
                return  # a docstring, or ...
            case ast.Assign(targets=[ast.Name(id="__all__")]) | ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
                return
            case ast.Continue() | ast.Break():
                other = "break" if isinstance(node, ast.Continue) else "continue"
                yield node, other, function, "exchanged continue and break"
                yield node, "pass", function, "deleted statement"
            case _:
                yield from self.whole(node, function)
                for child in ast.iter_child_nodes(node):
                    yield from self.any(child, function, node)

    def whole(self, node: ast.stmt, function: int) -> Iterator[Edit]:
        """What is done to a statement as such."""
        match node:
            case ast.Return(value=ast.Constant(value="")):
                yield node, "return '!'", function, "constant"
            case ast.Return(value=value) if value is not None:
                if not (isinstance(value, ast.Constant) and not value.value):
                    yield node, "return None", function, "return None"
            case ast.Expr() | ast.AugAssign() | ast.Delete():
                yield node, "pass", function, "deleted statement"
            case ast.Assign(targets=[target], value=value):
                read = {name.id for name in ast.walk(value) if isinstance(name, ast.Name)}
                if (not isinstance(target, ast.Name) or target.id in read) and not isinstance(target, ast.Tuple):
                    yield node, "pass", function, "deleted statement"
            case ast.If(test=test) | ast.While(test=test):
                yield test, _negated(test), function, "negated condition"

    def any(self, node: ast.AST, function: int, parent: ast.AST) -> Iterator[Edit]:
        if isinstance(node, ast.stmt):
            yield from self.statement(node, function)
        elif isinstance(node, ast.expr):
            if not (isinstance(parent, ast.AnnAssign) and node is parent.annotation):
                yield from self.expression(node, function)
        else:  # an exception handler, a case, a with item, a comprehension, a keyword
            if isinstance(node, ast.keyword) and node.arg == "strict":
                return
            if isinstance(node, ast.comprehension):
                for test in node.ifs:
                    yield test, f"({_negated(test)})", function, "negated condition"
            for child in ast.iter_child_nodes(node):
                if not (isinstance(node, ast.ExceptHandler) and child is node.type):
                    yield from self.any(child, function, node)

    def expression(self, node: ast.expr, function: int) -> Iterator[Edit]:
        if isinstance(node, ast.JoinedStr):
            return
        for what, changed in _changed(node):
            text = ast.unparse(changed)
            closed = isinstance(changed, ast.Constant | ast.Call | ast.Subscript | ast.Name)
            yield node, text if closed else f"({text})", function, what
        for child in ast.iter_child_nodes(node):
            if not _is_the_rest(child, node):
                yield from self.any(child, function, node)


def _is_the_rest(node: ast.AST, parent: ast.expr) -> bool:
    """Whether this is the -1 of `reshape`, for which numpy takes any negative number."""
    if not (isinstance(parent, ast.Call) and isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)):
        return False
    return isinstance(parent.func, ast.Attribute) and parent.func.attr == "reshape"


def _negated(test: ast.expr) -> str:
    return ast.unparse(ast.UnaryOp(ast.Not(), test))


def _changed(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The expression with one fault in it."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in COMPARISONS[type(op)]:
                    yield "comparison", _with(node, ops=[*ops[:i], other(), *ops[i + 1 :]])
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield "arithmetic", _with(node, op=ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op, values=values):
            yield "boolean", _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield "boolean", rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "removed sign", operand
        case ast.IfExp(test=test):
            yield "negated condition", _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Call():
            yield from _changed_call(node)
        case ast.Subscript(slice=ast.Slice() as bounds):
            for end in ("lower", "upper", "step"):
                if getattr(bounds, end) is not None:
                    yield "dropped bound", _with(node, slice=_with(bounds, **{end: None}))
        case ast.Constant():
            for value in _values(node.value):
                yield "constant", ast.Constant(value)


def _changed_call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    if ast.unparse(node.func) not in UNORDERED and not any(isinstance(argument, ast.Starred) for argument in node.args):
        for i in range(len(node.args) - 1):
            if ast.dump(node.args[i]) == ast.dump(node.args[i + 1]):
                continue
            swapped = [*node.args[:i], node.args[i + 1], node.args[i], *node.args[i + 2 :]]
            yield "swapped arguments", _with(node, args=swapped)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg not in (None, "strict"):
            yield "dropped argument", _with(node, keywords=node.keywords[:i] + node.keywords[i + 1 :])
    if isinstance(node.func, ast.Name) and node.func.id in CALLED and not (node.func.id == "sorted" and node.keywords):
        yield "another function", _with(node, func=ast.Name(CALLED[node.func.id]))


def _values(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value - 1, value + 1) if value else (1,)
    if isinstance(value, float):
        return (value + 1.0,)
    if isinstance(value, str) and value and " " not in value:  # with spaces it is a message
        return (value + "!",)
    return ()


def _with(node: ast.expr, **fields: object) -> ast.expr:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed

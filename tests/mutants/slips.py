"""The one-line mistakes a person makes, as edits of a source text: pure functions from text to edits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

Edit = tuple[int, int, str, str]
"""Start and end in the encoded text, what stands there instead, and the mistake in words."""


@dataclass(frozen=True)
class Slip:
    """A mistake in `file`: the bytes from `start` to `end` become `new`."""

    file: str
    start: int
    end: int
    new: str
    meaning: str


@dataclass(frozen=True)
class Place:
    """Where a mistake can show: its statement's lines, or whoever mentions `name` when it runs at import."""

    lines: range
    name: str | None


@dataclass(frozen=True)
class Source:
    """A module's text, and positions in it."""

    text: str

    @cached_property
    def data(self) -> bytes:
        return self.text.encode()

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def start(self, node: ast.AST) -> int:
        return self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        return self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        return self.data[self.start(node) : self.end(node)].decode()

    def line(self, offset: int) -> int:
        """The number, from 1, of the line that holds byte `offset`."""
        return self.data.count(b"\n", 0, offset) + 1

    def with_edit(self, start: int, end: int, new: str) -> str:
        return (self.data[:start] + new.encode() + self.data[end:]).decode()

    def within(self, start: int, end: int, name: str) -> bool:
        """Whether bytes from `start` to `end` touch a function of this name."""
        return any(
            self.start(node) <= end and start <= self.end(node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef) and node.name == name
        )

    def place(self, offset: int) -> Place:
        """The innermost statement around byte `offset`, without the blocks that it opens."""
        line = self.line(offset)
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt) and _first(node) <= line <= (node.end_lineno or 0)
        ]
        if not around:
            return Place(range(line, line + 1), None)
        around.sort(key=lambda node: (node.end_lineno or 0) - _first(node))
        statement, body = around[0], getattr(around[0], "body", None)
        if body is None:
            lines = range(statement.lineno, (statement.end_lineno or 0) + 1)
        elif line < body[0].lineno:
            lines = range(_first(statement), body[0].lineno)
        else:  # `except`, `else` and `case` are no statements of their own
            lines = range(line, line + 1)
        in_function = any(isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line for node in around)
        return Place(lines, None if in_function else _name(statement))


def _first(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])


def _name(statement: ast.stmt) -> str | None:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.Assign(targets=[ast.Name(id=name), *_]) | ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return None


def slips(file: str, text: str) -> list[Slip]:
    """Every mistake that the rules below make in a module, in the order of its lines."""
    return [Slip(file, *edit) for edit in sorted(set(_edits(Source(text))))]


def changes(source: Source, slip: Slip) -> bool:
    """Whether the edited text is Python, and another program than before."""
    try:
        edited = ast.parse(source.with_edit(slip.start, slip.end, slip.new))
    except SyntaxError:
        return False
    return ast.dump(edited) != ast.dump(source.tree)


def _edits(source: Source) -> Iterator[Edit]:
    for node in _mutable(source.tree):
        for rule in (_conditions, _operators, _constants, _calls, _statements, _slices):
            yield from rule(source, node)


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but annotations, decorators, the words of messages and what is only for type checkers."""
    yield node
    skipped: list[object] = []
    match node:
        case ast.FunctionDef():
            skipped = [
                *node.decorator_list,
                node.returns,
                *(arg.annotation for arg in ast.walk(node.args) if isinstance(arg, ast.arg)),
            ]
        case ast.ClassDef():
            skipped = [*node.decorator_list, *node.bases]
        case ast.AnnAssign():
            skipped = [node.annotation]
        case ast.Raise() | ast.JoinedStr() | ast.keyword(arg="strict"):
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.arguments):
            for default in (*child.defaults, *(d for d in child.kw_defaults if d is not None)):
                yield from _mutable(default)
        elif not any(child is other for other in skipped):
            yield from _mutable(child)


def _replace(source: Source, node: ast.AST, new: str, meaning: str) -> Edit:
    return source.start(node), source.end(node), new, meaning


def _between(source: Source, left: ast.AST, right: ast.AST, old: str, new: str, meaning: str) -> Iterator[Edit]:
    """The operator `old` that stands between two nodes becomes `new`."""
    start, end = source.end(left), source.start(right)
    gap = source.data[start:end].decode()
    pattern = r"\s+".join(map(re.escape, old.split()))
    changed = re.sub(pattern, lambda _: new, gap, count=1)
    if changed != gap:
        yield start, end, changed, meaning


def _conditions(source: Source, node: ast.AST) -> Iterator[Edit]:
    match node:
        case ast.If(test=test):
            yield _replace(source, test, "False", "check removed")
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield _replace(source, node, f"({source.of(body)})", "one case for all")
            yield _replace(source, node, f"({source.of(orelse)})", "one case for all")
        case ast.comprehension(ifs=[first, *_]):
            yield _replace(source, first, "True", "filter removed")
        case ast.BoolOp(op=op, values=values):
            old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            yield from _between(source, values[0], values[1], old, new, f"{old} is {new}")
            for before, value in pairwise(values):
                yield source.end(before), source.end(value), "", "condition dropped"
            yield source.start(values[0]), source.start(values[1]), "", "condition dropped"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield _replace(source, node, f"({source.of(operand)})", "not dropped")


COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "+"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}


def _operators(source: Source, node: ast.AST) -> Iterator[Edit]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            for operator, before, after in zip(ops, [left, *comparators], comparators, strict=False):
                old, new = COMPARISONS[type(operator)]
                yield from _between(source, before, after, old, new, f"{old} is {new}")
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            if not any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (left, right)):
                old, new = ARITHMETIC[type(operator)]
                yield from _between(source, left, right, old, new, f"{old} is {new}")
                yield source.end(left), source.end(right), "", "term dropped"
        case ast.UnaryOp(op=ast.USub() | ast.Invert(), operand=operand):
            yield _replace(source, node, source.of(operand), "sign dropped")
        case ast.AugAssign(target=target, value=value):
            yield source.end(target), source.start(value), " = ", "accumulation lost"


def _constants(source: Source, node: ast.AST) -> Iterator[Edit]:
    match node:
        case ast.Constant(value=bool(value)):
            yield _replace(source, node, str(not value), "switch turned")
        case ast.Constant(value=int(value)):
            if value > 16:  # a size, a limit or a tuned number: one more or less is no different
                yield _replace(source, node, str(2 * value), "another constant")
            else:
                yield _replace(source, node, str(value + 1), "one more")
                if value > 0:
                    yield _replace(source, node, str(value - 1), "one less")
        case ast.Constant(value=float(value)) if value:
            yield _replace(source, node, repr(2 * value), "another constant")
        case ast.Subscript(slice=ast.Constant(value=str(key)) as constant):
            yield _replace(source, constant, repr(key + "_"), "wrong key")
        case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=str(key)) as constant, *_]):
            yield _replace(source, constant, repr(key + "_"), "wrong key")
        case ast.Dict(keys=keys):
            for key in keys:
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield _replace(source, key, repr(key.value + "_"), "wrong key")


SWAPPED = {
    "min": "max",
    "minimum": "maximum",
    "argmin": "argmax",
    "any": "all",
    "floor": "ceil",
    "zeros": "ones",
    "zeros_like": "ones_like",
}
SWAPPED |= {new: old for old, new in SWAPPED.items()}
UNWRAPPED = {"sorted": "list", "reversed": "list", "set": "list", "sort": "", "rint": "", "abs": "", "ceil": ""}


def _calls(source: Source, node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Call):
        return
    match node.func:
        case ast.Name(id=name):
            named: ast.AST = node.func
        case ast.Attribute(attr=name, value=receiver):
            named = node.func
            if name in ("copy", "strip", "astype") and not (name == "copy" and node.args):
                yield _replace(source, node, source.of(receiver), f"{name} dropped")
        case _:
            return
    start = source.end(named) - len(name.encode())
    if name in SWAPPED:
        yield start, source.end(named), SWAPPED[name], f"{name} is {SWAPPED[name]}"
    if name in UNWRAPPED and node.args:
        yield _replace(source, node, f"{UNWRAPPED[name]}({source.of(node.args[0])})", f"{name} dropped")
    arguments = [*node.args, *node.keywords]
    for before, keyword in zip([None, *arguments], arguments, strict=False):
        if isinstance(keyword, ast.keyword) and keyword.arg not in (None, "strict"):
            start = source.end(before) if before else source.end(node.func) + 1
            yield start, source.end(keyword), "", f"{keyword.arg} not given"
    match node.args:
        case [ast.Name() as first, ast.Name() as second, *_]:
            text = source.data[source.end(first) : source.start(second)].decode()
            swapped = f"{source.of(second)}{text}{source.of(first)}"
            yield source.start(first), source.end(second), swapped, "arguments swapped"


def _statements(source: Source, node: ast.AST) -> Iterator[Edit]:
    match node:
        case ast.Expr(value=ast.Call()) | ast.Delete() | ast.Continue():
            yield _replace(source, node, "pass", "statement removed")
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield _replace(source, node, "pass", "statement removed")
        case ast.Break():
            yield _replace(source, node, "continue", "loop goes on")
        case ast.ExceptHandler(body=[ast.Raise() as raised]):
            yield _replace(source, raised, "pass", "exception swallowed")
        case ast.ExceptHandler(type=ast.Tuple(elts=[_, *others])):
            for error in others:
                yield _replace(source, error, source.of(node.type.elts[0]), "exception not handled")  # type: ignore


def _slices(source: Source, node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Slice):
        for bound in (node.lower, node.upper):
            if bound is not None:
                yield _replace(source, bound, "", "bound dropped")

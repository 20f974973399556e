"""The structure graph of a source file: its functions, loops, branches and calls, as far as they are relevant.

Like in ScalAna's program structure graph, a loop or function with communication is a vertex with its statements as
parts. One without communication is a single vertex. Communication is calls of a plane, stream, table, delivery, loader
or appender, of collectives, and of functions of the same file that communicate. A name is taken for a plane or stream
by its assignments and annotations. Lines at which calls were seen at run time communicate as well.

Sources are parsed by `ast`, and not imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

from dataplane.diagnosis.collectives import COLLECTIVES

VertexKind = Literal["module", "function", "loop", "branch", "call", "lock", "code"]


def _words(text: str) -> list[str]:
    return text.split()


CALLS = frozenset(
    _words("put get draft seal append extend consume deliveries take ack nack renew flush prefetch free retain loader")
)
"""Methods of planes, streams, deliveries and appenders, and constructors of loaders."""
SOURCES = frozenset(["connect", "stream", "restore", "table", "appender", "consume", "deliveries", "take", "loader"])
"""Functions that return an object with those methods."""
LOCKS = frozenset(["acquire", "join", "wait", "wait_for", "result", "flock", "lockf", "communicate"])
"""Methods by which user code waits for another thread or process."""

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_BRANCHES = (ast.If, ast.Try, ast.Match)
_WITHS = (ast.With, ast.AsyncWith)
_LARGEST = 4 << 20


@dataclass(slots=True, eq=False)
class Vertex:
    """Lines `first` to `last` of a file. `name`: the function, the wait, or the statement's first line."""

    kind: VertexKind
    name: str
    function: str
    first: int
    last: int
    communicates: bool = False
    parts: list[Vertex] = field(default_factory=list)

    def __iter__(self) -> Iterator[Vertex]:
        yield self
        for part in self.parts:
            yield from part

    def of(self, line: int) -> Vertex:
        """The innermost vertex that contains the line."""
        for part in self.parts:
            if part.first <= line <= part.last:
                return part.of(line)
        return self


@dataclass(frozen=True, slots=True)
class Structure:
    """The graph of one file."""

    file: str
    root: Vertex

    def of(self, line: int) -> Vertex:
        """The vertex of the line."""
        return self.root.of(line)


def analysed(source: str, file: str = "", lines: Collection[int] = ()) -> Structure:
    """The structure of a source text. `lines`: the lines at which calls of the plane were seen. Raises SyntaxError."""
    tree = ast.parse(source)
    return Structure(file, _Analysis(tree, frozenset(lines)).root)


@lru_cache(maxsize=256)
def _read(file: str, lines: frozenset[int]) -> Structure | None:
    path = Path(file)
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return analysed(path.read_text(), file, lines)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def structure_of(file: str, lines: Collection[int] = ()) -> Structure | None:
    """The structure of a file; None if it is too large, or cannot be read here or parsed."""
    return _read(file, frozenset(lines))


class _Analysis:
    def __init__(self, tree: ast.Module, lines: frozenset[int]) -> None:
        self._lines = lines
        self._named = _planes(tree)
        self._talking: set[str] = set()  # functions that communicate
        functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
        while True:
            found = {node.name for node in functions if any(self._communicates(part) for part in node.body)}
            if found <= self._talking:
                break
            self._talking |= found
        self.root = Vertex("module", "<module>", "<module>", 1, max(1, _end(tree)), communicates=True)
        self.root.parts = self._parts(tree.body, "<module>")

    def _communicates(self, node: ast.AST) -> bool:
        return any(self._is_call(each) for each in ast.walk(node))

    def _is_call(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        if node.lineno in self._lines:
            return True
        called = node.func
        if isinstance(called, ast.Name):
            return called.id in self._talking or called.id == "loader"
        if not isinstance(called, ast.Attribute):
            return False
        if called.attr in COLLECTIVES and _root(called.value) in ("dist", "torch", "collective", "ray"):
            return True
        if called.attr in self._talking and _root(called.value) in ("self", "cls"):
            return True
        return called.attr in CALLS and self._is_plane(called.value)

    def _is_plane(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in SOURCES
        if isinstance(node, ast.Attribute):
            return node.attr in self._named
        return isinstance(node, ast.Name) and (node.id in self._named or node.id in ("dp", "dataplane", "collective"))

    def _parts(self, body: list[ast.stmt], function: str) -> list[Vertex]:
        """The vertices of statements."""
        return [self._vertex(statement, function) for statement in body]

    def _vertex(self, node: ast.stmt, function: str) -> Vertex:
        first, last = node.lineno, _end(node)
        if isinstance(node, _FUNCTIONS):
            return self._function(node, function)
        if isinstance(node, ast.ClassDef):
            made = Vertex("code", node.name, function, first, last, True)
            made.parts = self._parts(node.body, _joined(function, node.name))
            return made
        talks = self._communicates(node)
        lock = _lock(node)
        if lock and not talks:
            made = Vertex("lock", lock, function, first, last)
            made.parts = self._body(node, function) if isinstance(node, _WITHS) else []
            return made
        if isinstance(node, _LOOPS):
            made = Vertex("loop", _head(node), function, first, last, talks)
        elif isinstance(node, (*_BRANCHES, *_WITHS)):
            made = Vertex("branch", _head(node), function, first, last, talks)
        else:
            return Vertex("call" if talks else "code", _head(node), function, first, last, talks)
        if talks:
            made.parts = self._body(node, function)
        return made

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef, function: str) -> Vertex:
        name = _joined(function, node.name)
        talks = node.name in self._talking
        made = Vertex("function", name, name, node.lineno, _end(node), talks)
        inner = talks or any(_lock(each) for each in ast.walk(node) if isinstance(each, ast.stmt))
        nested: list[ast.stmt] = [each for each in node.body if isinstance(each, (*_FUNCTIONS, ast.ClassDef))]
        made.parts = self._parts(list(node.body if inner else nested), name)
        return made

    def _body(self, node: ast.stmt, function: str) -> list[Vertex]:
        parts: list[Vertex] = []
        for name in ("body", "orelse", "finalbody"):
            parts += self._parts(getattr(node, name, []), function)
        for inner in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            parts += self._parts(inner.body, function)
        return parts


def _planes(tree: ast.AST) -> set[str]:
    """Names and attributes that are assigned or annotated as a plane, a stream, or an object that comes from one."""
    found: set[str] = set()
    for node in ast.walk(tree):
        pairs: list[tuple[ast.AST | None, ast.AST | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.withitem):
            pairs = [(node.optional_vars, node.context_expr)]
        elif isinstance(node, ast.For | ast.AsyncFor):
            pairs = [(node.target, node.iter)]
        elif isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            said = ast.unparse(node.annotation)
            if any(name in said for name in ("Stream", "Plane", "Delivery", "Appender", "Table")):
                found.add(node.arg if isinstance(node, ast.arg) else ast.unparse(node.target).rpartition(".")[2])
        for target, value in pairs:
            value = value.value if isinstance(value, ast.Await) else value
            if isinstance(value, ast.Call) and target is not None:
                called = value.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in SOURCES:
                    found |= {ast.unparse(each).rpartition(".")[2] for each in _targets(target)}
    return found


def _targets(node: ast.AST) -> list[ast.AST]:
    return list(node.elts) if isinstance(node, ast.Tuple) else [node]


def _lock(node: ast.AST) -> str:
    """The wait of a statement, such as "with lock" or "thread.join()"; empty for none."""
    if isinstance(node, _WITHS):
        for item in node.items:
            said = ast.unparse(item.context_expr)
            if any(word in said.lower() for word in ("lock", "mutex", "semaphore", "condition")):
                return f"with {said}"[:80]
        return ""
    if not isinstance(node, ast.Expr | ast.Assign | ast.AnnAssign | ast.Return):
        return ""
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in LOCKS:
            if each.func.attr == "join" and (each.args or isinstance(each.func.value, ast.Constant)):
                continue  # the method of a text or path
            return ast.unparse(each)[:80]
    return ""


def _head(node: ast.stmt) -> str:
    return ast.unparse(node).partition("\n")[0][:80]


def _joined(function: str, name: str) -> str:
    return name if function == "<module>" else f"{function}.{name}"


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _end(node: ast.AST) -> int:
    ends = [getattr(each, "end_lineno", None) or 0 for each in ast.walk(node)]
    return max(ends, default=1)

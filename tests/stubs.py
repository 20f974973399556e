"""Writes the stub of `dataplane.client.blocking_calls`, whose methods are compiled: `python -m tests.stubs`.

Type checkers, editors and the documentation site read the stub. It has the signatures and docstrings that the compiled
methods have at run time; names of types are imported from where the module of the asynchronous class has them.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from dataplane.client import blocking_calls, sync
from dataplane.client.blocking import Blocking, renamed

PATH = Path(blocking_calls.__file__).with_suffix(".pyi")
HEADER = '"""Written by `python -m tests.stubs`; do not edit."""\n\n'
_SYNCHRONOUS = {
    name: sync.__name__
    for name, kind in vars(sync).items()
    if inspect.isclass(kind) and issubclass(kind, Blocking) and kind.__module__ == sync.__name__
}


def classes() -> list[type]:
    return [kind for kind in vars(blocking_calls).values() if inspect.isclass(kind) and hasattr(kind, "_of")]


def methods(kind: type) -> Iterator[tuple[str, inspect.Signature, str | None, bool]]:
    """The compiled methods of a class: name, signature, docstring, and whether it is a property."""
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else member
        if inspect.isfunction(function):
            yield name, inspect.signature(function), function.__doc__, isinstance(member, property)


def shown(signature: inspect.Signature) -> str:
    """The parameters and the result, with annotations as they are written."""
    said, star = [], False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not star:
            said.append("*")
        star = star or each.kind in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        annotated = "" if each.annotation is each.empty else f": {each.annotation}"
        default = "" if each.default is each.empty else f" = {each.default!r}"
        said.append(
            {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "") + each.name + annotated + default
        )
    return f"({', '.join(said)}) -> {signature.return_annotation}"


def annotations(signature: inspect.Signature) -> list[str]:
    said = [each.annotation for each in signature.parameters.values() if each.annotation is not each.empty]
    return [*said, signature.return_annotation]


def imported(kind: type, names: set[str]) -> Iterator[str]:
    """Imports of these names, as the module of the asynchronous class has them, or from that module."""
    module = sys.modules[kind._of.__module__]  # type: ignore[attr-defined]
    bound = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Import):
            bound |= {each.asname or each.name: f"import {ast.unparse(each)}" for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {renamed(each.name): f"from {node.module} import {renamed(each.name)}" for each in node.names}
    for name in names:
        if name in _SYNCHRONOUS:
            yield f"from {_SYNCHRONOUS[name]} import {name}"
        elif name in bound:
            yield bound[name]
        elif name in vars(module):
            yield f"from {module.__name__} import {name}"


def stub() -> str:
    """The text of the stub, not formatted yet."""
    imports, bodies = {"from dataplane.client.blocking import Blocking"}, []
    for kind in classes():
        lines, names = [f"class {kind.__name__}(Blocking):", f'    """{kind.__doc__}"""', ""], set[str]()
        for name, signature, docstring, is_property in methods(kind):
            lines += ["    @property"] * is_property
            lines.append(f"    def {name}{shown(signature)}:" + ("" if docstring else " ..."))
            if docstring:
                lines += [f'        """{docstring}"""', ""]
            names |= set(re.findall(r"(?<!\.)\b[A-Za-z]\w*", " ".join(annotations(signature))))
        imports |= set(imported(kind, names))
        bodies.append("\n".join(lines))
    source = HEADER + "\n".join(sorted(imports)) + "\n\n" + "\n\n".join(bodies) + "\n"
    twice = [line for line in imports if sum(line.split()[-1] == other.split()[-1] for other in imports) > 1]
    assert not twice, f"one name for two things: {twice}"
    return source


def parsed(source: str) -> tuple[set[str], list[str]]:
    """The imports and the classes of a stub, whatever its format."""
    body = ast.parse(source).body[1:]
    names = {f"{getattr(n, 'module', '')} {each.name}" for n in body if hasattr(n, "names") for each in n.names}
    return names, [textwrap.dedent(ast.unparse(node)) for node in body if isinstance(node, ast.ClassDef)]


if __name__ == "__main__":
    PATH.write_text(stub())
    ruff = Path(sys.executable).with_name("ruff")
    subprocess.run([ruff, "check", "--quiet", "--fix", "--select", "I", PATH], check=True)
    subprocess.run([ruff, "format", "--quiet", PATH], check=True)

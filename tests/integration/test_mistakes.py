"""Mistakes of users, each with the error that it gets: `mistakes.txt` lists statements, and below each that fails,
after an exclamation mark, its error. `...` stands for any text, DIRECTORY for an empty directory.

    python -m tests.integration.test_mistakes

writes the errors of today into the list, to be read before they are committed.
"""

from __future__ import annotations

import ast
import pickle
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane import testing
from dataplane.client import consuming

LIST = Path(__file__).with_name("mistakes.txt")
SECTIONS = {part.partition("\n")[0]: part.partition("\n")[2] for part in LIST.read_text().split("=== ")[1:]}

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # a draft may be left by a mistake


def errors(section: str) -> Iterator[tuple[str, str, str]]:
    """For each statement of a section: the statement, the error that is listed, and the error that it raises. Both are
    empty where there is none."""
    with (
        testing.node(memory="64MiB", spill=0) as node,
        tempfile.TemporaryDirectory() as there,
        dp.connect(node.address) as plane,
    ):
        names: dict[str, Any] = {"dp": dp, "np": np, "pickle": pickle, "node": node, "plane": plane, "there": there}
        for part in re.findall(r"(?:^(?!! ).*\n)+(?:^! .*\n)?", section.strip() + "\n", re.MULTILINE):
            code, _, listed = part.rstrip("\n").partition("\n! ")
            found = ""
            *before, last = ast.parse(code).body
            exec(compile(ast.Module(before, []), "mistakes.txt", "exec"), names)
            try:
                exec(compile(ast.Module([last], []), "mistakes.txt", "exec"), names)
            except Exception as error:
                found = f"{type(error).__name__}: {error}".replace(there, "DIRECTORY")
            yield code, listed, re.sub(r"\b\d+\.\d+ s\b", "0.1 s", found)


def fits(listed: str, found: str) -> bool:
    """Whether it is the listed error."""
    return re.fullmatch(".*".join(map(re.escape, listed.split("..."))), found, re.DOTALL) is not None


@pytest.mark.parametrize("section", SECTIONS)
def test_each_mistake_gets_the_error_that_is_listed(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(consuming, "_WHY_S", 60.0)  # a slow machine has the time to say why
    for code, listed, found in errors(SECTIONS[section]):
        assert fits(listed, found), f"{code}\nlisted: {listed}\nfound:  {found}"


def test_at_least_150_mistakes_are_listed() -> None:
    assert LIST.read_text().count("\n! ") >= 150


if __name__ == "__main__":
    lines = []
    for title, section in SECTIONS.items():
        lines.append(f"=== {title}")
        for code, listed, found in errors(section):
            lines += [code, *[f"! {listed if fits(listed, found) else found}"] * bool(found)]
    LIST.write_text("\n".join(lines) + "\n")

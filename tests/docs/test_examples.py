"""The documentation is true: its code runs and prints what it says, its links lead somewhere, its tables are complete.

In a code block, a comment `# -> text` at the end of a line is a line of what the block prints.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from bench.workloads import __main__ as workloads
from dataplane import cli, config, errors
from dataplane.client.blocking import Blocking
from dataplane.client.loader import Loader
from dataplane.client.sync import History, Weights
from tests.cases import each_case
from tests.docs import running
from tests.processes import eventually

ROOT = Path(__file__).parents[2]
_TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
PAGES = sorted([*_TOP, *ROOT.glob("docs/**/*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

ELSEWHERE = {"docs/transfer_queue.md"}  # whose code needs TransferQueue: tests/integrations/transfer_queue

RUN_S = 150.0  # torch takes seconds to import on a busy machine

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"  # -> (.*)$", re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks_of(page: str, language: str = "python") -> list[str]:
    return [body for tag, body in _BLOCK.findall(text_of(page)) if tag == language]


@each_case("page", [name for name in NAMES if blocks_of(name) and name not in ELSEWHERE])
def test_documentation_code_runs_and_prints_its_listed_output(page: str, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    files = []
    for i, block in enumerate(blocks):
        files.append(tmp_path / f"block_{i}.py")
        files[-1].write_text(block)
    left = tmp_path / "left"
    left.mkdir()
    environment = {"TMPDIR": str(left), "DATAPLANE_SPILL_DIR": str(left), "PYTHONPATH": str(ROOT)}
    code, out, said = running.run(files, tmp_path, environment, RUN_S)
    assert code == 0, said
    assert out.splitlines() == [line for block in blocks for line in _PRINTED.findall(block)]
    assert "ResourceWarning" not in said
    assert "never retrieved" not in said
    eventually(lambda: not list(left.glob("dataplane-*")), f"the node's files went: {list(left.iterdir())}")


def test_code_is_valid_and_not_too_wide() -> None:
    for page in NAMES:
        for block in blocks_of(page):
            compile(block, page, "exec")
            assert all(len(_PRINTED.sub("", line)) <= 120 for line in block.splitlines()), page


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


LINKS = [
    (page, target)
    for page in NAMES
    for target in re.findall(r"\]\(([^)\s]+)\)", _BLOCK.sub("", text_of(page)))
    if "://" not in target
]


def test_links_have_existing_targets() -> None:
    assert len(LINKS) > 100
    for page, target in LINKS:
        here = ROOT / page
        path, _, anchor = target.partition("#")
        there = (here.parent / path).resolve() if path else here
        assert there.exists(), f"{page}: {target}"
        assert there.is_relative_to(ROOT), f"{page}: {target}"
        assert not anchor or anchor in anchors_of(there), f"{page}: {target}"


def test_every_decision_is_listed() -> None:
    listed = text_of("docs/decisions/README.md")
    pages = [page.name for page in (ROOT / "docs/decisions").glob("[0-9]*.md")]
    assert all(f"({name})" in listed for name in pages)
    assert len({name[:4] for name in pages}) == len(pages)


def test_a_decision_has_its_parts() -> None:
    for page in [name for name in NAMES if name.startswith("docs/decisions/0")]:
        parts = re.findall(r"^## (.+)$", text_of(page), re.MULTILINE)
        assert parts == ["Context", "Decision", "Measurement"], page


def test_files_and_targets_that_are_named_exist() -> None:
    for page in NAMES:
        text = text_of(page)
        for path in re.findall(r"`((?:dataplane|tests|bench|examples|docs)/[\w/.]+)(?:::\w+)?`", text):
            assert (ROOT / path).exists(), f"{page}: {path}"
        for target in re.findall(r"\bmake ([a-z]+)\b`", text):
            assert re.search(rf"^{target}:", text_of("Makefile"), re.MULTILINE), f"{page}: make {target}"


def test_tests_that_are_named_exist() -> None:
    for page in NAMES:
        for path, name in re.findall(r"`(tests/[\w/.]+\.py)::(\w+)`", text_of(page)):
            assert re.search(rf"^ *(?:async )?def {name}\(", text_of(path), re.MULTILINE), f"{page}: {path}::{name}"


def table_rows(page: str) -> Iterator[list[str]]:
    for line in text_of(page).splitlines():
        if line.startswith("|") and not line.startswith("|-"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def public_errors() -> list[type[errors.DataplaneError]]:
    found = [getattr(dp, name) for name in dp.__all__ if isinstance(getattr(dp, name), type)]
    return [kind for kind in found if issubclass(kind, errors.DataplaneError)]


def test_failure_has_every_error_with_its_fields() -> None:
    described = {cells[0].strip("`"): cells for cells in table_rows("docs/failure.md") if cells[0].startswith("`")}
    for kind in public_errors():
        if kind is errors.DataplaneError:
            continue
        assert kind.__name__ in described, kind.__name__
        named = " ".join(described[kind.__name__])
        assert all(f"`{field}`" in named for field in kind.FIELDS), kind.__name__


# API

PUBLIC: dict[str, Any] = {
    "plane": dp.Plane,
    "draft": dp.Draft,
    "ref": dp.BatchRef,
    "batch": dp.Batch,
    "column": dp.Column,
    "field": dp.Field,
    "config": dp.NodeConfig,
    "stats": dp.Stats,
    "stream": dp.Stream,
    "table": dp.Table,
    "history": History,
    "weights": Weights,
    "delivery": dp.Delivery,
    "loader": Loader,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "dp.connect": dp.connect,
    "dp.aio.connect": dp.aio.connect,
    "dp.concat": dp.concat,
    "dp.packed_share": dp.packed_share,
    "dp.dense": dp.dense,
    "dp.ragged": dp.ragged,
    "dp.NodeConfig": dp.NodeConfig,
    "dp.loader": dp.loader,
    "dp.collective.broadcast": dp.collective.broadcast,
    "dp.collective.scatter": dp.collective.scatter,
    "dp.collective.gather": dp.collective.gather,
    "dp.collective.get": dp.collective.get,
    "dp.collective.interrupt": dp.collective.interrupt,
}
# For the package's own modules, though they carry no underscore.
INTERNAL = {
    *("ref.of", "ref.sources", "ref.pieces", "ref.shards", "ref.footprint", "ref.whole"),
    *("column.of", "column.one", "column.reading", "stats.of"),
    *("field.item_shape", "field.item_nbytes"),
    *("ref.numbered", "ref.unlinked"),
}


def spelled(label: str, call: Callable[..., Any], *, bound: bool = False) -> str:
    """The call as the page has it: names and defaults, no annotations."""
    signature = inspect.signature(call)
    parameters = list(signature.parameters.values())[bound:]
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return label + str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def members(label: str, kind: type) -> Iterator[str]:
    fields = [name for name in getattr(kind, "__annotations__", {}) if not name.startswith("_")]
    compiled = [name for base in kind.__bases__ if issubclass(base, Blocking) for name in vars(base)]
    for name in dict.fromkeys([*fields, *vars(kind), *compiled]):
        if name.startswith("_") or f"{label}.{name}" in INTERNAL:
            continue
        value = inspect.getattr_static(kind, name, None)
        if isinstance(value, classmethod):
            yield spelled(f"dp.{kind.__name__}.{name}", getattr(kind, name))
        elif inspect.isfunction(value):
            yield spelled(f"{label}.{name}", value, bound=True)
        else:
            yield f"{label}.{name}"


def test_the_api_page_lists_exactly_the_public_calls() -> None:
    entries = re.findall(r"^\| `([^`]+)`", text_of("docs/api.md"), re.MULTILINE)
    calls = [spelled(label, call) for label, call in FUNCTIONS.items()]
    assert sorted(entries) == sorted(calls + [each for label, kind in PUBLIC.items() for each in members(label, kind)])


def test_the_api_page_has_every_public_name() -> None:
    text = text_of("docs/api.md")
    for name in dp.__all__:
        if name not in vars(errors):
            assert re.search(rf"dp\.{name}\b|^## {name}$", text, re.MULTILINE), name


def test_the_asynchronous_plane_has_the_same_calls() -> None:
    same = set(members("plane", dp.Plane)) - {"plane.close()"}
    assert same < set(members("plane", dp.aio.AsyncPlane))


@each_case("command", ["node", "status", "top"])
def test_operations_has_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    text = text_of("docs/operations.md")
    assert all(f"`{option}" in text for option in options)


def test_workloads_has_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        workloads.main(["--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert options == set(re.findall(r"^\| `(--[a-z-]+)", text_of("docs/workloads.md"), re.MULTILINE))


def test_operations_has_every_variable() -> None:
    read = set(re.findall(r'environ\.get\("(\w+)"', inspect.getsource(config.environment)))
    text = text_of("docs/operations.md")
    assert "DATAPLANE_ADDRESS" in read
    assert all(f"`{name}`" in text for name in read)

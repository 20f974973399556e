"""Generates the part of a Markdown page between two markers. The rest of the page is not changed."""

from __future__ import annotations

import re

from bench.report import results
from bench.report.results import EXPECTED, Results, Table

BEGIN, END = "<!-- begin: python -m bench.report -->", "<!-- end: python -m bench.report -->"


class NoMarkers(Exception):
    """The page does not have each marker once, in this order."""


def between(page: str, text: str) -> str:
    """The page with this text between its markers. Sections of the page that the text lacks are kept, because their
    figures were measured before. Raises `NoMarkers`."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise NoMarkers(f"the page needs each of these lines once, in this order: {BEGIN} and {END}")
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    sections = "\n\n".join((_sections(old) | _sections(text)).values())
    return f"{before}{BEGIN}\n\n{sections}\n\n{END}{after}"


def _sections(text: str) -> dict[str, str]:
    """The sections of a text, by heading."""
    parts = [part.strip() for part in re.split(r"^(?=### )", text, flags=re.MULTILINE)]
    return {part.partition("\n")[0]: part for part in parts if part.startswith("###")}


def text(found: Results) -> str:
    """All figures as Markdown. The cases in which another system is faster come first."""
    parts = []
    if peers := found.files.get("peers"):
        parts += ["### Where another system is faster", *_faster(peers)]
    for name, content in found.files.items():
        parts += [f"### {EXPECTED[name][0]}", results.machine(content) + "."]
        if content["rows"]:
            parts.append(_table(results.promises(content)))
        if name == "peers":
            parts += _peers(content)
    return "\n\n".join(parts)


def _faster(peers: dict[str, object]) -> list[str]:
    faster = results.where_faster(peers)
    return [_list(faster) if faster else "On none of the workloads and systems that were measured."]


def _peers(peers: dict[str, object]) -> list[str]:
    parts = [f"Versions: {results.versions(peers)}."]
    for workload in peers["workloads"]:  # type: ignore[attr-defined]
        parts += [
            f"**{workload}**: {results.described(peers, workload)}.",
            _table(results.side_by_side(peers, workload)),
        ]
    if said := results.not_measured(peers):
        parts += ["Not measured:", _list(said)]
    return parts


def _table(table: Table) -> str:
    lines = [table.headings, tuple("---" for _ in table.headings), *table.cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _list(sentences: tuple[str, ...] | list[str]) -> str:
    return "\n".join(f"- {sentence}" for sentence in sentences)

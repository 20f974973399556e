"""The members of a cluster as text: their addresses, the partitions that each leads and follows, and whether the
coordinator answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.config import format_size

_NAMED = 4
_SILENT = "does not answer: members stay, and none can join"


def members_text(found: Mapping[str, Any]) -> str:
    """Lines of text from the result of `plane.members()`."""
    if not found:
        return "this node is alone"
    lines = []
    for node, member in found.get("members", {}).items():
        line = f"{node}  {member['address']}  {', '.join(member['transports'])}"
        for role in ("leads", "follows"):
            if member.get(role):
                line += f"  {role} {_named(member[role])}"
        lines.append(line + ("  (this one)" if member["self"] else ""))
    coordination = found.get("coordination")
    if coordination is not None:
        where, answers = coordination["coordinator"], coordination["answers"]
        said = "" if where.startswith("none") else ", answers" if answers else f", {_SILENT}"
        lines.append(f"coordinator: {where}{said}")
    read = found.get("read_bytes", {})
    if any(read.values()):
        lines.append(
            "read from others: " + ", ".join(f"{format_size(nbytes)} by {name}" for name, nbytes in read.items())
        )
    return "\n".join(lines)


def _named(partitions: Sequence[str]) -> str:
    more = len(partitions) - _NAMED
    return ", ".join(partitions[:_NAMED]) + (f" and {more} more" if more > 0 else "")

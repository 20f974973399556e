"""A diagnosis as text: the step, the roles, and the causes with their line, chain and advice."""

from __future__ import annotations

import os

from dataplane.diagnosis.causes import Cause, Diagnosis

NAMED = 0.02
"""The share of a step from which a cause is described in full."""


def as_text(found: Diagnosis, most: int = 5) -> str:
    """Lines of text; the most costly causes, at most this many."""
    lost = found.lost_s / found.step_s if found.step_s else 0.0
    lines = [
        f"a step of {found.role!r} takes {_time(found.step_s)}, of which it waits {_time(found.lost_s)} ({lost:.0%})"
        f"; {found.steps:.0f} steps in {found.seconds:.0f} s"
    ]
    lines += [f"  note: {note}" for note in found.notes]
    for role in found.roles:
        waits = ", ".join(
            f"{kind} {share:.0%}" for kind, share in sorted(role.waiting.items(), key=lambda e: -e[1]) if share >= 0.01
        )
        count = "1 process" if role.processes == 1 else f"{role.processes} processes"
        where = f"{role.name:<16} {count} on {', '.join(role.hosts)}"
        lines.append(f"  {where}: busy {role.busy:.0%}; waits: {waits or 'no'}")
    named = [cause for cause in found.causes if cause.share >= NAMED][:most]
    for number, cause in enumerate(named, 1):
        lines += ["", *_cause(number, cause)]
    if not named:
        lines += ["", "nothing costs the step more than 2 %"]
    return "\n".join("".join(c if c.isprintable() else "?" for c in line) for line in lines)


def _cause(number: int, cause: Cause) -> list[str]:
    where = f"{_file(cause.file)}:{cause.line} in {cause.function}"
    pids = f"{len(cause.processes)} processes" if len(cause.processes) > 1 else f"process {cause.processes[0]}"
    lines = [
        f"{number}. {cause.kind}: {where}",
        f"   costs {_time(cause.seconds)} a step ({cause.share:.0%}); role {cause.role}, {pids} on {cause.host}",
    ]
    for link in cause.chain:
        lines.append(
            f"   {link.role} waits for {_kind(link.kind)} {_time(link.seconds)} at {_file(link.file)}:{link.line}"
            f" in {link.function}, which ends with"
        )
    if cause.chain:
        lines.append(f"   {cause.role} at this line")
    change = f"   change {cause.setting}: " if cause.setting else "   change: "
    return [*lines, change + cause.advice]


def _kind(kind: str) -> str:
    if kind == "collective":
        return "other ranks"
    return f"room ({kind})" if kind.startswith("max_") else "room" if kind == "permits" else kind


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"


def _file(path: str) -> str:
    """The path, relative to the current directory if it is below."""
    try:
        near = os.path.relpath(path)
    except ValueError:
        return path
    return path if near.startswith("..") else near

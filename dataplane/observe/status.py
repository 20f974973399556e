"""A node's statistics as text: the output of `dataplane status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataplane.config import format_size
from dataplane.observe.stats import Stats
from dataplane.store.budget import attributed

_BAR = 24
_GROUPS = 3  # incomplete ones that are named, of each task


def status_text(stats: Stats) -> str:
    """The statistics, one a line: memory, disk, shards, pins, waits, holders of memory, streams and tables."""
    rows = [
        ("node", f"{stats.node}, pid {stats.pid}, up {duration(stats.uptime_s)}, {counted(stats.clients, 'client')}"),
        ("memory", share(stats.memory_used, stats.memory_budget) + f"  peak {format_size(stats.memory_peak)}"),
        ("disk", disk_text(stats)),
        ("shards", f"{stats.shards}, of them {stats.spilled_shards} on disk only"),
        ("pinned", format_size(stats.pinned_bytes)),
        ("reserved", format_size(stats.reserved_bytes)),
        ("waiting", f"for memory: {waiting_text(stats)}"),
        ("waited", f"for memory: {stats.waits} times, {stats.waited_s:.1f} s in all"),
        ("put", f"{format_size(stats.put_bytes)}, freed {format_size(stats.freed_bytes)}"),
        ("spilled", f"{format_size(stats.spilled_bytes)}, restored {format_size(stats.restored_bytes)}"),
    ]
    if stats.fetched_bytes or stats.sent_bytes or stats.copies:
        crossed = f"fetched {format_size(stats.fetched_bytes)}, sent {format_size(stats.sent_bytes)}"
        rows.append(("hosts", f"{crossed}, {stats.copies} copies"))
    if stats.spill_error:
        rows.append(("error", stats.spill_error))
    for held in stats.holders[:10]:
        rows.append(("holds", f"{format_size(held['bytes']):>10} {held['how']:<8} {held['holder']}{attributed(held)}"))
    for name, stream in stats.streams.items():
        rows.append(("stream", f"{name}: {stream_text(stream)}"))
        rows += [("", f"  {task}: {task_text(figures)}") for task, figures in stream["task"].items()]
        rows += [("", f"  {line}") for line in (*waiters(stream), *hints(stream))]
    if stats.streams_in_all > len(stats.streams):
        rows.append(("streams", f"{stats.streams_in_all - len(stats.streams)} more"))
    for name, table in stats.tables.items():
        rows.append(("table", f"{name}: {table['rows']:,} rows, {format_size(table['bytes'])}"))
    if stats.tables_in_all > len(stats.tables):
        rows.append(("tables", f"{stats.tables_in_all - len(stats.tables)} more"))
    return "\n".join(printable(f"{name:<9} {text}") for name, text in rows)


def stream_text(stream: Mapping[str, Any]) -> str:
    """The content of a stream, as in "12 of 4,096 rows, 1.0 KiB, oldest 3 s, version 7"."""
    rows, most = f"{stream['rows']:,}", stream["max_rows"]
    size, limit = format_size(stream["bytes"]), stream["max_bytes"]
    parts = [
        f"{rows} of {most:,} rows" if most else f"{rows} rows",
        f"{size} of {format_size(limit)}" if limit else size,
        f"oldest {duration(stream['oldest_s'])}",
        f"version {stream['latest_version']}",
    ]
    if stream["unfinished"]:
        parts.append(f"{stream['unfinished']:,} in progress")
    if stream["groups"]:
        parts.append(counted(stream["groups"], "group"))
    return ", ".join(parts + ["closed"] * bool(stream["closed"]))


def task_text(task: Mapping[str, Any]) -> str:
    """The numbers of pending, leased and acked rows of a task, and rarer counts if they are not 0."""
    always, seldom = ("pending", "leased", "acked"), ("redelivered", "expired", "dead")
    shown = [name for name in (*always, *seldom) if name in always or task[name]]
    return ", ".join(f"{task[name]:,} {name}" for name in shown)


def waiters(stream: Mapping[str, Any]) -> list[str]:
    """The waiting requests of a stream, one a line: appends wait for room, consumers for columns, tasks for groups."""
    lines = []
    if stream["waiting"]:
        behind = ", ".join(stream["behind"])
        lines.append(
            _waits(stream["waiting"], "append", "") + " for room" + (f", held up by {behind}" if behind else "")
        )
    for name, task in stream["task"].items():
        if task["waiting"]:
            asked = "; ".join(f"{columns} ({count:,} rows ready)" for columns, count in task["ready"].items())
            lines.append(_waits(task["waiting"], "request", f" of {name}") + f" for {asked or 'rows'}")
        for group in task["incomplete"][:_GROUPS]:
            there = f"{group['rows']} of {group['of']} rows, {group['dropped']} dropped"
            lines.append(f"{name} waits for the group {group['group']!r} since {duration(group['age_s'])}: {there}")
    return lines


def hints(stream: Mapping[str, Any]) -> list[str]:
    """The calls that list the dead letters of a stream, in one line; none if there are none."""
    dead = [f"stream.dead_letters({name!r})" for name, task in stream["task"].items() if task["dead"]]
    return [f"dead letters: {', '.join(dead)}"] if dead else []


def waiting_text(stats: Stats) -> str:
    """The requests that wait for memory, and the processes that sent them."""
    requests = f"{counted(stats.waiting, 'request')} for {format_size(stats.waiting_bytes)}"
    return requests + (f", of {', '.join(stats.waiters)}" if stats.waiters else "")


def disk_text(stats: Stats, width: int = _BAR) -> str:
    """The use of the disk for spilling. If spilling is off, all shards on disk are of durable columns."""
    if stats.disk_budget:
        return share(stats.disk_used, stats.disk_budget, width)
    return "spilling is off" + ("; durable columns are in the data directory" if stats.spilled_shards else "")


def _waits(count: int, what: str, whose: str) -> str:
    return f"1 {what}{whose} waits" if count == 1 else f"{count:,} {what}s{whose} wait"


def share(used: int, budget: int, width: int = _BAR) -> str:
    """A bar with its meaning: used bytes, budget, percentage. "off" without a budget."""
    if not budget:
        return "off"
    filled = min(width, round(width * used / budget))
    bar = "#" * filled + "." * (width - filled)
    return f"[{bar}] {format_size(used)} of {format_size(budget)} ({100 * used / budget:.0f} %)"


def counted(count: int, noun: str) -> str:
    """A number of things: "1 file", "2,000 files"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """Seconds as people write them: "2 min 5 s"."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def printable(text: str) -> str:
    """The text without control characters, which names of other processes may contain."""
    return "".join(character if character.isprintable() else "?" for character in text)


# The members of a cluster as text: their addresses, the partitions that each leads and follows, and whether the
# coordinator answers.

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

"""A node's figures as text for people: what `dataplane status` prints."""

from __future__ import annotations

from dataplane.config import format_size
from dataplane.observe.stats import Stats

_BAR = 24


def status_text(stats: Stats) -> str:
    """The figures in a dozen lines: memory, disk, shards, pins, who waits, who holds the memory."""
    rows = [
        ("node", f"{stats.node}, pid {stats.pid}, up {_duration(stats.uptime_s)}, {stats.clients} clients"),
        ("memory", _share(stats.memory_used, stats.memory_budget) + f"  peak {format_size(stats.memory_peak)}"),
        ("disk", _share(stats.disk_used, stats.disk_budget)),
        ("shards", f"{stats.shards}, of them {stats.spilled_shards} on disk only"),
        ("pinned", format_size(stats.pinned_bytes)),
        ("reserved", format_size(stats.reserved_bytes)),
        ("waiting", f"{stats.waiting} requests for {format_size(stats.waiting_bytes)}"),
        ("waited", f"{stats.waits} times, {stats.waited_s:.1f} s in all"),
        ("put", f"{format_size(stats.put_bytes)}, freed {format_size(stats.freed_bytes)}"),
        ("spilled", f"{format_size(stats.spilled_bytes)}, restored {format_size(stats.restored_bytes)}"),
    ]
    if stats.spill_error:
        rows.append(("error", stats.spill_error))
    rows += [("holds", f"{format_size(h['bytes']):>10} {h['how']:<8} {h['holder']}") for h in stats.holders[:10]]
    return "\n".join(f"{name:<9} {text}" for name, text in rows)


def _share(used: int, budget: int) -> str:
    if not budget:
        return "off"
    filled = round(_BAR * used / budget)
    bar = "#" * filled + "." * (_BAR - filled)
    return f"[{bar}] {format_size(used)} of {format_size(budget)} ({100 * used / budget:.0f} %)"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"

"""A node's statistics as text that fits a terminal, redrawn by `dataplane top`.

`frame` is a pure function of a node's statistics at two times. It uses no colour and no escape sequences, so a frame
can be printed anywhere. `dataplane.cli` clears the screen and reads the keys.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from dataplane.config import format_size
from dataplane.observe.stats import Stats
from dataplane.observe.status import (
    counted,
    disk_text,
    duration,
    hints,
    printable,
    share,
    stream_text,
    waiters,
    waiting_text,
)
from dataplane.store.budget import attributed

_TASK = "  {:<20} {:>10} {:>10} {:>12} {:>8} {:>10} {:>7}"
_HOLDERS = 5


def frame(stats: Stats, previous: Stats | None, seconds: float, width: int, height: int) -> str:
    """The statistics in at most `height` lines of at most `width` columns, with rates over the `seconds` since
    `previous`. No rates if `previous` is None or of another node."""
    if previous is not None and (previous.node != stats.node or seconds <= 0):
        previous = None
    lines = [_fit(line, width) for line in _lines(stats, previous, seconds, width)]
    if len(lines) > height:
        more = len(lines) - height + 1
        lines = [*lines[: height - 1], _fit(f"... and {more} lines more", width)][:height]
    return "\n".join(lines)


def _lines(stats: Stats, previous: Stats | None, seconds: float, width: int) -> Iterator[str]:
    bar = max(8, min(40, width - 44))
    yield f"dataplane {stats.node}  pid {stats.pid}  up {duration(stats.uptime_s)}  {counted(stats.clients, 'client')}"
    yield f"memory {share(stats.memory_used, stats.memory_budget, bar)}"
    yield f"disk   {disk_text(stats, bar)}"
    yield (
        f"shards {stats.shards:,} ({stats.spilled_shards:,} on disk only)"
        f"  pinned {format_size(stats.pinned_bytes)}  reserved {format_size(stats.reserved_bytes)}"
    )
    if previous is not None:
        shown = [
            "put",
            "spilled",
            "restored",
            *(["fetched", "sent"] if stats.fetched_bytes or stats.sent_bytes else []),
        ]
        pairs = [(what, getattr(stats, f"{what}_bytes"), getattr(previous, f"{what}_bytes")) for what in shown]
        rates = [f"{what} {format_size(_rate(now, then, seconds))}/s" for what, now, then in pairs]
        yield "bytes  " + "  ".join(rates)
    if stats.spill_error:
        yield f"error  {stats.spill_error}"
    yield from _waiting(stats)
    if stats.streams:
        yield ""
        yield _TASK.format("stream and task", "pending", "leased", "acked", "rows/s", "gone", "waiting").rstrip()
        for name, stream in stats.streams.items():
            before = previous.streams.get(name) if previous is not None else None
            yield from _stream(name, stream, before, seconds)
    if stats.holders:
        yield ""
        yield "who holds memory and disk"
        for holder in stats.holders[:_HOLDERS]:
            yield f"  {format_size(holder['bytes']):>10} {holder['how']:<8} {holder['holder']}{attributed(holder)}"


def _waiting(stats: Stats) -> Iterator[str]:
    """The waiting clients, which come first, as the most important part."""
    lines = [f"{name}: {line}" for name, stream in stats.streams.items() for line in waiters(stream)]
    if stats.waiting:
        lines.insert(0, f"memory: {waiting_text(stats)}")
    if lines:
        yield ""
        yield "who waits for what"
        yield from (f"  {line}" for line in lines)


def _stream(name: str, stream: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> Iterator[str]:
    arriving = "" if before is None else f", {_rate(stream['appended'], before['appended'], seconds):,.0f} rows/s in"
    yield f"{name}: {stream_text(stream)}{arriving}"
    for task, figures in stream["task"].items():
        then = None if before is None else before["task"].get(task)
        rate = "" if then is None else f"{_rate(figures['acked'], then['acked'], seconds):,.0f}"
        yield _TASK.format(
            _fit(printable(task), 20),
            f"{figures['pending']:,}",
            f"{figures['leased']:,}",
            f"{figures['acked']:,}",
            rate,
            f"{figures['expired'] + figures['dead']:,}",
            f"{figures['waiting']:,}",
        )
    yield from (f"  {line}" for line in hints(stream))


def _rate(now: float, then: float, seconds: float) -> float:
    """The increase per second. It is 0 if the counter restarted, because a stream was dropped and created again."""
    return max(0.0, (now - then) / seconds)


def _fit(text: str, width: int) -> str:
    """The text, without control characters, cut to this many columns."""
    text = printable(text)
    if text.isascii():
        return text[:width]
    columns = 0
    for i, character in enumerate(text):
        wide = unicodedata.east_asian_width(character) in "WF"
        columns += 0 if unicodedata.combining(character) else 2 if wide else 1
        if columns > width:
            return text[:i]
    return text

"""Advice for each kind of cause: a setting of the plane, of a role, or the code, and a sentence."""

from __future__ import annotations

from typing import Any

_ADVICE: dict[str, tuple[str, str]] = {
    "code": ("workers", "make it faster, or give the role {role} more processes"),
    "skew": (
        "sampler",
        "rows differ much in length: balance tokens (TokenBalanced), cap them, or append rows alone",
    ),
    "tail": ("workers", "it takes long at times: bound it by a timeout, overlap it, or give {role} more processes"),
    "lock": ("", "{role} waits for another thread or process here: shorten what is done under it, or do without"),
    "straggler": ("placement", "process {pids} takes {ratio:.1f} times as long as those alike: move or replace it"),
    "host": ("placement", "host {host} takes {ratio:.1f} times as long as others: move roles off it, or mend it"),
    "ack": ("max_rows", "rows wait for this before they are acked: ack as soon as they are read, or raise {what}"),
    "budget": (
        "memory",
        "producers wait for memory: raise NodeConfig.memory, free earlier, or use dedupe",
    ),
    "disk": (
        "spill_dir",
        "the disk is waited for: use a faster spill_dir, more memory, or dedupe",
    ),
    "link": (
        "placement",
        "bytes come over the link from another host: put {role} beside their producer, or use dedupe",
    ),
    "prefetch": ("prefetch", "rows are asked for when they are needed: use deliveries(..., prefetch={prefetch})"),
    "limit": ("{what}", "producers and consumers wait for each other: raise {what} of the stream"),
    "processor": (
        "placement",
        "the job wants more processors than {host} has: move processes off it, start fewer, or give them fewer threads",
    ),
    "collective": (
        "",
        "all ranks wait here alike, for bytes or one that is late by turns: balance tokens over ranks, or overlap it",
    ),
    "plane": ("rows", "it is in calls of the plane: bring or take more rows at a time"),
}


def advice(kind: str, **said: Any) -> tuple[str, str]:
    """The setting (empty for code) and the sentence."""
    setting, sentence = _ADVICE[kind]
    return setting.format(**said), sentence.format(**said)

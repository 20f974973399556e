"""Figures of a node as it might be."""

from __future__ import annotations

from typing import Any

from dataplane.observe.stats import Stats

GIB = 1 << 30


def task(**changed: Any) -> dict[str, Any]:
    counts = ("pending", "leased", "dead", "delivered", "redelivered", "acked", "expired", "left", "waiting")
    return dict.fromkeys(counts, 0) | {"ready": {}, "incomplete": []} | changed


def stream(**changed: Any) -> dict[str, Any]:
    return {
        "tasks": ["reward", "actor"],
        "max_bytes": 2 * GIB,
        "max_rows": 4096,
        "max_lag": -1,
        "max_deliveries": 5,
        "rows": 1500,
        "bytes": GIB,
        "appended": 5000,
        "oldest_s": 65.0,
        "latest_version": 7,
        "closed": False,
        "unfinished": 0,
        "waiting": 0,
        "groups": 0,
        "behind": [],
        "task": {"reward": task(pending=500, acked=4500), "actor": task(pending=1200, leased=300, acked=3500)},
    } | changed


def stats(**changed: Any) -> Stats:
    figures: dict[str, Any] = {
        "node": "5d0c1f2e",
        "pid": 17,
        "memory_used": 3 * GIB,
        "memory_budget": 4 * GIB,
        "disk_budget": 8 * GIB,
        "clients": 2,
        "uptime_s": 3700.0,
        "holders": ({"holder": "train.py (31)", "bytes": GIB, "how": "pinned"},),
        "streams": {"rollouts": stream()},
    }
    return Stats.of(figures | changed)

"""Looks at a cluster as it might be."""

from __future__ import annotations

from typing import Any

from dataplane.observe.stats import Stats
from dataplane.web.cluster_view import ClusterView
from tests.unit.observe.figures import stream, task

A, B, C = "a" * 16, "b" * 16, "c" * 16


def stats(node: str, uptime_s: float = 100.0, **changed: Any) -> Stats:
    given: dict[str, Any] = {"node": node, "pid": 7, "memory_budget": 1 << 30, "uptime_s": uptime_s}
    return Stats.of(given | changed)


def looked(at_s: float, *hosts: Stats, silent: dict[str, str] | None = None, **changed: Any) -> ClusterView:
    """A look of this moment at these hosts of a cluster."""
    nodes = [host.node for host in hosts] + [*(silent or {})]
    members = {node: {"address": f"tcp://{node[0]}:1", "transports": {"tcp": ""}} for node in nodes}
    found = {"members": members, "coordination": {"coordinator": "etcd at x", "answers": True}} | changed
    return ClusterView(
        at_s=at_s,
        wall_s=1e9 + at_s,
        own=A,
        members=found,
        stats={host.node: host for host in hosts},
        answer_s={host.node: 0.002 for host in hosts},
        silent=silent or {},
    )


def part(appended: int, acked: int, **changed: Any) -> dict[str, Any]:
    """A host's share of a stream with the tasks reward and actor."""
    done = {"reward": task(acked=acked, pending=appended - acked), "actor": task(acked=acked)}
    return stream(appended=appended, rows=appended - acked, task=done) | changed

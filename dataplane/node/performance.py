"""The performance reports of a node's clients, and their waits in the node, as plain values.

Invariant: an answer is no larger than a message; clients that do not fit are counted in `left_out`.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from typing import Any, Protocol

from dataplane.waiting import ClientWaits, busy_s, computed_s, processor_s, processors

MOST_BYTES = 3 << 20
_ENTRY = 64  # bytes, about, of one wait or one request that ended it


class Reporting(Protocol):
    """The fields of a client that its performance report needs."""

    number: int
    pid: int
    label: str
    graph: bytes
    waits: ClientWaits


def graphs_of(node: bytes, clients: Collection[Reporting], fetching_s: float = 0.0) -> dict[str, Any]:
    """For each client that has reported: its `number`, `pid`, `label`, `graph`, and `request_bytes` as
    `ClientWaits.told`. `fetching_s`: seconds during which bytes from other hosts were in transit to this node."""
    found, left_out, nbytes = [], 0, 0
    for client in clients:
        if not client.graph:
            continue
        waits = client.waits.told()
        nbytes += len(client.graph) + _ENTRY * sum(1 + len(each[-1]) for each in waits)
        if nbytes > MOST_BYTES:
            left_out += 1
            continue
        found.append(
            {
                "number": client.number,
                "pid": client.pid,
                "label": client.label,
                "graph": client.graph,
                "waits": waits,
            }
        )

    def load() -> float:
        """Runnable processes for each processor, over the last minute."""
        return os.getloadavg()[0] / (os.cpu_count() or 1)

    ran_s, queued_s = processor_s()
    return {
        "node": node.hex(),
        "host": socket.gethostname(),
        "clients": found,
        "left_out": left_out,
        "load": load(),
        "ran_s": ran_s,
        "queued_s": queued_s,
        "seconds": time.monotonic(),
        "computed_s": computed_s(),
        "processors": processors(),
        "busy_s": busy_s(),
        "fetching_s": fetching_s,
    }

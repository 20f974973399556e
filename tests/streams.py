"""What tests of streams say again and again. Their rows have a column "x" of numbers."""

from __future__ import annotations

from typing import Any


def values(delivery: Any) -> list[int]:
    return [int(x) for x in delivery.get("x")["x"].to_list()]


def take(stream: Any, task: str = "a", rows: int = 100, timeout: float = 0, **how: Any) -> list[int]:
    """Those of one delivery, acked."""
    with stream.consume(task, rows=rows, timeout=timeout, **{"columns": ["x"]} | how) as delivery:
        return values(delivery)

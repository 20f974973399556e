"""Sums of streams' counts: bounded in number, and never going back."""

from __future__ import annotations

from typing import Any

from dataplane.observe.ledger import Ledger, StreamCounts, TaskCounts
from dataplane.observe.snapshot import NAMED, OTHERS, StreamFigures


def stream(name: str, lag: int = 0, acked: int = 0, appended: int = 0, **changed: Any) -> StreamCounts:
    task = TaskCounts(lag, 0, (acked, 0, acked, 0))
    given: dict[str, Any] = {"tasks": {"actor": task}} | changed
    return StreamCounts(given.pop("identity", name), name, lag, 10 * lag, 1.0, 0, appended, **given)


def test_streams_with_the_most_lag_are_named_and_the_rest_are_summed() -> None:
    found = Ledger().look([stream(f"s{n:04}", lag=n, acked=2 * n, appended=3 * n) for n in range(1000)])
    assert len(found) == NAMED + 1
    assert set(found) - {OTHERS} == {f"s{n:04}" for n in range(950, 1000)}
    others = StreamFigures.of(found[OTHERS])
    assert others.rows == sum(range(950))
    assert others.appended == 3 * sum(range(950))
    assert others.tasks[OTHERS].acked == 2 * sum(range(950))


def test_sums_never_decrease_when_streams_change_rank_or_are_dropped() -> None:
    ledger = Ledger(named=1)
    before = 0
    acked = {"a": 100, "b": 50}
    for step in range(20):
        lag = {"a": step % 3, "b": 1}
        for name in acked:
            acked[name] += 10
        found = ledger.look([stream(name, lag=lag[name], acked=acked[name]) for name in acked])
        others = StreamFigures.of(found[OTHERS]).tasks[OTHERS].acked
        assert others >= before
        before = others
    assert ledger.counts[2] == sum(acked.values())
    ledger.close(stream("b", acked=acked["b"] + 7))
    found = ledger.look([stream("a", acked=acked["a"])])
    assert ledger.counts[2] == sum(acked.values()) + 7
    assert StreamFigures.of(found[OTHERS]).tasks[OTHERS].acked >= before

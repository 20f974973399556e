"""Rows by themselves beside other systems: what our end does, and what is made of the figures."""

from __future__ import annotations

from pathlib import Path

import dataplane as dp
from bench import singly


def test_our_end_puts_and_reads_each_row(tmp_path: Path) -> None:
    with dp.connect(config=dp.NodeConfig(memory="64MiB", prewarm=0, spill=0, spill_dir=tmp_path)) as plane:
        end = singly.Ours(plane.address)
        try:
            assert end.one_by_one(singly.IN_FLIGHT) > 0
            assert end.in_flight(singly.IN_FLIGHT) > 0
            assert plane.stream(singly._NAME).stats()["rows"] == singly.TOGETHER
            assert end.consume(singly.TOGETHER) > 0
            assert plane.stream(singly._NAME).stats()["rows"] == 0
            seconds, refs = end.put(3)
            assert seconds > 0
            assert end.get(refs) > 0
            end.free(refs)
            assert plane.stats().shards == 0
        finally:
            end._plane.close()


def test_each_system_is_compared_in_what_it_does() -> None:
    ours = [{"one by one": 100.0, "passed": 10.0}, {"one by one": 200.0, "passed": 30.0}]
    found = {
        "dataplane": ours,
        "transferqueue": [{"one by one": 300.0}, {"one by one": 400.0}],
        "ray": [{"passed": 5.0}, {"passed": 6.0}],
    }
    rows = singly.compared(found)
    assert [row.runs for row in rows] == [[3.0, 2.0], [0.5, 0.2]]
    assert [row.met for row in rows] == [True, False]

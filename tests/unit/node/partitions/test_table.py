"""Placement tables: which partition a group goes to, and what of that changes with a version."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from dataplane.errors import Corrupt, Misuse
from dataplane.node.partitions import table as tables
from dataplane.node.partitions.table import MAX_OLDER, LostPartition, Table

GROUPS = [f"g{i}" for i in range(2000)]


def made(*nodes: str) -> Table:
    return Table(0, "rollouts", "a1", b"settings", 1).extended(nodes)


def test_groups_are_spread_evenly_and_by_all_alike() -> None:
    table = made("a", "b", "c", "d")
    places = table.place(GROUPS)
    assert np.array_equal(places, tables.decode(tables.encode(table)).place(GROUPS))
    counts = np.bincount(places)
    assert counts.min() > 0.8 * len(GROUPS) / 4
    assert [table.key(number) for number in table.open[:2]] == ["rollouts/a1/0-a", "rollouts/a1/1-b"]


def test_a_node_that_joins_wins_its_share_and_nothing_else_moves() -> None:
    before = made("a", "b", "c")
    after = before.extended(["d"])
    assert after.version == before.version + 1
    assert after.own("d") == 3
    now = after.place(GROUPS)
    changed = now != before.place(GROUPS)
    assert set(now[changed]) == {3}
    assert abs(changed.mean() - 1 / 4) < 0.05
    ((version, positions, numbers),) = after.moved(GROUPS, now)
    assert version == before.version
    assert np.array_equal(positions, np.flatnonzero(changed))
    assert np.array_equal(numbers, before.place(GROUPS)[changed])
    assert after.retired(version).moved(GROUPS, now) == []


def test_versions_that_are_needed_are_bounded() -> None:
    table = made("a")
    for number in range(MAX_OLDER):
        table = table.extended([f"n{number}"])
    with pytest.raises(Misuse, match="versions of its placement"):
        table.extended(["x"])
    assert table.retired(table.older[0][0]).extended(["x"]).own("x") is not None


def test_a_value_that_is_no_table_is_corrupt() -> None:
    for value in (b"", b"\x00", msgspec.msgpack.encode([1, "x"])):
        with pytest.raises(Corrupt):
            tables.decode(value)


def test_a_partitions_number_is_its_nodes_own_before_it_is_open() -> None:
    first = made("a")
    one, two = first.reserving("b"), first.reserving("b").reserving("c")
    assert (one.open, one.version, one.reserving("b")) == (first.open, first.version + 1, one)
    b, c = two.reserved
    assert {b.number, c.number}.isdisjoint(first.open)
    opened = two.opening(c)
    assert (opened.own("c"), opened.own("b"), opened.reserved_for("b")) == (c.number, None, b)
    assert tables.decode(tables.encode(opened)) == opened
    assert opened.opening(c) == opened, "it is open"
    assert opened.unreserved(b).reserved == ()


def test_a_lost_partition_goes_though_older_sets_are_many() -> None:
    wide = made("a", "b")
    while not wide.full:
        wide = wide.extended([f"n{wide.next}"])
    with pytest.raises(Misuse):
        wide.draining(0)
    assert wide.losing(LostPartition(0, "a")).find(0) is None

"""A stream read in blocks and restored from them: it goes on where the first was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from dataplane.batch.ref import BatchRef
from dataplane.errors import Closed, Corrupt, LeaseExpired, Misuse
from dataplane.stream import requests as r
from dataplane.stream.lease import RowLease, Who
from dataplane.stream.packing import PackedIntegers, pack
from dataplane.stream.page import PAGE, Index
from dataplane.stream.pieces import Begun
from dataplane.stream.progress import ACKED, DEAD, EXPIRED, LEASED
from dataplane.stream.row_metadata import UNFINISHED
from dataplane.stream.sampler import CompleteGroups, Fifo
from dataplane.stream.settings import StreamSettings
from dataplane.stream.snapshot import StreamSnapshot, finish, restore_block, restore_column_batch, restore_head
from dataplane.stream.snapshot_format import Head, decode_rows, encode_rows
from tests.cases import each_case
from tests.unit.stream import example_streams
from tests.unit.stream.example_streams import stored

TASKS = ("reward", "actor")
NOW, LATER = 1000.0, 5.0  # by the clocks of the first node and of the next, which have nothing in common


class Stream(example_streams.Stream):
    def __init__(self, **limits: int) -> None:
        super().__init__(StreamSettings(TASKS, **limits), "m", NOW)

    def append(self, rows: int, **said: Any) -> tuple[int, bool]:
        return super().append(rows, **{"digest": b"d"} | said)

    def taken(self, rows: int = 100, task: str = "actor", columns: Sequence[str] = ("x",), how: Any = None) -> RowLease:
        """A grant; one of no rows if there are none, or no more."""
        asked = self.consume(rows, task, columns=columns, sampler=how)
        self.withdraw(asked)
        assert all(isinstance(error, Closed | Misuse) for error in asked.errors)
        number = self.leased.settings.task(task)
        return asked.grant if asked.got else RowLease(0, number, np.empty(0, np.int64), (), Who("c"), 0.0, 0.0)

    def rows(self) -> Index:
        pages = self.leased.partition.rows.pages.values()
        return np.concatenate([page.first + np.flatnonzero(page.present) for page in pages] or [np.empty(0, np.int64)])


Contents = list[tuple[bytes, list[tuple[Index, int, BatchRef]]]]


def sent(what: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(what), type=type(what))


def contents(snapshot: StreamSnapshot, size: int = PAGE) -> Contents:
    starts = [start for page in snapshot.pages for start in range(page * PAGE, (page + 1) * PAGE, size)]
    limits = [min(size, PAGE - start % PAGE) for start in starts]
    return [(snapshot.block(*at), snapshot.columns(*at)) for at in zip(starts, limits, strict=True)]


def empty(head: Head) -> Stream:
    """The stream of a head, without rows."""
    again = Stream.__new__(Stream)
    example_streams.Stream.__init__(again, head.settings, head.mark, LATER)
    restore_head(again.leased, head)
    return again


def restored(stream: Stream, size: int = PAGE) -> Stream:
    """The stream as it is now, made again from blocks of so many numbers."""
    snapshot = StreamSnapshot(stream.leased, stream.now)
    again = empty(sent(snapshot.head))
    for block, columns in contents(snapshot, size):
        restore_block(again.leased, block, again.now)
        for rows, task, ref in columns:
            restore_column_batch(again.leased, rows, task, ref)
    finish(again.leased)
    again.shards = stream.shards + 1000
    return again


def known(stream: Stream) -> tuple[Any, ...]:
    """All that the home knows of each row, and where each column is."""
    leased, rows = stream.leased, stream.rows()
    places = leased.partition.rows.places(rows)
    groups, versions, tags = leased.partition.labels(rows)
    numbers = leased.partition.metadata.groups(places)
    states = leased.partition.progress.states(places, len(rows))
    done = (states == ACKED) | (states == EXPIRED)
    columns = {}
    for name in leased.partition.rows.schema.fields:
        having = rows[leased.partition.rows.holds(rows, name) > -2]
        if len(having):
            columns[name] = having.tolist(), leased.partition.rows.ref(having, [name])
    return (
        leased.partition.keys.names(rows),
        groups,
        versions,
        {name: values for name, values in tags.items() if set(values) != {None}},
        np.round(stream.now - leased.partition.metadata.arrived(places), 6).tolist(),
        leased.partition.metadata.lengths(leased.partition.rows.places(rows), "ids").tolist(),
        states.tolist(),
        np.where(done, 0, leased.partition.progress.tries(places, len(rows))).tolist(),
        [np.stack(leased.partition.groups.sizes(numbers, task)).tolist() for task in range(len(TASKS))],
        columns,
    )


def state_of(stream: Stream) -> dict[str, Any]:
    """The stream's figures, but for bytes, which other batches count, for deliveries, which are counted again
    from 0, for who waits for groups, and for columns that no row has any more, which a copy does not know."""
    found = stream.figures()
    for task in found["task"].values():
        del task["incomplete"], task["expired"], task["delivered"], task["redelivered"]
    return {name: value for name, value in found.items() if name not in ("bytes", "columns")} | {
        "oldest_s": round(found["oldest_s"], 6)
    }


def assert_same(stream: Stream, again: Stream) -> None:
    """The second is what the first becomes when all that is held there is given back unseen."""
    for of, before in zip(again.leased.partition.progress.counts, stream.leased.partition.progress.counts, strict=True):
        assert [of[what] for what in (ACKED, EXPIRED, DEAD)] == [before[what] for what in (ACKED, EXPIRED, DEAD)]
    for grant in stream.leased.leases:
        stream.nack(grant, seen=False)
    assert known(again) == known(stream)
    again.leased.asked.update(stream.leased.asked)  # of requests to the leader, and not in a checkpoint
    assert state_of(again) == state_of(stream)
    assert again.leased.partition.nbytes <= stream.leased.partition.nbytes


def test_row_numbers_assigned_after_the_snapshot_are_not_reused() -> None:
    stream = Stream()
    stream.append(3)
    again = restored(stream)
    first, _ = stream.append(PAGE, columns=["x"])
    lost = stream.leased.partition.keys.names(np.array([first, first + PAGE - 1]))
    new, _ = again.append(2)
    assert new > first + PAGE
    with pytest.raises(Misuse, match="not in the stream"):
        again.leased.partition.require(again.leased.partition.keys.numbers(lost))
    assert again.taken().rows.tolist() == [0, 1, 2, new, new + 1]


OPERATIONS = st.one_of(
    st.tuples(
        st.just("append"),
        st.integers(1, 5),
        st.booleans(),
        st.one_of(st.none(), st.lists(st.sampled_from(["g", 7, "h"]), min_size=5, max_size=5)),
        st.integers(0, 3),
        st.sampled_from([None, "t", "u"]),
        st.sampled_from([("x",), ("x", "ids"), ("y",)]),
    ),
    st.tuples(
        st.just("consume"), st.sampled_from(TASKS), st.integers(1, 6), st.sampled_from([("x",), ("x", "z"), ("y",)])
    ),
    st.tuples(st.sampled_from(["ack", "nack", "unseen"]), st.integers(0, 9)),
    st.tuples(st.just("extend"), st.integers(0, 9), st.sampled_from([("z",), ("y",), ("y", "z")]), st.integers(1, 5)),
    st.tuples(st.just("more"), st.integers(0, 40), st.sampled_from([("z",), ("y", "ids")]), st.booleans()),
    st.tuples(st.just("drop"), st.integers(0, 40), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.sampled_from([0.5, 11.0])),
    st.tuples(st.just("groups"), st.sampled_from(TASKS), st.integers(1, 3)),
    st.tuples(st.just("close")),
)


def perform(stream: Stream, operation: tuple[Any, ...]) -> None:
    match operation:
        case "append", rows, named, groups, version, tag, columns:
            keys = [f"{stream.shards}-{i}" for i in range(rows)] if named else []
            tags = {tag: list(range(rows))} if tag else None
            lengths = {"ids": np.arange(rows) + 1} if "ids" in columns else None
            groups = groups and groups[:rows]
            stream.append(rows, keys=keys, groups=groups, version=version, tags=tags, columns=columns, lengths=lengths)
        case "consume", task, rows, columns:
            stream.taken(rows, task, columns)
        case "groups", task, size:
            stream.taken(6, task, how=CompleteGroups(size))
        case "more", at, columns, replace:
            stream.extend(picked(stream, at, 2), *columns, replace=replace)
        case "drop", at, count:
            stream.drop(*picked(stream, at, count))
        case "wait", seconds:
            stream.settle(stream.now + seconds)
        case ("close",):
            stream.run(r.Close())
        case what, at, *more:
            held = list(stream.leased.leases)
            if not held:
                return
            grant = held[at % len(held)]
            if what == "extend":
                stream.extend(grant.rows[: more[1]], *more[0], by=grant)
            elif what == "ack":
                stream.ack(grant)
            else:
                stream.nack(grant, seen=what == "nack")


def picked(stream: Stream, at: int, count: int) -> Index:
    rows = stream.rows()
    return np.unique(rows[(at + np.arange(count)) % len(rows)]) if len(rows) else rows


def everything(stream: Stream, size: int) -> Iterator[Any]:
    """What is delivered from now on, to each task in turn, all acked."""
    for columns in (("x", "z"), ("x",), ("y",)):
        for task in TASKS:
            for how in (CompleteGroups(size), Fifo()):
                while len((grant := stream.taken(6, task, columns, how)).rows):
                    yield task, columns, grant.rows.tolist(), stream.leased.partition.rows.ref(grant.rows, columns)
                    stream.ack(grant)


@given(
    history=st.lists(OPERATIONS, min_size=3, max_size=25),
    late=st.booleans(),
    deliveries=st.integers(1, 3),
    size=st.sampled_from([PAGE, 1500]),
    group=st.integers(1, 3),
)
def test_a_restored_stream_continues_like_the_original(
    history: list[tuple[Any, ...]], late: bool, deliveries: int, size: int, group: int
) -> None:
    stream = Stream(max_deliveries=deliveries)
    if late:  # so that rows lie in two pages
        stream.append(PAGE - 3)
        stream.drop(*range(PAGE - 5))
    for operation in history:
        try:
            perform(stream, operation)
        except (Misuse, LeaseExpired):  # a closed stream, a column that is there
            pass
    again = restored(stream, size)
    assert_same(stream, again)
    assert list(everything(again, group)) == list(everything(stream, group))
    assert known(again) == known(stream)


def packed(*numbers: float) -> PackedIntegers:
    return pack(np.array(numbers))


def of_three(**other: Any) -> tuple[Head, bytes]:
    """A head, and a block of three of its ten rows, with these fields otherwise."""
    stream = Stream()
    stream.append(3, keys=list("abc"), groups=["g", "g", 1], tags={"t": [1, 2, 3]})
    stream.append(7)
    stream.drop(*range(3, 10))
    snapshot = StreamSnapshot(stream.leased, NOW)
    return snapshot.head, changed(snapshot.block(0, PAGE), **other)


def changed(block: bytes, **other: Any) -> bytes:
    return encode_rows(msgspec.structs.replace(decode_rows(block), **other))


@each_case(
    "other",
    [
        {"offsets": packed(2, 1, 0)}, {"offsets": packed(0, 0, 1)}, {"offsets": packed(-1, 0, 1)},
        {"offsets": packed(0, 1, 10)}, {"offsets": packed(0, 1, 1 << 62)},
        {"offsets": packed((1 << 63) - 1, -(1 << 63), -(1 << 63) + 1)},  # each more than the one before, overflowing
        {"offsets": packed(0, 1)}, {"offsets": packed(0, 1, 2, 3)}, {"offsets": packed(0.0, 1.0, 2.0)},
        {"offsets": PackedIntegers(1 << 60, 0, 1)},  # as many as would fill the memory
        {"offsets": PackedIntegers(-1)}, {"offsets": PackedIntegers(3, (1 << 64) - 1, 1)},
        {"offsets": PackedIntegers(3, 0, (1 << 64) - 1)}, {"versions": PackedIntegers(0)},
        {"versions": packed(0, 0, 0, 0)},
        {"versions": packed(0.5, 0, 0)}, {"arrived": packed(0.5, 0)}, {"arrived": packed(0, 0, np.nan)},
        {"arrived": packed(0, np.inf, 0)}, {"states": PackedIntegers(5)}, {"states": PackedIntegers(7)},
        {"states": PackedIntegers(6, LEASED)}, {"states": PackedIntegers(6, 5)}, {"states": PackedIntegers(6, -1)},
        {"tries": PackedIntegers(5)}, {"tries": PackedIntegers(6, 256)}, {"tries": PackedIntegers(6, -1)},
        {"dropped": packed(0, 1, 0)},
        {"dropped": PackedIntegers(2)}, {"group": PackedIntegers(2)}, {"group": packed(0, 0, 2)},
        {"group": packed(0, 0, -2)},
        {"group": packed(0, 0, 0)},  # and so no row is in the other
        {"groups": ["g"]}, {"groups": ["g", "g"]}, {"groups": ["g", 1, 2]}, {"drops": [(2, [0, 1])]},
        {"drops": [(-1, [0, 1])]}, {"drops": [(0, [1])]}, {"drops": [(0, [0, -1])]},
        {"drops": [(0, [1 << 63, 1])]}, {"keyed": packed(0, 1)}, {"keyed": packed(0, 1, 3)},
        {"keyed": packed(0, 2, 1)}, {"keys": []}, {"keys": ["a", "b"]}, {"keys": ["a", "a", "c"]},
        {"keys": ["a", "b", ""]}, {"keys": ["~m.0", "b", "c"]}, {"calls": [("d", 0, 3, b"d")]},
        {"tags": {"t": []}}, {"tags": {"t": [1] * 4}}, {"tags": {f"{i}": [1] * 3 for i in range(300)}},
        {"lengths": {"ids": PackedIntegers(2)}}, {"lengths": {"ids": packed(0, 1, -1)}},
        {"lengths": {f"{i}": PackedIntegers(3) for i in range(65)}}, {"begun": [Begun(3, 0, "", 1.0, "ids", 0)]},
        {"begun": [Begun(0, 0, "", 1.0, "ids", 0)]},  # its version says that it is finished
        {"begun": [Begun(0, 0, "", 1.0, "ids", 0)] * 2, "versions": PackedIntegers(3, UNFINISHED)},
        {"begun": [Begun(0, 0, "", 1.0, "ids", 0, pieces=-1)], "versions": PackedIntegers(3, UNFINISHED)},
        {"reasons": [(0, 0, "r")]}, {"reasons": [(0, 3, "r")]}, {"reasons": [(2, 0, "r")]},
    ],
    ids=lambda other: f"{other}"[:40],
)  # fmt: skip
def test_an_invalid_snapshot_block_is_corrupt(other: dict[str, Any]) -> None:
    head, block = of_three(**other)
    again = empty(head)
    state = again.alone.machine.snapshot()
    for wrong in (block, block[:-1]):
        with pytest.raises(Corrupt):
            restore_block(again.leased, wrong, LATER)
    assert again.alone.machine.snapshot() == state, "nothing has changed"
    again.alone.end()


def test_repeated_or_out_of_order_snapshot_blocks_are_corrupt() -> None:
    stream = Stream()
    stream.append(2 * PAGE, keys=[f"{i}" for i in range(2 * PAGE)])
    snapshot = StreamSnapshot(stream.leased, NOW)
    first, second, third = (snapshot.block(at, 100) for at in (0, 50, PAGE))
    again = empty(snapshot.head)
    restore_block(again.leased, first, LATER)
    for repeated in (first, second):
        with pytest.raises(Corrupt):
            restore_block(again.leased, repeated, LATER)
    restore_block(again.leased, third, LATER)
    with pytest.raises(Corrupt):
        restore_block(again.leased, snapshot.block(200, 100), LATER)
    with pytest.raises(Corrupt, match="already"):  # a key of another's
        restore_block(
            again.leased, changed(snapshot.block(PAGE + 100, 100), keys=decode_rows(first).keys, calls=[]), LATER
        )
    assert again.leased.partition.rows.count == 200


@each_case(
    "other",
    [
        {"next": -1}, {"next": 1 << 62}, {"counts": []}, {"counts": [[0] * 3]}, {"counts": [[0] * 2] * 2},
        {"counts": [[0, 0, -1]] * 2}, {"counts": [[(1 << 64) - 1] * 3] * 2}, {"appended": -1},
        {"appended": (1 << 64) - 1}, {"latest": (1 << 64) - 1},
    ],
    ids=lambda other: f"{other}"[:40],
)  # fmt: skip
def test_an_invalid_snapshot_head_is_corrupt(other: dict[str, Any]) -> None:
    head, _ = of_three()
    with pytest.raises(Corrupt):
        empty(msgspec.structs.replace(head, **other))


@each_case(
    ("rows", "task", "count"),
    [
        ([0, 1, 3], 0, 3),  # of which one is not there
        ([0, 1, -1], 0, 3),
        ([0, 1, 1 << 62], 0, 3),
        ([0, 0, 1], 0, 3),
        ([0, 1], 0, 3),
        ([0, 1, 2], 0, 2),
        ([0, 1, 2], 2, 3),
        ([0, 1, 2], -2, 3),
    ],
)
def test_invalid_snapshot_columns_are_corrupt(rows: list[int], task: int, count: int) -> None:
    head, block = of_three()
    again = empty(head)
    restore_block(again.leased, block, LATER)
    with pytest.raises(Corrupt):
        restore_column_batch(again.leased, np.array(rows), task, stored(1, count, "x"))
    restore_column_batch(again.leased, np.arange(3), -1, stored(1, 3, "x"))
    with pytest.raises(Corrupt, match="already"):
        restore_column_batch(again.leased, np.arange(1), -1, stored(2, 1, "x"))
    finish(again.leased)
    assert again.taken().rows.tolist() == [0, 1, 2]

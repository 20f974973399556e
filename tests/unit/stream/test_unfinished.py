"""Rows in progress, against a plain list of pieces: on a leader, followers, and one that comes back from snapshots."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.batch import locations
from dataplane.batch.concat import joined
from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import LeaseExpired, Misuse, NotReady, ProtocolMismatch
from dataplane.stream import requests as r
from dataplane.stream import results, unfinished
from dataplane.stream.pieces import RowPiece, stale_version
from dataplane.stream.settings import StreamSettings
from tests.cases import each_case
from tests.unit.stream.test_machine import INT, INTS, Partition, at

SPANS = Field("ragged", "int64", (None, 3))
NODES = [b"node-one", b"node-two"]


class Rows:
    """Rows in progress of a partition, and what they are by a plain model."""

    def __init__(self) -> None:
        self.part = Partition(StreamSettings(("train",)))
        self.pieces: dict[int, list[tuple[tuple[bytes, int], int, int]]] = {}  # row -> shard, version, tokens
        self.tokens: dict[int, int] = {}
        self.nodes: dict[int, set[bytes]] = {}
        self.free: set[int] = set()
        self.finished: dict[int, list[tuple[tuple[bytes, int], int, int]]] = {}
        self.drawn = 0

    def token(self) -> int:
        self.drawn += 1
        return self.drawn

    def shard(self, node: bytes, name: str, field: Field) -> BatchRef:
        self.part.shards += 1
        return ref_to(node, 1, [(name, field, 8, self.part.shards, 0)])

    def begin(self) -> None:
        token = self.token()
        ref = self.shard(NODES[0], "version_spans", SPANS)
        row = self.part.append(1, ref=ref, client=f"n/1/{token}", begin=(token, 60.0, "x"), versions=at(3)).first
        self.pieces[row], self.tokens[row], self.nodes[row] = [], token, {NODES[0]}

    def grow(self, row: int, node: bytes, version: int, count: int, again: bool) -> None:
        ref, token = self.shard(node, "x", INTS), self.tokens[row]
        piece = RowPiece(token, len(self.pieces[row]), version, False, self.part.shards)
        answers = [self.ask_grow(row, piece, ref, count) for _ in range(1 + again)]
        assert [answer.new for answer in answers] == [True, False][: 1 + again]
        self.pieces[row].append((ref.shards()[0], version, count))
        self.nodes[row].add(node)
        self.free.discard(row)

    def ask_grow(self, row: int, piece: RowPiece, ref: BatchRef, count: int) -> Any:
        lengths = {"x": at(count)} if "x" in ref.columns else {}
        sequence = self.part.sequence()
        return self.part.ask(
            r.ExtendRow(client=f"n/1/{piece.token}", sequence=sequence, row=row, piece=piece, ref=ref, lengths=lengths)
        )

    def spans(self, row: int) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for _, version, count in self.pieces[row]:
            if count and found and found[-1][0] == version:
                found[-1] = version, found[-1][1] + count
            elif count:
                found.append((version, count))
        return found

    def leave(self, row: int) -> None:
        self.part.ask(r.EndClient(client=f"n/1/{self.tokens[row]}"))
        self.free.add(row)

    def take(self, row: int) -> None:
        token, old = self.token(), self.tokens[row]
        ask = r.ResumeRow(client=f"n/1/{token}", sequence=self.part.sequence(), row=row, token=token, lease_s=60.0)
        if row not in self.free:
            with pytest.raises(LeaseExpired):
                self.part.ask(ask)
            return
        (told,) = self.part.ask(ask).rows
        self.tokens[row] = token
        self.free.discard(row)
        assert (told.pieces, [tuple(span) for span in told.spans]) == (len(self.pieces[row]), self.spans(row))
        ref = BatchRef.decode(told.columns)
        shards = ref.select("x").shards() if self.pieces[row] else ()
        assert shards == tuple(shard for shard, _, _ in self.pieces[row])
        with pytest.raises(LeaseExpired):
            self.ask_grow(row, RowPiece(old, told.pieces, 1, False, 7), self.shard(NODES[0], "x", INTS), 1)

    def finish(self, row: int) -> None:
        token, count = self.tokens[row], len(self.pieces[row])
        version = stale_version(self.spans(row), 0.0, 3)
        piece, ref = RowPiece(token, count, version, True, 1), self.shard(NODES[0], "version_spans", SPANS)
        for _ in range(2):
            self.ask_grow(row, piece, ref, 0)
        self.finished[row] = self.pieces.pop(row)

    def give_up(self, row: int) -> None:
        for _ in range(2):
            client = f"n/1/{self.tokens[row]}"
            self.part.ask(r.AbandonRow(client=client, sequence=self.part.sequence(), row=row, token=self.tokens[row]))
        del self.pieces[row]

    def lose(self) -> None:
        self.part.ask(r.Lose(node=NODES[1]))
        for row in [row for row in (*self.pieces, *self.finished) if NODES[1] in self.nodes[row]]:
            self.pieces.pop(row, None)
            self.finished.pop(row, None)
        NODES.append(b"node-%03d" % self.token())
        NODES.pop(1)

    def drain(self) -> None:
        """Every row that was finished is given, with all of its pieces; then nothing is kept."""
        names = [row for row, pieces in self.finished.items() if pieces]
        with suppress(NotReady):
            given = self.part.consume(columns=("x",), rows=1000)
            assert given.rows.tolist() == sorted(names)
            for at_, row in enumerate(given.rows.tolist()):
                assert given.ref[at_].shards() == tuple(shard for shard, _, _ in self.finished[row])
                assert given.versions[at_] == min((v for _, v, n in self.finished[row] if n), default=3)
            self.part.ack(given.grant)
            names = []
        assert not names
        left = [*self.pieces, *self.finished]
        rows = self.part.leader.leased.partition.rows
        there = [row for row in left if rows.there(at(row)).all()]
        if there:
            self.part.ask(r.Drop(client="d", sequence=self.part.sequence(), rows=at(*there)))
        for machine in self.part.machines:
            assert machine.leased.partition.nbytes == 0
            assert machine.leased.partition.rows.count == 0
            assert not machine.outboxes.holders


STEP = st.tuples(
    st.sampled_from(
        ["begin", "grow", "grow", "grow", "grow", "leave", "take", "finish", "give_up", "lose", "fail_over"]
    ),
    st.integers(0, 1 << 16),
    st.integers(0, 3),
    st.integers(0, 4),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, max_size=25))
def test_unfinished_rows_behave_like_plain_lists_of_pieces(steps: list[tuple[str, int, int, int]]) -> None:
    NODES[:] = [b"node-one", b"node-two"]
    rows = Rows()
    rows.begin()
    for what, which, version, count in steps:
        there = sorted(rows.pieces)
        if what == "begin":
            rows.begin()
        elif what == "fail_over":
            rows.part.fail_over()
            rows.free.clear()  # who holds a row may be there still
        elif what == "lose":
            rows.lose()
        elif there:
            row = there[which % len(there)]
            if what == "grow":
                rows.grow(row, NODES[which % 2], version, count, again=which % 3 == 0)
            else:
                getattr(rows, what)(row)
        with pytest.raises(NotReady):
            rows.part.consume(columns=("never",))
    listed = rows.part.ask(r.ListUnfinished(most=100)).rows
    assert [each.row for each in listed] == sorted(rows.pieces)
    assert [[tuple(span) for span in each.spans] for each in listed] == [rows.spans(row) for row in sorted(rows.pieces)]
    rows.drain()


def test_a_copy_of_unfinished_rows_is_not_changed_by_later_growth() -> None:
    """Of a snapshot that is read while the row grows: the last span of a version is changed in place."""
    rows = Rows()
    rows.begin()
    rows.grow(0, NODES[0], 5, 3, again=False)
    partition = rows.part.leader.leased.partition
    copied = partition.copy().unfinished
    rows.grow(0, NODES[0], 5, 4, again=False)
    assert [each.spans for each in copied.state(at(0))] == [[(5, 3)]]
    assert [each.spans for each in partition.unfinished.state(at(0))] == [[(5, 7)]]


def test_a_row_with_as_many_pieces_as_one_may_have_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "MAX_PIECES", 2)
    rows = Rows()
    rows.begin()
    for version in (4, 5):
        rows.grow(0, NODES[0], version, 1, again=True)
    with pytest.raises(Misuse, match="of at most 2"):
        rows.grow(0, NODES[0], 6, 1, again=False)
    rows.finish(0)
    rows.drain()


def test_a_lease_outlives_a_failover_and_ends_by_time() -> None:
    rows = Rows()
    rows.begin()
    rows.part.fail_over()
    rows.take(0)
    rows.part.now += 61.0
    rows.free.add(0)
    rows.take(0)
    assert rows.part.leader.clients()


@each_case(
    ("share", "version"), [(0.0, 1), (0.09, 1), (0.1, 2), (0.5, 2), (0.6, 3), (0.99, 3)], ids=lambda value: str(value)
)
def test_the_stale_version_is_computed_from_the_allowed_share(share: float, version: int) -> None:
    assert stale_version([(2, 3), (1, 1), (2, 2), (3, 4)], share, 9) == version
    assert stale_version([], share, 9) == 9


REFS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None)
@given(REFS, st.data())
def test_joined_rows_are_selected_and_concatenated_like_lists(rows: list[list[int]], data: st.DataObject) -> None:
    def ref(shard: int) -> BatchRef:
        return ref_to(b"the-node", 1, [("x", INTS, 8, shard, 0), ("y", INT, 8, shard, 1)])

    def read(of: BatchRef) -> list[list[int]]:
        found = [
            [piece.shard for piece in locations.pieces(of[i], "x") for _ in range(len(piece.rows))]
            for i in range(len(of))
        ]
        assert [locations.pieces(of[i], "y")[-1].shard for i in range(len(of))] == [row[-1] for row in found]
        return found

    from dataplane.batch.concat import concat

    together = concat([joined([ref(shard) for shard in row]) for row in rows])
    assert read(together) == rows
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    start = data.draw(st.integers(0, len(rows)))
    for made, expected in (
        (together[picked], [rows[i] for i in picked]),
        (together[start:], rows[start:]),
        (together.repeat(2), [row for row in rows for _ in range(2)]),
        (concat([together[picked], together]), [rows[i] for i in picked] + rows),
        (together.select("x").union(together.select("y")), rows),
    ):
        assert read(made) == expected
        assert read(BatchRef.decode(made.encode())) == expected
        assert BatchRef.decode(made.encode()) == made
    other = concat([joined([ref(shard) for shard in row]) for row in rows])
    assert other == together
    if len(rows) > 1 and len(rows[0]) > 1:
        split = concat([ref(rows[0][0]), joined([ref(shard) for shard in rows[0][1:]]), *map(ref, rows[1])])
        assert read(split) != rows


def test_a_reference_with_invalid_bounds_is_refused() -> None:
    import msgspec

    ref = joined([ref_to(b"the-node", 1, [("x", INTS, 8, shard, 0)]) for shard in (1, 2, 3)])
    told = msgspec.msgpack.decode(ref.encode())
    for bounds in (
        (0, 4, b""),
        (1, 4, b""),
        (0, 1, b""),
        (0, 4, b"B\x00\x02\x02\x03"),
        (0, 4, b"B\x00\x04"),
        (0, 0, b""),
    ):
        told[6][0][2] = bounds
        with pytest.raises(ProtocolMismatch):
            BatchRef.decode(msgspec.msgpack.encode(told))
    told[6][0][2] = [0, 4, b"B\x00\x03"]
    assert BatchRef.decode(msgspec.msgpack.encode(told)) == ref


def test_a_restarted_node_is_told_all_pieces_of_rows_in_several_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_HELD", 1)
    rows = Rows()
    for row in range(2):
        rows.begin()
        for _ in range(3):
            rows.grow(row, NODES[0], 3, 1, again=False)
    answers = [rows.part.ask(r.ListHeldColumns(node=NODES[0]))]
    while answers[-1].next >= 0:
        last = answers[-1]
        answers.append(rows.part.ask(r.ListHeldColumns(node=NODES[0], after=last.next, pieces=last.pieces)))
    refs = [ref for answer in answers for ref in answer.refs]
    assert [len(answer.refs) for answer in answers] == [1] * 8
    assert refs == [each.ref.encode() for _, each in rows.part.leader.leased.partition.rows.batches.stored()]

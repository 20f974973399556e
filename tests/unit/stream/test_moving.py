"""Rows that come to a home from elsewhere, and what a node holds of rows whose home is elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, LeaseExpired
from dataplane.stream.admission import Entry
from dataplane.stream.block import Block
from dataplane.stream.facts import Arrival
from dataplane.stream.home import Home
from dataplane.stream.lease import Who
from dataplane.stream.mirror import Mirror
from dataplane.stream.moving import Columns, adopt, renumbered, some_columns
from dataplane.stream.page import Index
from dataplane.stream.patch import Patch
from dataplane.stream.progress import ACKED, DEAD, EXPIRED, LEASED, PENDING
from dataplane.stream.rows import Rows
from dataplane.stream.settings import Settings
from dataplane.stream.snapshot import block_of, block_rows, put_columns

SETTINGS = Settings(("reward", "actor"), max_deliveries=2)
NOW = 10.0
HERE, THERE, THIRD = b"here....", b"there...", b"third..."


def stored(shard: int, rows: int, *columns: str, node: bytes = HERE) -> BatchRef:
    return BatchRef.of(
        node, rows, [(name, Field("dense", "int64", ()), 8 * rows, shard, i) for i, name in enumerate(columns)]
    )


def at(*rows: int) -> Index:
    return np.array(rows, np.int64)


class Told:
    """A home, and all that it told: by task, rows and state; and the shards that nobody needs."""

    def __init__(self, mark: str = "m") -> None:
        self.said: list[tuple[int, list[int], int]] = []
        self.released: list[int] = []
        self.home = Home(SETTINGS, self._released, mark=mark)
        self.home.books.tell = lambda task, rows, state: self.said.append((task, rows.tolist(), state))
        self.books = self.home.books

    def _released(self, patches: list[Patch]) -> None:
        self.released += [shard for patch in patches for _, shard in patch.ref.shards()]

    def append(
        self, ref: BatchRef, keys: Sequence[str] = (), groups: Sequence[Any] | None = None, digest: bytes = b""
    ) -> int:
        tickets: list[int] = []
        self.home.admit(Entry("p", len(ref), 8, 0, tickets.append, lambda error: None))
        arrival = Arrival(groups, np.full(len(ref), 7), {"n": list(range(len(ref)))}, {})
        return self.home.append(tickets[0], ref, keys, digest, arrival, NOW)[0]

    def lease(self, task: int, *rows: int) -> int:
        self.books.lease(task, at(*rows))
        grant = self.home.leases.give(task, at(*rows), ("x",), Who("c"), 60.0, NOW)
        self.home.leases.hand(grant, grant.who, NOW)
        return grant.number

    def states(self, *rows: int) -> list[list[int]]:
        return self.books.progress.states(self.books.rows.places(at(*rows)), len(rows)).tolist()

    def left(self) -> list[int]:
        return [self.books.progress.is_left(task) for task in range(2)]


# who stores what


def test_rows_by_the_nodes_that_store_them() -> None:
    rows = Rows()
    rows.append(concat([stored(1, 2, "x"), stored(1, 2, "x", node=THERE)])[[0, 2, 1, 3]])
    rows.extend(at(0), stored(2, 1, "y", node=THERE), replace=False)
    assert {node: of.tolist() for node, of in rows.by_node(at(0, 1, 2, 3)).items()} == {HERE: [0, 2], THERE: [0, 1, 3]}
    assert rows.dead(lambda node, _: node != HERE).tolist() == [0, 2], "what came in one patch with it is not lost"
    assert rows.dead(lambda node, _: node != THERE).tolist() == [0, 1, 3]
    assert rows.dead(lambda node, _: True).tolist() == []
    rows.remove(at(0))
    assert rows.dead(lambda node, _: node != HERE).tolist() == [2]
    rows.add_spare(at(2), THIRD, ["x"])
    assert rows.dead(lambda node, _: node != HERE).tolist() == []
    assert (rows.spares(at(2)), rows.dead(lambda node, _: node not in (HERE, THIRD)).tolist()) == ([THIRD], [2])


def test_who_stored_what_was_replaced_is_remembered_until_the_row_goes() -> None:
    rows = Rows()
    rows.append(stored(1, 2, "x"))
    rows.extend(at(0, 1), stored(2, 2, "y", node=THERE), replace=False)
    rows.extend(at(1), stored(3, 1, "y"), replace=True)
    assert {node: of.tolist() for node, of in rows.by_node(at(0, 1)).items()} == {HERE: [0, 1], THERE: [0]}
    assert rows.ever_by_node(at(0, 1))[THERE].tolist() == [0, 1]
    assert {node: of.tolist() for node, of in rows.past_by_node(at(0, 1)).items()} == {THERE: [1]}
    rows.remember(at(0), [THIRD])
    assert rows.past_by_node(at(0))[THIRD].tolist() == [0]
    rows.remove(at(0, 1))
    assert rows._past == {}


def test_which_rows_lack_columns() -> None:
    rows = Rows()
    rows.append(stored(1, 3, "x"))
    rows.extend(at(1), stored(2, 1, "y"), replace=False)
    assert rows.lack(at(0, 1, 2, 9), ["y", "z"]).tolist() == [True, False, True, False]
    assert rows.lack(at(0, 1), ["x"]).tolist() == [False, False]


# losing, hiding, moving


def test_lost_rows_are_as_if_they_had_never_come() -> None:
    told = Told()
    told.append(stored(1, 2, "x"), groups=["a", "a"])
    told.append(stored(1, 2, "x", node=THERE), groups=["a", "b"])
    held = told.lease(0, 3)
    told.home.lose(lambda node, _: node != THERE, NOW)
    assert told.said == [(-1, [2, 3], EXPIRED)], "and who held a column is told"
    assert told.books.groups.sizes(at(0), 1)[0].tolist() == [2]
    assert told.left() == [2, 2]
    with pytest.raises(LeaseExpired):  # what it was for is not to be had any more
        told.home.ack(held, "c", None, NOW)
    lost = told.home.take_lost(10)
    assert [(key, group, version) for key, group, version in lost] == [("~m.2", "a", 7), ("~m.3", "b", 7)]
    assert told.home.take_lost(10) == []


def test_a_lost_row_that_comes_back_is_not_told() -> None:
    told = Told()
    told.append(stored(1, 2, "x", node=THERE))
    told.home.lose(lambda node, _: node != THERE, NOW)
    told.home.found([1])
    assert [key for key, _, _ in told.home.take_lost(10)] == ["~m.0"]


def test_of_a_node_that_began_anew_only_what_it_stored_before_is_lost() -> None:
    told = Told()
    told.append(stored(1, 2, "x", node=THERE))
    told.append(stored(5, 1, "x", node=THERE))
    told.home.lose(lambda node, shard: node != THERE or shard >= 5, NOW)
    assert [key for key, _, _ in told.home.take_lost(10)] == ["~m.0", "~m.1"]
    assert told.books.rows.all().tolist() == [2]


def test_a_home_that_begins_anew_tells_of_what_it_alone_knew_and_goes_on_counting() -> None:
    told = Told()
    told.append(stored(1, 3, "x"), groups=["a", "a", "a"])
    told.append(stored(1, 1, "x", node=THERE), groups=["a"])
    held = told.lease(0, 0)
    told.said.clear()
    told.home.begin_anew(HERE, [2], NOW)
    assert told.said == [], "who holds columns has told others of them"
    assert [key for key, _, _ in told.home.take_lost(10)] == ["~m.0", "~m.1"]
    with pytest.raises(LeaseExpired):
        told.home.ack(held, "c", None, NOW)
    assert (told.books.rows.count, told.books.nbytes, told.left()) == (0, 0, [0, 0])
    assert told.append(stored(3, 1, "x")) >= 4, "a number is never given again"
    assert told.books.facts.oldest() == NOW


def test_dropped_rows_are_not_told_as_lost() -> None:
    told = Told()
    told.append(stored(1, 2, "x", node=THERE))
    told.lease(0, 0)
    told.home.drop_rows(at(0), NOW)
    told.home.lose(lambda node, _: node != THERE, NOW)
    assert [key for key, _, _ in told.home.take_lost(10)] == ["~m.1"]


def test_of_a_row_that_is_here_already_only_what_tasks_have_done_comes() -> None:
    """It was announced by who stores it too, and has been acked where it was meanwhile."""
    there, told = Told("t"), Told("m")
    for each in (there, told):
        each.append(stored(1, 4, "x", node=THIRD), keys=["a", "b", "c", "d"])
    there.books.settle(0, at(0, 1, 2), ACKED)
    there.books.settle(1, at(1), EXPIRED)  # of which no more is left, there
    held = told.lease(0, 2)
    told.books.progress.hide(told.books.rows.places(at(3)), hidden=True)
    block = block_of(there.books, at(0, 2, 3), NOW)
    were, came = adopt(told.home, block, NOW)
    assert (were.tolist(), came.tolist()) == ([], [])
    assert told.states(0, 1, 2, 3) == [[ACKED, PENDING, LEASED, PENDING], [PENDING] * 4]
    told.home.ack(held, "c", None, NOW)
    assert told.states(2)[0] == [ACKED]


def test_hidden_rows_are_nobodys_until_they_are_shown_again() -> None:
    told = Told()
    told.append(stored(1, 3, "x"))
    places = told.books.rows.places(at(1))
    told.books.progress.hide(places, hidden=True)
    assert told.books.progress.ready(0, ("x",), 9).tolist() == [0, 2]
    assert told.books.idle().tolist() == [0, 2]
    assert told.left() == [3, 3]
    told.books.progress.hide(places, hidden=False)
    assert told.books.progress.ready(0, ("x",), 9).tolist() == [0, 1, 2]


def test_rows_that_move_are_told_to_those_only_who_have_nothing_of_them_any_more() -> None:
    told = Told()
    told.append(stored(1, 2, "x"))
    told.books.extend(at(0, 1), stored(2, 2, "y", node=THERE), {})
    told.books.extend(at(1), stored(3, 1, "y"), {}, replace=True)
    told.books.progress.hide(told.books.rows.places(at(0, 1)), hidden=True)
    told.books.move(at(0, 1))
    assert told.said == [(-2, [0, 1], EXPIRED)]
    assert sorted(told.released) == [1, 2, 3]
    assert told.left() == [0, 0]
    assert told.books.nbytes == 0


@given(st.lists(st.sampled_from(["lose", "ack", "drop", "nack"]), min_size=1, max_size=6), st.integers(0, 5))
def test_groups_and_counts_end_at_nothing(what: list[str], first: int) -> None:
    """Whatever becomes of rows, in any order: nothing is counted of them once they are gone."""
    told = Told()
    told.append(stored(1, 6, "x"), groups=["a", "b", "a", "c", "b", "a"])
    for step, do in enumerate(what):
        row = (first + step) % 6
        if not told.books.rows.there(at(row))[0] or told.states(row)[0][0] != PENDING:
            continue
        if do == "lose":
            told.books.lose(at(row))
        elif do == "drop":
            told.books.drop_rows(at(row))
        else:
            told.books.lease(0, at(row))
            if do == "ack":
                told.books.settle(0, at(row), ACKED)
            else:
                told.books.give_back(0, at(row))
    rest = told.books.rows.all()
    told.books.lose(rest)
    assert told.left() == [0, 0]
    assert (told.books.rows.count, told.books.nbytes, told.books.groups.open) == (0, 0, 0)
    assert not told.books.groups._members.any()
    assert not told.books.groups._done.any()
    assert not told.books.groups._dead.any()
    assert told.released == [1]


# blocks with other numbers


def block(told: Told, *rows: int) -> Block:
    return block_of(told.books, at(*rows), NOW)


def test_a_block_with_other_numbers() -> None:
    told = Told()
    told.append(stored(1, 4, "x"), keys=["a", "b", "c", "d"], digest=b"one")
    made = renumbered(block(told, 0, 1, 2, 3), at(1, 3), at(20, 10))
    assert block_rows(made).tolist() == [10, 20], "in the order of the new ones"
    assert made.keys == ["d", "b"]
    assert made.tags["n"] == [3, 1]
    assert made.calls == [], "it is not there as a whole"
    assert renumbered(block(told, 0, 1, 2, 3), at(0, 1, 2, 3), at(5, 6, 7, 8)).calls == [("a", 5, 4, b"one")]
    empty = renumbered(block(told, 0, 1), at(), at())
    assert (empty.rows, empty.keys, empty.states) == (b"", [], b"")


def test_an_append_of_one_row_that_does_not_come_is_no_append() -> None:
    told = Told()
    told.append(stored(1, 1, "x"), keys=["a"], digest=b"one")
    told.append(stored(2, 1, "x"), keys=["b"], digest=b"two")
    made = renumbered(block(told, 0, 1), at(1), at(9))
    assert made.calls == [("b", 9, 1, b"two")]


def test_columns_of_some_rows_with_other_numbers() -> None:
    columns: Columns = [(at(3, 1, 2), -1, stored(1, 3, "x"), {"x": at(30, 10, 20)})]
    ((rows, task, ref, lengths),) = some_columns(columns, at(2, 3), at(8, 7))
    assert (rows.tolist(), task, lengths["x"].tolist()) == ([7, 8], -1, [30, 20])
    assert [piece.rows.array().tolist() for piece in ref.pieces("x")] == [[0, 2]]
    assert some_columns(columns, at(9), at(1)) == []


def test_adopted_rows_are_as_far_as_they_were() -> None:
    old, new = Told(), Told("n")
    old.append(stored(1, 3, "x"), keys=["a", "b", "c"], groups=["g", "g", "h"])
    old.lease(0, 0, 1)
    old.books.settle(0, at(0), ACKED)
    new.append(stored(2, 1, "x"), keys=["c"])
    were, came = adopt(new.home, block(old, 0, 1, 2), NOW)
    assert (were.tolist(), came.tolist()) == ([0, 1], [1, 2]), "the key of the third is there already"
    assert new.states(1, 2) == [[ACKED, PENDING], [PENDING, PENDING]]
    assert new.books.keys.names(came) == ["a", "b"]
    assert new.books.appended == 3
    assert [len(each) for each in adopt(new.home, block(old, 0, 1), NOW)] == [0, 0]


@pytest.mark.parametrize("field", ["rows", "states", "ages_s"])
def test_a_block_that_is_none_changes_nothing(field: str) -> None:
    old, new = Told(), Told("n")
    old.append(stored(1, 2, "x"), keys=["a", "b"])
    bad = msgspec.structs.replace(block(old, 0, 1), **{field: b"\xff" * (len(getattr(block(old, 0, 1), field)))})
    with pytest.raises(Corrupt):
        adopt(new.home, bad, NOW)
    assert new.books.rows.count == 0
    assert new.left() == [0, 0]


# mirrors


class Mirrored:
    """A mirror, and the shards that it needs no more."""

    def __init__(self) -> None:
        self.released: list[int] = []
        self.mirror = Mirror(
            SETTINGS, "m", lambda patches: self.released.extend(s for p in patches for _, s in p.ref.shards())
        )

    def append(self, first: int, ref: BatchRef, groups: Sequence[Any] | None = None) -> None:
        arrival = Arrival(groups, np.full(len(ref), 7), {}, {})
        self.mirror.append(first, ref, [], b"", arrival, NOW)


def test_a_mirror_lets_go_what_all_tasks_have_done() -> None:
    here = Mirrored()
    here.append(100, stored(1, 3, "x"))
    here.mirror.extend(at(101, 7), stored(2, 2, "y"), {}, -1)
    assert here.mirror.size == (3, 24)
    here.mirror.settle(0, at(100, 101, 102, 7, 55), ACKED)
    here.mirror.settle(0, at(100), ACKED)
    assert here.released == []
    here.mirror.settle(1, at(100, 102), EXPIRED)
    here.mirror.settle(1, at(101), ACKED)
    assert here.released == [1]
    assert len(here.mirror) == 1
    here.mirror.over(at(7, 8))
    assert here.released == [1, 2]
    assert (len(here.mirror), here.mirror.size) == (0, (0, 0))


def test_a_row_that_comes_back_to_a_mirror_begins_anew_there() -> None:
    """It had moved to another home, which has died: its old one has it again, under the number of before."""
    here = Mirrored()
    here.append(4, stored(1, 2, "x"))
    here.mirror.extend(at(4, 5), stored(2, 2, "y"), {}, -1)
    here.mirror.settle(0, at(4), ACKED)
    kept, columns = here.mirror.block(at(4), NOW), here.mirror.columns(at(4))
    here.mirror.over(at(4))
    assert here.released == []
    here.mirror.take(kept, columns, NOW)
    here.mirror.extend(at(4), stored(3, 1, "y"), {}, -1)
    here.mirror.over(at(5))
    assert sorted(here.released) == [1, 2]
    here.mirror.settle(0, at(4), ACKED)
    assert len(here.mirror) == 2
    here.mirror.settle(1, at(4), ACKED)
    assert (len(here.mirror), here.mirror.size) == (0, (0, 0))
    assert set(here.released) == {1, 2, 3}


def test_a_mirror_tells_where_rows_belong_and_how_far_they_are() -> None:
    here = Mirrored()
    here.append(4, stored(1, 3, "x"), groups=["g", "h", "g"])
    here.append(9, stored(2, 1, "x"))
    here.mirror.settle(1, at(5), ACKED)
    rows, places = here.mirror.places()
    assert dict(zip(rows.tolist(), places, strict=True)) == {4: "g", 5: "h", 6: "g", 9: "~m.9"}
    assert here.mirror.brought(at(3, 4, 9)).tolist() == [4, 9]
    new = Told("n")
    were, came = adopt(new.home, here.mirror.block(at(4, 5, 6), NOW), NOW)
    for of, task, ref, _ in some_columns(here.mirror.columns(were), were, came):
        put_columns(new.home, of, task, ref, {})
    assert new.states(0, 1, 2) == [[PENDING] * 3, [PENDING, ACKED, PENDING]]
    assert new.books.progress.ready(0, ("x",), 9).tolist() == [0, 1, 2]


def test_columns_that_were_brought_later_go_with_the_row() -> None:
    """Also where one of them replaced a column that came with the row."""
    here = Mirrored()
    here.append(0, stored(1, 3, "x", "y"))
    here.mirror.extend(at(1, 2), stored(2, 2, "y", "z"), {}, -1)
    here.mirror.extend(at(8), stored(3, 1, "z"), {}, -1)
    found = {}
    for of, _, ref, _ in here.mirror.columns(at(0, 1, 2)):
        for name in ref.columns:
            for row, piece in zip(of.tolist(), range(len(of)), strict=True):
                assert (row, name) not in found, "each column of a row comes once"
                found[row, name] = ref[piece : piece + 1].pieces(name)[0].shard
    assert found == {(0, "x"): 1, (0, "y"): 1, (1, "x"): 1, (2, "x"): 1} | {
        (row, name): 2 for row in (1, 2) for name in "yz"
    }
    assert [of.tolist() for of, _, _, _ in here.mirror.added()] == [[8]], "of rows that others appended"


def test_a_mirror_knows_who_else_stores_columns() -> None:
    here = Mirrored()
    here.append(0, stored(1, 3, "x"))
    here.mirror.note_others(at(0, 1, 2), {THERE: at(0, 1), THIRD: at(1, 77)})
    assert {node: of.tolist() for node, of in here.mirror.others(at(0, 1, 2)).items()} == {THERE: [0, 1], THIRD: [1]}
    here.mirror.note_others(at(1), {})
    here.mirror.over(at(0))
    assert here.mirror.others(at(0, 1, 2)) == {}


def test_rows_come_to_a_mirror_from_another_home() -> None:
    old, here = Told(), Mirrored()
    old.append(stored(1, 2, "x"), groups=["g", "h"])
    old.books.lease(0, at(0))
    old.books.settle(0, at(0), ACKED)
    taken: Columns = [(at(31, 30), -1, stored(1, 2, "x"), {})]
    here.mirror.take(renumbered(block(old, 0, 1), at(0, 1), at(31, 30)), taken, NOW)
    assert dict(zip(*(list(each) for each in here.mirror.places()), strict=True)) == {30: "h", 31: "g"}
    here.mirror.settle(1, at(31), ACKED)
    assert len(here.mirror) == 1, "what its task had done at the first home counts"
    here.mirror.clear()
    assert here.released == [1]
    assert LEASED not in (ACKED, DEAD)

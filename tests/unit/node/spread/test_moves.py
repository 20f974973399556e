"""What a node that stores columns of rows knows of their moves, until their old home knows it too."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from dataplane.node.spread import moves
from dataplane.node.spread.moves import Moves
from dataplane.node.spread.wholes import Part
from dataplane.node.streams.packed import Index

OLD = Part(b"old home", b"old", b"whole", "m")
NEW, OTHER = b"new", b"other"


def at(*rows: int) -> Index:
    return np.array(rows, np.int64)


@pytest.fixture
def known() -> Moves:
    """Rows 1 to 3 have moved to the new part, and row 7 to another."""
    known = Moves()
    known.note(OLD, NEW, at(1, 2, 3), at(11, 12, 13))
    known.note(OLD, OTHER, at(7), at(70))
    return known


async def waits(known: Moves, to: bytes) -> bool:
    settled = asyncio.ensure_future(known.settled(to))
    await asyncio.sleep(0)
    done = settled.done()
    settled.cancel()
    return not done


def test_rows_that_are_taken_back_have_their_old_numbers(known: Moves) -> None:
    part, were, came = known.take_back((OLD.token, NEW, 0), at(1, 3, 7, 9))
    assert (part, were.tolist(), came.tolist()) == (OLD, [1, 3], [11, 13])
    part, were, _ = known.take_back((OLD.token, NEW, 0), at(1, 3))
    assert (part, were.tolist()) == (None, []), "each once"


def test_a_move_that_was_taken_back_is_not_made_any_more(known: Moves) -> None:
    assert not known.refused((OLD.token, NEW, 5))
    known.take_back((OLD.token, NEW, 5), at(9))
    assert known.refused((OLD.token, NEW, 5))
    assert not known.refused((OLD.token, NEW, 6)), "by who has begun anew since"
    assert not known.refused((OLD.token, OTHER, 5))


async def test_who_waits_for_rows_goes_on_when_they_are_taken_back_and_not_when_it_is_said(known: Moves) -> None:
    """What is on its way of them comes between: until then they would be announced from here too."""
    known.refuse((OLD.token, NEW, 0))
    assert known.refused((OLD.token, NEW, 0))
    assert await waits(known, NEW)
    known.take_back((OLD.token, NEW, 0), at(1, 2, 3))
    assert not await waits(known, NEW)


def test_no_more_is_remembered_of_what_was_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "_REFUSED", 2)
    known = Moves()
    for since in range(3):
        known.take_back((OLD.token, NEW, since), at(1))
    assert [known.refused((OLD.token, NEW, since)) for since in range(3)] == [False, True, True]


@pytest.mark.parametrize("how", ["over", "gone", "dropped", "taken back", "anew"])
async def test_it_is_settled_who_has_rows_when_their_old_home_has_said_so_or_is_no_more(known: Moves, how: str) -> None:
    settled = asyncio.ensure_future(known.settled(NEW))
    known.over(OLD.token, at(1, 9))
    await asyncio.sleep(0)
    assert not settled.done()
    assert not await waits(known, b"of nobody")
    match how:
        case "over":
            known.over(OLD.token, at(2, 3))
        case "gone":
            known.gone(b"another")
            assert await waits(known, NEW)
            known.gone(OLD.node)
        case "dropped":
            known.forget(OLD.token)
        case "taken back":
            known.take_back((OLD.token, NEW, 0), at(2, 3))
        case "anew":
            known.begin_anew()
    async with asyncio.timeout(5):
        await settled
    assert await waits(known, OTHER) == (how in ("over", "taken back"))

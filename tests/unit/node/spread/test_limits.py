"""What a node tells of a stream to who keeps its limits, when that is another than before."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dataplane.node.spread import limits
from dataplane.node.spread.limits import Limits
from dataplane.stream.home import Home
from dataplane.stream.settings import Settings

ME, FIRST, SECOND = b"me......", b"first...", b"second.."


class One:
    """The limits as one node knows them, of one stream, whose keeper a test names."""

    def __init__(self) -> None:
        self.keeps = FIRST
        self.begun = {ME: 0, FIRST: 0, SECOND: 0}
        self.woken = asyncio.Event()
        settings = Settings(("actor",), max_rows=10)
        stream = SimpleNamespace(home=Home(settings, lambda patches: None, lambda: None, "m"), wake=self.woken.set)
        self.whole: Any = SimpleNamespace(token=b"token", name="s", generation=1, settings=settings, stream=stream)
        wholes = SimpleNamespace(
            node=ME,
            view=b"view",
            members=self.begun,
            since=self.begun.__getitem__,
            placement=SimpleNamespace(home=lambda _, name: self.keeps),
        )
        asking = SimpleNamespace(next_id=itertools.count().__next__)
        self.limits = Limits(cast(Any, wholes), cast(Any, asking), lambda whole: (0, 0))

    @property
    def told(self) -> tuple[int, int]:
        holds = self.limits._holds(self.whole)
        return holds.rows, holds.nbytes


@pytest.mark.parametrize("who", ["the keeper is another", "the keeper begins anew", "this node begins anew"])
async def test_what_was_let_in_before_counts_where_it_is_brought_from(
    who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new keeper knows nothing of it until it has come to where it belongs, and is told from there."""
    monkeypatch.setattr(limits, "_COUNTED_S", 0.01)
    one = One()
    came = one.limits.let_in(one.whole, one.limits.keeper(one.whole), 4, 400)
    over = one.limits.let_in(one.whole, one.limits.keeper(one.whole), 2, 200)
    one.limits.over(over)
    assert one.told == (0, 0), "it counts where the limits are kept"
    match who:
        case "the keeper is another":
            one.keeps = SECOND
        case "the keeper begins anew":
            one.begun[FIRST] = 7
        case "this node begins anew":
            one.begun[ME] = 7
    later = one.limits.let_in(one.whole, one.limits.keeper(one.whole), 1, 100)
    assert one.told == (4, 400)
    one.limits.over(came)
    assert one.told == (4, 400), "it may not be counted where it came to"
    async with asyncio.timeout(5):
        await one.woken.wait()
    assert one.told == (0, 0)
    one.limits.over(later)

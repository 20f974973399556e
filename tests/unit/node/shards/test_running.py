"""What needs a host ends with it, and its caller's cancellations stay its caller's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from dataplane.cluster.membership import Member, Membership
from dataplane.node.shards.running import Running
from dataplane.wire import peer_messages as pm


class Members(Membership):
    """Those that a test says."""

    def __init__(self, *nodes: bytes) -> None:
        self._members = {node: Member(node, "") for node in nodes}
        self._watchers: list[Callable[[], None]] = []

    @property
    def epoch(self) -> int:
        return 1

    @property
    def members(self) -> Mapping[bytes, Member]:
        return self._members

    def greeted(self, greet: pm.Greet) -> pm.Greeted:
        raise NotImplementedError

    def look(self) -> None:
        pass

    def begin_anew_by(self, begin: Callable[[], int]) -> None:
        raise NotImplementedError

    def fences(self, node: bytes, since: int) -> bool:
        return False

    def met(self, node: bytes, since: int) -> None:
        pass

    def watch(self, changed: Callable[[], None]) -> None:
        self._watchers.append(changed)

    async def run(self) -> None:
        pass

    def gone(self, node: bytes) -> None:
        self._members.pop(node, None)
        for each in self._watchers:
            each()


async def wait(running: Running, *nodes: bytes, then: float = 0.0) -> None:
    async with running.needing(*nodes):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(then)


async def test_it_ends_with_any_of_the_hosts_it_needs() -> None:
    members = Members(b"a", b"b", b"c")
    running = Running(members)
    one, two, three = (asyncio.create_task(wait(running, *nodes)) for nodes in ((b"a", b"b"), (b"b", b"b"), (b"c",)))
    await asyncio.sleep(0)
    members.gone(b"b")
    for each in (one, two):
        with pytest.raises(TimeoutError):
            await each
        assert not each.cancelled()
    assert not three.done()
    three.cancel()
    await asyncio.gather(three, return_exceptions=True)
    assert three.cancelled()
    assert not running._ends


async def test_a_host_that_is_gone_before() -> None:
    running = Running(Members(b"a"))
    with pytest.raises(TimeoutError):
        await wait(running, b"a", b"b")


async def test_other_changes_while_it_ends() -> None:
    members = Members(b"a", b"b")
    running = Running(members)
    one = asyncio.create_task(wait(running, b"a", b"b", then=0.01))
    await asyncio.sleep(0)
    members.gone(b"a")
    await asyncio.sleep(0)
    members.gone(b"b")
    with pytest.raises(TimeoutError):
        await one


async def test_cancelled_by_its_caller_and_told_at_once() -> None:
    """The caller's wish counts: it does not go on as if only the host had gone."""
    members = Members(b"a")
    running = Running(members)
    one = asyncio.create_task(wait(running, b"a"))
    await asyncio.sleep(0)
    members.gone(b"a")
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    assert one.cancelled()


async def test_what_has_ended_is_not_told() -> None:
    members = Members(b"a")
    running = Running(members)
    async with running.needing(b"a"):
        pass
    members.gone(b"a")
    await asyncio.sleep(0)

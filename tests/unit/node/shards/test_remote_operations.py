"""What needs a host ends with it, and its caller's cancellations stay its caller's."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.node.shards import remote_operations
from dataplane.node.shards.remote_operations import RemoteOperations
from tests.unit.node.shards.members import Members


async def yes(node: bytes) -> bool:
    return True


async def wait(running: RemoteOperations, *nodes: bytes, then: float = 0.0) -> None:
    async with running.needing(*nodes):
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(then)


async def test_a_remote_operation_ends_when_any_needed_host_is_lost() -> None:
    members = Members(b"a", b"b", b"c")
    running = RemoteOperations(members, yes)
    one, two, three = (asyncio.create_task(wait(running, *nodes)) for nodes in ((b"a", b"b"), (b"b", b"b"), (b"c",)))
    await asyncio.sleep(0)
    members.lose(b"b")
    for each in (one, two):
        with pytest.raises(TimeoutError):
            await each
        assert not each.cancelled()
    assert not three.done()
    three.cancel()
    await asyncio.gather(three, return_exceptions=True)
    assert three.cancelled()
    assert not running._ends


async def test_a_cancellation_by_the_caller_prevails_over_the_loss_of_a_host() -> None:
    members = Members(b"a")
    running = RemoteOperations(members, yes)
    one = asyncio.create_task(wait(running, b"a"))
    await asyncio.sleep(0)
    members.lose(b"a")
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    assert one.cancelled()


async def test_a_remote_operation_ends_when_its_host_is_silent_and_others_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_operations, "_LOOK_S", 0.01)
    asked: list[bytes] = []

    async def answers(node: bytes) -> bool:
        asked.append(node)
        return node != b"a"

    running = RemoteOperations(Members(b"a", b"b"), answers)
    one, two = (asyncio.create_task(wait(running, node)) for node in (b"a", b"b"))
    with pytest.raises(TimeoutError):
        await one
    while asked.count(b"b") < 3:
        await asyncio.sleep(0.001)
    assert not two.done()
    two.cancel()
    await asyncio.gather(two, return_exceptions=True)
    assert not running._asking

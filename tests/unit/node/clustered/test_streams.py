"""Streams of several nodes as clients use them: rows, members, waiting, failovers, and what is left of who goes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.errors import (
    Backpressure,
    LeaseExpired,
    LimitExceeded,
    Misuse,
    NotReady,
    OutcomeUnknown,
    PeerUnavailable,
)
from dataplane.node.clustered import column_holders
from dataplane.node.clustered import session as sessions
from dataplane.node.partitions import router, unconfirmed_grants
from dataplane.replication.configuration import encode
from dataplane.stream import requests as r
from dataplane.stream.sampler import CompleteGroups
from dataplane.wire import partition_messages as pt
from dataplane.wire import peer_messages as pm
from dataplane.wire import row_messages as rm
from dataplane.wire.messages import Done
from tests.unit.node.clustered.streambench import StreamBench, clients, ids, stream_nodes, streaming
from tests.unit.node.partitions.bench import SETTINGS, absent, back, until

# Members


async def test_deliveries_with_lost_answers_are_repeated_in_order_to_their_replica() -> None:
    async with streaming(2) as (leader, (node,)):
        (far,), (near,) = clients([node]), clients([leader])
        await near.append(list(range(6)))
        one, two = ({"member": "dp0", "replica": at, "replicas": 2} for at in range(2))
        assert ids(await near.take(2, **one)) == [0, 1]
        lost = losing(node, pt.Answered, times=2)
        found = [ids(await far.take(2, **two)) for _ in range(3)]
        assert len(lost) == 2
        assert found == [[0, 1], [2, 3], [4, 5]]
        with pytest.raises(NotReady):
            await far.take(2, timeout_s=0.05, **two)
        again = clients([node])[0]  # it was started again
        assert [ids(await again.take(2, **two)) for _ in range(3)] == found


def losing(node: StreamBench, *kinds: type, times: int = 1) -> list[Any]:
    """What the node loses of what it is sent: so many items of each of these kinds."""
    receive, lost = node.receive, list[Any]()

    def heard(frame: pt.PartitionFrame) -> None:
        items = []
        for item in frame.items:
            gives = not isinstance(item, pt.Answered) or len(item.result) > 1
            if isinstance(item, kinds) and gives and sum(type(each) is type(item) for each in lost) < times:
                lost.append(item)
            else:
                items.append(item)
        receive(pt.PartitionFrame(frame.node, frame.life, items))

    node.receive = heard  # type: ignore[method-assign]
    return lost


def unconfirmed(node: StreamBench) -> int:
    return len(node.replicas._unconfirmed)


async def test_rows_whose_delivery_answer_was_lost_are_redelivered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_BEYOND_S", 0.1)
    monkeypatch.setattr(unconfirmed_grants, "CONFIRM_S", 0.1)
    async with streaming(2) as (leader, (node,)):
        (far,), (near,) = clients([node]), clients([leader])
        lost = losing(node, pt.Answered, times=1 << 20)
        await near.append(list(range(4)))
        with pytest.raises((NotReady, OutcomeUnknown, PeerUnavailable)):
            await far.take(4, 0.3)
        assert lost
        assert ids(await near.take(4)) == [0, 1, 2, 3]


async def test_a_waiting_consumer_whose_sampler_judges_age_does_not_keep_the_leader_busy() -> None:
    async with streaming(1) as (leader, _):
        (near,) = clients([leader])
        await near.append([0, 1], groups=["g", "g"])
        machine, decided = leader.machine(), list[bytes]()
        decide = machine.decide

        def counted(request: bytes, term: int, now: float) -> Any:
            decided.append(request)
            return decide(request, term, now)

        machine.decide = counted  # type: ignore[method-assign]
        waiting = asyncio.create_task(near.take(4, sampler=CompleteGroups(4, timeout=60.0)))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(decided) < 30
        await near.append([2, 3], groups=["g", "g"])
        assert ids(await waiting) == [0, 1, 2, 3]


async def test_a_leader_whose_disk_is_full_answers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    async with streaming(1) as (leader, _):
        (near,) = clients([leader])
        await near.append([0, 1])
        delivery = await near.take(1)
        full, outcomes = Backpressure("the disk is full", spill_error="the disk is full"), list[Any]()
        with monkeypatch.context() as patched:
            patched.setattr(leader.hosted(), "_disk", SimpleNamespace(refusal=full))
            assert (await near.forward(r.Measure())).values["rows"] == 2
            assert not (await near.forward(r.ListUnfinished(most=1))).rows
            leader.hosted().request(r.encode_request(r.Nack(grant=delivery.grant)), outcomes.append)
            assert isinstance(outcomes[0], Backpressure)
        await near.settle(delivery)


async def test_a_received_delivery_is_kept_when_its_confirmation_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unconfirmed_grants, "CONFIRM_S", 0.1)
    async with streaming(2) as (leader, (node,)):
        (far,), (near,) = clients([node]), clients([leader])
        asked, told = losing(node, pt.Given, times=2), losing(leader, pt.Received, times=2)
        await near.append(list(range(4)))
        delivery = await far.take(4)
        await until(lambda: not unconfirmed(leader))
        assert (len(asked), len(told)) == (2, 2)
        await far.settle(delivery)
        assert leader.machine().leased.partition.rows.count == 0


async def test_permits_and_rows_granted_after_the_deadline_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "_BEYOND_S", 0.1)
    monkeypatch.setattr(unconfirmed_grants, "CONFIRM_S", 0.1)
    async with streaming(2, max_rows=12) as (leader, (node,)):
        (far,), (near,) = clients([node]), clients([leader])
        await near.append([0])
        hear, loop, held = leader.channel.heard, asyncio.get_running_loop(), list[Any]()

        def later(sender: str, item: Any) -> None:
            if isinstance(item, pt.Ask | pt.Withdrawn):
                held.append((sender, item))
            else:
                hear(sender, item)

        leader.channel.heard = later
        with pytest.raises((Backpressure, OutcomeUnknown, PeerUnavailable)):
            await far.append([1, 2], timeout_s=0.2)
        with pytest.raises((NotReady, OutcomeUnknown, PeerUnavailable)):
            await far.take(1, timeout_s=0.2)
        leader.channel.heard = hear
        for sender, item in held:
            loop.call_soon(hear, sender, item)
        leased = leader.machine().leased
        await until(lambda: not len(leased.leases) and not leased.admission.clients() and not unconfirmed(leader))
        assert ids(await near.take(1)) == [0]


async def test_deliveries_to_an_ended_node_are_released_and_redelivered() -> None:
    async with streaming(3) as (leader, (_, node)):
        (near,) = clients([leader])
        losing(node, pt.Given, times=1 << 20)
        await near.append(list(range(4)))
        await clients([node])[0].take(4)
        assert unconfirmed(leader) == 1
        await node.aclose()
        await until(lambda: not unconfirmed(leader))
        assert ids(await near.take(4)) == [0, 1, 2, 3]  # what it held goes to others before its lease is over


async def test_rows_of_a_delivery_too_large_for_a_frame_remain_available() -> None:
    async with streaming(2) as (leader, (node,)):
        (far,), (near,) = clients([node]), clients([leader])
        for first in range(0, 20_000, 1000):
            keys = [f"{number:0250d}" for number in range(first, first + 1000)]
            request = r.Append(ref=near.put(1000 // 8)[[0] * 1000], versions=np.zeros(1000, np.int64), keys=keys)
            await near.session.ask(near.partition, msgspec.structs.replace(request, digest=b"d"), r.AppendResult)
        with pytest.raises(LimitExceeded, match="fewer rows"):
            await far.take(20_000, timeout_s=2.0)
        assert len((await far.take(1000)).keys) == 1000, "or they are leased to who was told nothing"


async def test_a_consumer_waiting_at_a_deposed_leader_is_redirected_to_the_new_one() -> None:
    async with streaming(3) as (leader, (heir, third)):
        for node in (leader, heir, third):
            node.replicas.recruiting.wanted = lambda partition: 0  # or the one that was deposed may follow, and hear
        waiting = asyncio.ensure_future(clients([third])[0].take(1))
        hosted = leader.hosted()
        await until(lambda: len(hosted.waiters))
        before = hosted.configuration
        after = before.deposed_by(before.followers[0])
        await leader.replicas.coordinator.swap(leader.replicas.key(hosted.partition), encode(before), encode(after))
        await until(lambda: heir.at(hosted.partition))
        await clients([heir])[0].append([0])
        assert ids(await waiting) == [0]


async def test_a_node_that_was_away_for_long_appends_again() -> None:
    async with streaming(3, options={"lost_s": 0.5}) as (leader, (follower, other)):
        writer = clients([other])[0]
        await writer.append([0])
        await absent(other, [leader, follower])
        await until(lambda: leader.machine().lost_nodes)
        lost = await clients([leader])[0].lost()
        assert len(lost.rows) == 1
        await back(other, [leader, follower])
        await until(lambda: not leader.machine().lost_nodes.lost)
        assert (await writer.append([1])).new


async def test_a_node_restarted_on_its_data_directory_has_lost_its_rows_of_memory(tmp_path: Path) -> None:
    async with streaming(3, options={"keeps": True}) as (leader, (_, other)):
        near, far = clients([leader, other])
        await far.append([0])
        await near.append([1])
        await other.aclose()
        coordinator = leader.replicas.coordinator
        again = StreamBench(
            other.id.decode().rstrip("."), coordinator, directory=tmp_path / "again", keeps=True, first=2
        )
        try:
            await again.join()
            client = await again.opened()
            await until(lambda: leader.machine().lost_nodes.before(other.id) == 2)
            assert len((await near.lost()).rows) == 1
            client.put(1)  # the shard below the first of this process
            assert (await client.append([2])).new
            assert sorted(ids(await near.take(2))) == [1, 2]
            assert not (await near.lost()).rows
        finally:
            await again.aclose()


async def test_a_later_leader_keeps_copies_that_a_restarted_node_has_stored_since(tmp_path: Path) -> None:
    async with streaming(3, options={"keeps": True}) as (leader, (heir, other)):
        near = clients([leader])[0]
        await other.aclose()
        coordinator = leader.replicas.coordinator
        name = other.id.decode().rstrip(".")
        again = StreamBench(name, coordinator, directory=tmp_path / "again", keeps=True, first=2)
        try:
            await again.join()
            await until(lambda: leader.machine().lost_nodes.before(other.id) == 2)  # although it had stored nothing
            request = r.Append(ref=near.put(1), versions=np.zeros(1, np.int64), nodes=(again.id,))
            await near.session.ask(near.partition, request, r.AppendResult)
            hosted = leader.hosted()
            before = hosted.configuration
            after = before.deposed_by(next(each for each in before.followers if each[0] == heir.name))
            await coordinator.swap(leader.replicas.key(hosted.partition), encode(before), encode(after))
            await until(lambda: heir.at(hosted.partition))
            await clients([heir])[0].append([0])
            stored = heir.machine().leased.partition.rows.batches.stored()
            assert [batch.spares for _, batch in stored] == [(again.id,), ()]
        finally:
            await again.aclose()


async def test_the_permit_of_a_refused_append_is_returned() -> None:
    async with stream_nodes(1, settings=msgspec.structs.replace(SETTINGS, max_command=8192)) as [node]:
        client = await node.opened(max_rows=100)
        with pytest.raises(LimitExceeded, match="a command of"):
            await client.append(range(60), keys=[f"{number:01000d}" for number in range(60)])
        assert (await client.append(range(60), timeout_s=2.0)).new


async def test_the_permit_of_a_client_that_left_during_a_partitioned_link_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions, "ASK_S", 1.0)
    async with streaming(3, max_rows=12) as (leader, (_, other)):
        client = clients([other])[0]
        await client.append([0])
        assert (await client.ask(rm.AdmitRows(1, client.stream.token, 2, 16, 0, "", b"", 0.0), 5.0)).ticket
        leased, receive = leader.machine().leased, leader.receive
        assert leased.admission.clients()
        leader.receive = lambda frame: None if frame.node == other.name else receive(frame)  # type: ignore[method-assign]
        client.streams.leave()
        await asyncio.sleep(0)
        leader.receive = receive  # type: ignore[method-assign]
        await until(lambda: not leader.machine().leased.admission.clients())


async def test_retained_columns_are_released_when_the_first_release_message_is_lost() -> None:
    async with streaming(3) as (_, (node, third)):
        client = clients([node])[0]
        await client.append([0], keys=["a"])
        before, kept = third.kept, clients([third])[0].put(1)
        real, lost = third.service.answer, [1]

        def once(request: Any) -> Any:
            if isinstance(request, pm.ReleaseColumns) and lost:
                lost.clear()
                raise RuntimeError("lost on the way")
            return real(request)

        third.service.answer = once  # type: ignore[method-assign]
        admit = rm.AdmitRows(1, client.stream.token, 1, 8, 0, "b", b"other", 0.0)
        ticket = (await client.ask(admit)).ticket
        with pytest.raises(Misuse):
            said = ["a"], b"other", [], np.zeros(1, np.int64).tobytes(), {}, None, {}
            await client.ask(rm.AppendRows(1, client.stream.token, *said, ticket=ticket, ref=kept.encode()))
        await until(lambda: not lost and not third.service.holders._claimed)
        (key,) = kept.shards()
        third.needed.recovered({key[1]: key})  # which frees what nobody needs
        assert third.kept == before


async def test_a_column_claim_and_its_release_in_one_read_leave_no_holder() -> None:
    async with streaming(2) as (leader, (node,)):
        client = clients([node])[0]
        before, key = node.retained.holders, client.partition
        claim = pm.RetainColumns(1, leader.id, 7, key, [client.put(1).encode()])
        answers = [node.service.answer(each) for each in (claim, pm.ReleaseColumns(2, leader.id, 7, False))]
        assert answers == [Done(1), Done(2)]
        assert node.retained.holders == before


async def test_untaken_columns_that_a_dead_node_had_claimed_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an append stay, though its node died before it said that they were taken."""
    monkeypatch.setattr(column_holders, "_ENDED_S", 0.05)
    monkeypatch.setattr(column_holders, "_RELEASES_S", 0.05)
    async with streaming(3) as (_, (node, dying)):
        keeping, kept = clients([node])[0], clients([node])[0].put(1)
        claim = pm.RetainColumns(1, dying.id, 7, keeping.partition, [keeping.put(1).encode()])
        assert node.service.answer(claim) == Done(1)
        answer = node.service.answer
        node.service.answer = lambda asked: Done(0) if isinstance(asked, pm.ReleaseColumns) else answer(asked)  # type: ignore[method-assign]
        await clients([dying])[0].append([0], ref=kept)
        assert len(node.service.holders._claimed) == 2
        await dying.aclose()
        needs = node.retained._needs[keeping.partition]
        await until(lambda: node.service.holders.sweep() or len(needs) == 1)
        assert [*needs] == [frozenset(kept.shards())]


async def test_a_snapshot_whose_answer_arrives_too_late_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else columns of acked rows stayed until the client ended, and the fifth checkpoint was refused."""
    async with streaming(2) as (leader, (node,)):
        client = clients([node])[0]
        monkeypatch.setattr(router, "TRY_S", 0.1)
        node.deaf = True
        taking = asyncio.create_task(client.forward(r.TakeSnapshot()))
        snapshots = leader.machine().snapshots
        await until(lambda: len(snapshots._taken) == 2)
        node.deaf = False
        taken = await taking
        await until(lambda: {number for _, number in snapshots._taken} == {taken.snapshot})


async def test_an_undelivered_report_of_lost_rows_is_given_to_the_next_caller() -> None:
    async with streaming(3, options={"lost_s": 1.0}) as (leader, (follower, left)):
        client, other = clients([left, follower])
        await other.append([0, 1])
        await client.append([2])
        await follower.aclose()
        await until(lambda: leader.machine().leased.lost)
        left.deaf = True
        cancelled = asyncio.create_task(client.lost())
        await until(lambda: not leader.machine().leased.lost)
        cancelled.cancel()
        left.deaf = False
        await until(lambda: client.stream.unreported)
        assert len((await client.lost()).rows) == 2
        assert not (await client.lost()).rows


async def test_a_stream_continues_without_its_replicas_and_counts_the_lost_rows() -> None:
    async with streaming(3, options={"lost_s": 1.0}) as (leader, (follower, left)):
        client = clients([left])[0]
        for node in (leader, follower, left):
            node.replicas.recruiting.wanted = lambda partition: 0
        await client.append([0, 1, 2])
        await client.append([3, 4])
        held = await client.take(1)
        before = client.partition
        await asyncio.gather(leader.aclose(), follower.aclose())
        appended = await client.append([5])
        assert appended.new
        assert client.partition != before
        delivery = await client.take(8)
        assert ids(delivery) == [5]
        with pytest.raises(LeaseExpired):
            await client.settle(held)
        with pytest.raises(LeaseExpired):
            await client.extend(held, "y")
        lost = await client.lost()
        assert (lost.rows, lost.unnamed) == ([], {left.name: 5})
        assert (await client.lost()).unnamed == {}
        await client.settle(delivery)
        await until(lambda: left.kept == 0)  # what the rows of the one before needed too


# Appends of one node's clients that are made as one request.


async def test_appends_of_many_clients_are_merged_into_few_commands() -> None:
    async with streaming(2) as (leader, (far, *_)):
        before = leader.hosted().replica.committed
        made = [await far.opened() for _ in range(24)]
        appended = await asyncio.gather(*(client.append([number, number + 100]) for number, client in enumerate(made)))
        assert leader.hosted().replica.committed - before <= 6
        assert sorted(each.first for each in appended) == list(range(0, 48, 2))
        reader = made[0]
        delivery = await reader.take(48, min_rows=48)
        row_of = {row: number for number, each in enumerate(appended) for row in (each.first, each.first + 1)}
        assert [identifier % 100 for identifier in ids(delivery)] == [row_of[row] for row in delivery.rows.tolist()]
        assert far.kept == 24
        await reader.settle(delivery)
        await until(lambda: far.kept == 0)


async def test_an_append_that_cannot_be_merged_is_answered_separately() -> None:
    async with streaming(2) as (_, (far, *_)):
        first, second, third, fourth = [await far.opened() for _ in range(4)]
        await first.append([0])
        both = first.put(2)
        results = await asyncio.gather(
            first.append([1], ref=both[:1]),
            second.append([2], ref=both[1:]),
            third.append([3], keys=["a"]),
            fourth.append([4], ref=fourth.put(1, "y")),
            second.append([5]),
        )
        assert sorted(each.first for each in results) == [1, 2, 3, 4, 5]
        delivery = await first.take(5, min_rows=5)
        assert sorted(ids(delivery)) == [0, 1, 2, 3, 5]
        await first.settle(delivery)
        await until(lambda: far.kept == 1)

"""A node that dies, alone or with everybody else: typed errors at once, and nothing that the next does not reclaim."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import dataplane as dp
from tests.processes import MIB, StandingNode, Worker, eventually, pattern


def test_waiting_clients_get_peer_unavailable_when_the_node_dies(tmp_path: Path) -> None:
    with StandingNode(tmp_path, spill=0) as node, dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(1, 12 * MIB)})
        view = plane.get(ref)["x"].numpy()
        errors: list[Exception] = []

        def wait() -> None:
            try:
                plane.put({"x": pattern(2, 12 * MIB)}, timeout=600)
            except dp.DataplaneError as error:
                errors.append(error)

        waiting = [threading.Thread(target=wait) for _ in range(4)]
        for thread in waiting:
            thread.start()
        eventually(lambda: plane.stats().waiting == 4, "all wait")
        node.kill()
        for thread in waiting:
            thread.join(60)
        assert [type(error) for error in errors] == [dp.PeerUnavailable] * 4
        assert errors[0].address == node.address  # type: ignore[attr-defined]
        for call in (plane.stats, lambda: plane.get(ref), lambda: plane.put({"x": [1]}), lambda: plane.free(ref)):
            with pytest.raises(dp.PeerUnavailable):
                call()
        assert np.array_equal(view, pattern(1, 12 * MIB))  # what was handed out stays


@pytest.mark.long
def test_references_of_a_dead_node_are_lost_on_the_next(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(1, MIB)})
        node.kill()
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        assert node.address == f"unix://{tmp_path}/node.sock"  # the same, in place of the dead one's socket
        with pytest.raises(dp.OwnerDied) as caught:
            plane.get(ref)
        assert caught.value.node
        assert caught.value.node != plane.stats().node
        with pytest.raises(dp.OwnerDied, match="free it there"):
            plane.free(ref)
        new = plane.put({"x": pattern(2, MIB)})
        with pytest.raises(dp.OwnerDied):
            plane.get(dp.concat([new, ref]))
        assert np.array_equal(plane.get(new)["x"].numpy(), pattern(2, MIB))


def test_a_frozen_node_is_unavailable_and_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.client.connection._ANSWER_S", 0.3)
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        node.freeze()
        with pytest.raises(dp.PeerUnavailable):
            plane.stats()
        with pytest.raises(dp.PeerUnavailable):
            plane.put({"x": [1]}, timeout=0.1)
        with pytest.raises(dp.PeerUnavailable):
            dp.connect(node.address)
        node.thaw()
        # What was asked meanwhile was given up: the answers come, to nobody, and nothing is kept for them.
        eventually(lambda: plane.stats().shards == 0, "the put was undone")
        assert plane.get(plane.put({"x": [2]}))["x"].to_list() == [2]


async def test_a_call_not_answered_by_a_frozen_node_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with StandingNode(tmp_path) as node:
        async with dp.aio.connect(node.address) as plane:
            stream, table = await plane.stream("s", tasks=["t"]), plane.table("table")
            ref = await plane.put({"x": [1]})
            patient = plane.connection.welcome

            async def settled(call: Callable[[], Awaitable[Any]]) -> Any:
                node.freeze()
                try:
                    with monkeypatch.context() as hasty, pytest.raises(dp.OutcomeUnknown):
                        hasty.setattr("dataplane.client.connection._ANSWER_S", 0.1)
                        plane.connection.welcome = msgspec.structs.replace(patient, shared_s=0.1)
                        await call()
                finally:
                    node.thaw()
                plane.connection.welcome = patient
                return await call()

            timeouts = iter([0.0, 60.0])
            assert await settled(lambda: stream.append({"x": [1]}, keys=["a"], timeout=next(timeouts))) == ["a"]
            assert (await stream.stats())["rows"] == 1
            delivery = await stream.consume("t", rows=1, columns=["x"], timeout=60)
            timeouts = iter([0.0, 60.0])
            await settled(lambda: stream.extend(delivery.ref, {"y": [2]}, replace=True, timeout=next(timeouts)))
            await settled(delivery.renew)
            await settled(delivery.ack)
            timeouts = iter([0.0, 60.0])
            await settled(lambda: table.upsert(["k"], {"x": [3]}, timeout=next(timeouts)))
            assert (await plane.get(await table.read(["k"])))["x"].to_list() == [3]
            await settled(lambda: plane.free(ref))
            with pytest.raises(dp.Freed):
                await plane.get(ref)
            with pytest.raises(dp.Closed, match="was dropped"):
                await settled(stream.drop)


def test_sigterm_ends_a_node_cleanly_while_it_spills(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        for seed in range(6):
            plane.put({"x": pattern(seed, 4 * MIB)})
        assert node.kill(signal.SIGTERM) == 0
        assert not (tmp_path / "node.sock").exists()
        assert not (tmp_path / "spill").exists(), "it had made it"
        with pytest.raises(dp.PeerUnavailable, match="stopped"):
            plane.stats()


def busy(pipe: Any, address: str) -> None:
    """Holds some of everything that a client can hold."""
    plane = dp.connect(address)
    refs = [plane.put({"x": pattern(seed, 2 * MIB)}) for seed in range(12)]
    draft = plane.draft({"x": dp.dense((1, 1000), "uint8")})
    views = [plane.get(ref)["x"].numpy() for ref in refs[:3]]
    pipe.send(plane.stats().spilled_shards)
    pipe.recv()
    del draft, views


def test_everything_killed_at_once_is_reclaimed_by_a_new_start(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node, Worker(busy, node.address) as one, Worker(busy, node.address) as other:
        assert one.hear() + other.hear() > 0
        spill = tmp_path / "spill"
        assert [path for path in spill.rglob("*") if path.is_file()]
        assert "memfd:dataplane" in Path(f"/proc/{node.pid}/maps").read_text()
        for pid in (node.pid, one.pid, other.pid):
            os.kill(pid, signal.SIGKILL)
        for worker in (node, one, other):
            worker.join()
        left = set(spill.iterdir())
        assert left
        with StandingNode(tmp_path) as again, dp.connect(again.address) as plane:
            assert plane.stats().memory_used == 0
            assert plane.stats().disk_used == 0
            assert not left & set(spill.iterdir())
            assert len(list(spill.iterdir())) == 1
            assert plane.get(plane.put({"x": pattern(1, 8 * MIB)}))["x"].numpy()[0, 5] == pattern(1, 64)[0, 5]
            again.kill(signal.SIGTERM)
        assert list(tmp_path.rglob("*")) == [spill]

"""Clients of processes that have ended leave partitions, also those of a life that nobody here has seen."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

from dataplane.cluster.membership import Member, Membership
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.node.partitions.departed import Departed
from dataplane.node.partitions.replicas import Replicas
from tests.unit.node.partitions.bench import until


class Hosted:
    """A partition that is led here, and the processes whose clients it knows."""

    partition = "p"

    def __init__(self, processes: Iterable[str]) -> None:
        self.processes = dict.fromkeys(processes)
        self.machine = self.replica = self

    def serves(self, now: float) -> bool:
        return True

    def clients(self) -> Iterable[str]:
        return list(self.processes)

    def leaving(self, process: str) -> bytes:
        return process.encode()


class Leader:
    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted

    def __iter__(self) -> Any:
        return iter([self._hosted])

    async def request(self, partition: str, request: bytes, timeout_s: float) -> bytes:
        self._hosted.processes.pop(request.decode(), None)
        return b""


async def test_clients_of_a_life_before_this_one_leave_after_a_while() -> None:
    coordinator = ProcessCoordinator()
    members = Membership(coordinator, "a", Member(7, "", "a", keeps=True))
    hosted = Hosted(["a/7", "a/3", "b/1"])
    running = asyncio.ensure_future(members.run())
    patient = Departed(members, cast(Replicas, Leader(hosted)), replaced_s=60.0)
    departed = Departed(members, cast(Replicas, Leader(hosted)), replaced_s=0.01)
    try:
        await members.joined()
        await until(lambda: members.coordination.answers)
        patient.look()
        await asyncio.sleep(0)
        assert set(hosted.processes) == {"a/7", "a/3", "b/1"}, "a view of the members may be old"

        def gone() -> bool:
            departed.look()
            return set(hosted.processes) == {"a/7", "b/1"}

        await until(gone)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await departed.aclose()
        await patient.aclose()

"""How a node comes to its coordinator, as the settings say: an etcd that is there, one that the seeds run, or one that
the nodes agree on (`cluster.founding`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from dataplane.cluster.detector import Detector
from dataplane.cluster.founding import Founding, check_installed
from dataplane.cluster.membership import Member, Membership
from dataplane.config import ClusterConfig
from dataplane.coordinator.base import Coordinator
from dataplane.coordinator.current import CurrentCoordinator
from dataplane.wire import peer_messages as pm
from dataplane.wire.auth import Key
from dataplane.wire.peer import Peers

if TYPE_CHECKING:
    from dataplane.cluster.seeds import Seeds


class Cluster:
    """A node's coordinator, and its membership there."""

    def __init__(self, config: ClusterConfig, peers: Peers, me: str, member: Member, key: Key | None) -> None:
        """`peers` have been started. Raises OSError; ValueError where something is not installed; Rejected where this
        node's directory is another cluster's."""
        how = config.joined
        self._seeds: Seeds | None = None
        self._founding: Founding | None = None
        current: CurrentCoordinator | None = None
        self.coordinator: Coordinator
        if how.engine == "static":
            if how.addresses:
                check_installed()
                _program()
            self.coordinator = current = CurrentCoordinator()
        elif how.engine == "seeds":
            from dataplane.cluster.seeds import Seeds

            check_installed()
            assert key is not None, "the settings were checked"
            self._seeds = Seeds(config, key)
            self.coordinator = self._seeds.coordinator
        else:
            from dataplane.cluster.access import access  # with TLS and an HTTP client, which others do not need
            from dataplane.coordinator.etcd import EtcdCoordinator

            tls, login = access(config)
            self.coordinator = EtcdCoordinator(how.addresses, how.name, tls=tls, login=login)
        self.membership = Membership(self.coordinator, me, member, key=key)
        self.detector = Detector(peers, self.membership)
        if current is not None:
            self._founding = Founding(
                how.addresses, member.address, config.host, key, peers, current, self.membership, self.detector
            )

    async def run(self) -> None:
        """Be a member until cancelled, and then leave. Raises Rejected where this node may not be one."""
        serving = self._seeds or self._founding
        running = [asyncio.ensure_future(work) for work in (self.membership.run(), self.detector.run())]
        if serving is not None:
            running.append(asyncio.ensure_future(serving.run()))
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(running[:2])
            await self.membership.leave()  # while there is an etcd to be told so
            await _ended(running[2:])
        for task in running:
            if not task.cancelled():
                task.result()

    def answer(self, asked: pm.FindCoordinator) -> pm.Coordinates:
        """Another node looks for the coordinator. Raises ProtocolMismatch."""
        if self._founding is not None:
            return self._founding.answer(asked)
        why = f"node {self.membership.me} asks {self.coordinator.address}, by its --join or --seeds: say the same"
        return pm.Coordinates(asked.id, bytes.fromhex(self.membership.me), why=why)

    def seek(self, addresses: Iterable[str]) -> None:
        """Others listen at these tcp://HOST:PORT."""
        if self._founding is not None:
            self._founding.seek(addresses)

    async def aclose(self) -> None:
        """Let go of all, once it runs no more. Idempotent."""
        await self.coordinator.aclose()
        if self._seeds is not None:
            await self._seeds.aclose()


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """End these."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def serves(config: ClusterConfig) -> bool:
    """Whether a node could run a server of the cluster's etcd. Nothing is imported for that: one alone needs none."""
    try:
        _program()
    except ValueError:
        return False
    return config.joined.engine == "static" and all(map(find_spec, ("aiohttp", "cryptography")))


def _program() -> str:
    from dataplane.cluster.server import program

    return program()

"""A failure detector: finds members whose processes have ended. It relies on the kernel of their host, never on
silence.

If a connection of the control channel closes, or a registration disappears, the detector connects to the address: if
the host refuses the connection, the process has ended. Each node is connected to the next member in the order of names,
so for any process some node sees its end and removes its registration; then all other nodes probe it too. The cost is
one idle connection for each node.

Invariant: slowness never counts as death. This holds for a process that is stopped or gets no processor time, and for a
host that cannot be reached. If a host has refused connections since this node first knew the member (because of a
firewall, say), that proves nothing while the member is registered. The exception is a member on this machine: a node
that is restarted at once must learn that its predecessor has ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable

from dataplane.clock import monotonic
from dataplane.cluster.membership import Membership
from dataplane.errors import PeerUnavailable
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

_LOOKS_S = (0.0, 0.02, 0.1, 0.3, 0.6, 1.0)  # pauses between probes of a process whose connection closed
_ABSENT_S = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)  # those of a node that is not registered; the last one is repeated
_LOOK_S = 1.0  # timeout of a probe


class Detector:
    """The detector of one node. `run` is a task beside that of the membership, in the same event loop."""

    def __init__(self, peers: Peers, membership: Membership) -> None:
        self._peers = peers
        self._membership = membership
        self._group: asyncio.TaskGroup | None = None
        self._probed: set[tuple[str, int]] = set()
        self._met: set[tuple[str, int]] = set()  # members of this machine that were probed
        peers.closed = self._closed
        membership.watch(self._changed)

    async def run(self) -> None:
        """Run the probes until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            try:
                self._changed()
                await asyncio.Event().wait()
            finally:
                self._group = None  # a group that ends accepts no more tasks

    def suspect(self, nodes: Iterable[str]) -> None:
        """Probe whether the processes of these nodes have ended."""
        for node in nodes:
            member = self._membership.current.get(node)
            if member is not None and node != self._membership.me:
                self._probe(node, member.life, member.address, _LOOKS_S, absent=False)

    def _closed(self, address: str) -> None:
        """Suspect the node at this address: an open connection to it has closed."""
        self.suspect([node for node, member in self._membership.current.items() if member.address == address])

    def _changed(self) -> None:
        me, members = self._membership.me, self._membership.current
        others = sorted(members.keys() - {me})
        following = next((node for node in others if node > me), others[0] if others else None)
        if following is not None:
            try:
                self._peers.connect(members[following].address)
            except PeerUnavailable as error:
                log.info("node %s cannot be reached: %s", following, error)
        for node, member in self._membership.missing.items():
            self._probe(node, member.life, member.address, _ABSENT_S, absent=True)
        if self._group is None:
            return
        machine = members[me].host
        here = {(node, members[node].life) for node in others if machine and members[node].host == machine}
        self.suspect(node for node, life in here - self._met)
        self._met = here

    def _probe(self, node: str, life: int, address: str, looks_s: tuple[float, ...], *, absent: bool) -> None:
        if self._group is not None and (node, life) not in self._probed:
            self._probed.add((node, life))
            self._group.create_task(self._look(node, life, address, looks_s, absent))

    async def _look(self, node: str, life: int, address: str, looks_s: tuple[float, ...], absent: bool) -> None:
        pauses = iter(looks_s)
        try:
            while True:
                pause_s = next(pauses, looks_s[-1] if absent else None)
                if pause_s is None:
                    return
                await asyncio.sleep(pause_s)
                if absent and (node not in self._membership.missing or self._membership.gone(node)):
                    return
                before_s = monotonic()
                if await refused(address):
                    self._membership.ended(node, life, before_s)
                    return
        finally:
            self._probed.discard((node, life))


async def refused(address: str) -> bool:
    """Whether the host at tcp://HOST:PORT refuses connections to the port, at all of its addresses if HOST is a name.
    Of a name, nodes listen on IPv4 addresses only."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    try:
        async with asyncio.timeout(_LOOK_S):
            loop = asyncio.get_running_loop()
            found = await loop.getaddrinfo(host.strip("[]"), int(port), family=family, type=socket.SOCK_STREAM)
            for *_, place in found:
                try:
                    _, writer = await asyncio.open_connection(str(place[0]), int(port))
                except ConnectionRefusedError:
                    continue
                writer.transport.abort()
                return False
    except (OSError, TimeoutError):
        return False
    return bool(found)

"""Clients whose processes have ended leave the partitions that are led here, so that others are given what they held at
once, and not when their leases end.

A client is called NODE/LIFE/NUMBER: its node, the incarnation of the node, and its number there. A process has ended
when its node is gone, or was seen with another incarnation since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from dataplane.clock import monotonic
from dataplane.cluster.membership import Membership
from dataplane.errors import DataplaneError
from dataplane.node.partitions.background import BackgroundTasks
from dataplane.node.partitions.hosted import Hosted
from dataplane.node.partitions.replicas import Replicas

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_ASK_S = 5.0
_REMEMBERED = 4096  # lives that are over

REPLACED_S = 60.0
"""How long a node has to be a member before an incarnation of it that was never seen here counts as ended. It may be
that of a durable partition that was led before all nodes went down; a membership that was seen so lately is not an
earlier one."""


@runtime_checkable
class HasClients(Protocol):
    """A state machine that clients hold something of."""

    def clients(self) -> Iterable[str]:
        """The NODE/LIFE prefixes of its clients, without duplicates."""

    def leaving(self, process: str) -> bytes:
        """The request by which all clients of a NODE/LIFE leave. May be repeated."""


class ClientDepartures:
    """See the module. `run` works until cancelled."""

    def __init__(self, members: Membership, replicas: Replicas, *, replaced_s: float = REPLACED_S) -> None:
        self._members = members
        self._replaced_s = replaced_s
        self._replaced: dict[str, float] = {}  # processes whose node is another process by now, since when
        self._replicas = replicas
        self._lives: dict[str, str] = {}
        self._past: dict[str, None] = {}
        self._leaving: set[tuple[str, str]] = set()
        self._background = BackgroundTasks()
        members.watch(self._changed)
        members.watch_ended(self._process_ended)

    def _changed(self) -> None:
        for node, member in self._members.current.items():
            life = str(member.life)
            before = self._lives.setdefault(node, life)
            if before != life:
                self._lives[node] = life
                self._over(node, before)

    def _process_ended(self, node: str, before_s: float) -> None:
        """Also for a durable node that comes back: its clients do not."""
        life = self._lives.get(node)
        if life is not None:
            self._over(node, life)

    def _over(self, node: str, life: str) -> None:
        self._past[f"{node}/{life}"] = None
        if len(self._past) > _REMEMBERED:
            del self._past[next(iter(self._past))]

    def _ended(self, process: str) -> bool:
        node, _, life = process.partition("/")
        if process in self._past or self._members.gone(node):
            return True
        member = self._members.current.get(node)
        if member is None or str(member.life) == life or not self._members.coordination.answers:
            self._replaced.pop(process, None)
            return False
        if len(self._replaced) > _REMEMBERED:
            self._replaced.clear()
        return monotonic() - self._replaced.setdefault(process, monotonic()) >= self._replaced_s

    async def run(self) -> None:
        """Work until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Begin what is due."""
        now = monotonic()
        for hosted in self._replicas:
            machine = hosted.machine
            if not isinstance(machine, HasClients) or not hosted.replica.serves(now):
                continue
            for process in machine.clients():
                if (hosted.partition, process) not in self._leaving and self._ended(process):
                    self._leaving.add((hosted.partition, process))
                    self._background.spawn(self._leave(hosted, machine, process))

    async def _leave(self, hosted: Hosted, machine: HasClients, process: str) -> None:
        try:
            await self._replicas.request(hosted.partition, machine.leaving(process), _ASK_S)
        except DataplaneError as error:
            log.info("clients of %s leave %s later: %s", process, hosted.partition, error)
        finally:
            self._leaving.discard((hosted.partition, process))

    async def aclose(self) -> None:
        """Stop. Idempotent."""
        await self._background.aclose()

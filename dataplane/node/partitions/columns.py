"""Columns of rows lie in the stores of nodes; the leaders of the rows' partitions say what becomes of them.

When a node has gone, the leader of each partition that names it decides a command by which the rows whose bytes it
alone held are lost: so `lost()` outlives the node, and the leader. And nodes are told which rows no longer need their
columns (or need them still): a partition's outbox is part of its state, so that a new leader tells again what may not
have been told; to be told twice changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

from dataplane.clock import monotonic
from dataplane.errors import DataplaneError
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.channel import Channel
from dataplane.node.partitions.hosted import Hosted
from dataplane.node.partitions.members import Members
from dataplane.node.partitions.replicas import Replicas
from dataplane.wire import partition_messages as m

log = logging.getLogger(__name__)

_LOOK_S = 0.2  # between looks at outboxes: what comes up meanwhile is told together
_ASK_S = 5.0
_ENTRIES = 1024


@runtime_checkable
class HasColumns(Protocol):
    """A state machine whose rows have columns in the stores of nodes."""

    def holders(self) -> Iterable[str]:
        """The nodes that hold columns of its rows."""

    def losing(self, node: str) -> bytes:
        """The request by which what this node alone held is lost. May be repeated."""

    def waiting(self) -> Iterable[str]:
        """The nodes that there is something to tell."""

    def outbox(self, node: str, most: int) -> tuple[tuple[bytes, ...], int]:
        """What to tell a node, oldest first, and a number that goes up with each entry, of the last of them."""

    def telling(self, node: str, told: int) -> bytes:
        """The request by which the entries up to this number leave the node's outbox. May be repeated."""


Settled = Callable[[str, tuple[bytes, ...]], None]


class Columns:
    """The columns of this node, and of the partitions that it leads. `settled(partition, entries)` is called with what
    a leader tells this node."""

    def __init__(self, members: Members, replicas: Replicas, channel: Channel, settled: Settled) -> None:
        self._me = members.me
        self._members = members
        self._replicas = replicas
        self._channel = channel
        self._settled = settled
        self._losing: set[tuple[str, str]] = set()
        self._telling: set[tuple[str, str]] = set()
        self._background = Background()
        replicas.settle = self._settle

    async def run(self) -> None:
        """Tell nodes, and lose what is lost, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Begin what is due."""
        now = monotonic()
        for hosted in self._replicas:
            machine = hosted.machine
            if not isinstance(machine, HasColumns) or not hosted.replica.serves(now):
                continue
            for node in machine.holders():
                if self._members.gone(node) and (hosted.partition, node) not in self._losing:
                    self._losing.add((hosted.partition, node))
                    self._background.spawn(self._lose(hosted, machine, node))
            for node in machine.waiting():
                if (hosted.partition, node) not in self._telling:
                    self._telling.add((hosted.partition, node))
                    self._background.spawn(self._tell(hosted, machine, node))

    async def _lose(self, hosted: Hosted, machine: HasColumns, node: str) -> None:
        try:
            await self._replicas.request(hosted.partition, machine.losing(node), _ASK_S)
            log.info("what node %s alone held of %s is lost", node, hosted.partition)
        except DataplaneError as error:
            log.info("what node %s held of %s is looked after later: %s", node, hosted.partition, error)
        finally:
            self._losing.discard((hosted.partition, node))

    async def _tell(self, hosted: Hosted, machine: HasColumns, node: str) -> None:
        """Tell a node all there is, one message at a time."""
        try:
            while not hosted.closed and hosted.replica.leads:
                entries, last = machine.outbox(node, _ENTRIES)
                if not entries:
                    return
                if node == self._me:
                    self._settled(hosted.partition, entries)
                elif not self._members.gone(node):
                    await self._channel.ask(node, lambda number: m.Settle(number, hosted.partition, entries), _ASK_S)  # noqa: B023
                await self._replicas.request(hosted.partition, machine.telling(node, last), _ASK_S)
        except DataplaneError as error:
            log.debug("node %s is told of %s later: %s", node, hosted.partition, error)
        finally:
            self._telling.discard((hosted.partition, node))

    def _settle(self, node: str, told: m.Settle) -> None:
        """A leader tells this node."""
        try:
            self._settled(told.partition, told.entries)
        except DataplaneError as error:
            self._channel.answer(node, told.number, error)
        else:
            self._channel.answer(node, told.number, b"")

    async def aclose(self) -> None:
        """Tell nobody more. Idempotent."""
        await self._background.aclose()

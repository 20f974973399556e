"""Acks of one client. An ack may be repeated while the first one is in flight or its outcome is unknown.

A repeated ack shares the sequence number of the first one, and gets its outcome. With a sequence number of its own it
could be refused although the first was applied: a new leader does not know the grants of the former leader.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dataplane.errors import DataplaneError, OutcomeUnknown
from dataplane.node.partitions.record import called
from dataplane.node.sessions.interface import ASK_S, Outcome
from dataplane.stream import requests as r

if TYPE_CHECKING:
    from dataplane.node.clustered.session import PartitionSession

_REMEMBERED = 4096

_Key = tuple[str, int, int | None]


class Acks:
    """See the module."""

    def __init__(self, session: PartitionSession) -> None:
        self.session = session
        self._unknown: dict[_Key, asyncio.Future[Outcome]] = {}

    async def ack(self, partition: str, grant: int, replica: int | None = None) -> None:
        """Acknowledge the rows of a grant. Raises LeaseExpired, Lost; OutcomeUnknown, after which the ack may be
        repeated."""
        key = partition, grant, replica
        if key in self._unknown:
            await self._again(key)
            return
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def settled(known: Outcome) -> None:
            if not outcome.done():
                outcome.set_result(known)

        self._unknown[key] = outcome
        if len(self._unknown) > _REMEMBERED:
            del self._unknown[next(iter(self._unknown))]
        try:
            await self.session.ask(partition, r.Ack(grant=grant, replica=replica), r.Succeeded, settled=settled)
        finally:
            if outcome.done():
                self._unknown.pop(key, None)

    async def _again(self, key: _Key) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                outcome = await asyncio.shield(self._unknown[key])
        except TimeoutError:
            raise OutcomeUnknown(
                f"the leader of {called(key[0])} has not answered in time whether these rows are acked"
            ) from None
        self._unknown.pop(key, None)
        if isinstance(outcome, DataplaneError):
            raise outcome

    def leave(self) -> None:
        """Forget all acks, since the client has ended."""
        self._unknown.clear()

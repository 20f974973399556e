"""Grants of several partitions that one delivery is made of: renewed, acked and given back together.

An ack of several is in two phases: each partition is asked to prepare its rows (`stream.prepared`) and then, once all
have, to settle them. It is one piece of work of the node, which goes on until each partition has answered or is gone,
whether anybody waits for it or not; who acks again waits for the same.

What always holds: where one partition refuses for certain, the others give back what they have prepared, LeaseExpired
is raised, and nothing counts. Once all have prepared, all counts, but for partitions that are lost with all their
replicas before they are asked: their rows are gone. OutcomeUnknown says that an answer did not come yet. A client that
goes before all have prepared has acked nothing; if its node goes before all have settled, those that have not give the
rows back. So does a partition that this node could not reach for so long that it was taken for dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from dataplane.errors import DataplaneError, LeaseExpired, Lost, OutcomeUnknown
from dataplane.node.clustered import session as sessions
from dataplane.node.clustered.acks import Acks
from dataplane.node.clustered.asking import all_of
from dataplane.node.clustered.merge import Given
from dataplane.node.clustered.session import Outcome, Session
from dataplane.node.clustered.streams import Partition
from dataplane.stream import requests as r


@dataclass(slots=True)
class Grants:
    """Those of one delivery. `acking`: their ack, once it was asked for."""

    several: list[tuple[Partition, int]]
    acking: AckOfSeveral | None = None

    @classmethod
    def of(cls, given: Sequence[Given]) -> Grants:
        """Those of these deliveries."""
        return cls([(partition, reply.grant) for partition, reply in given])

    def leave(self) -> None:
        """Who has the delivery has gone: an ack that is not decided comes to nothing."""
        if self.acking is not None:
            self.acking.abandon()


class AckOfSeveral:
    """The ack of the grants of one delivery."""

    def __init__(self, session: Session, several: Sequence[tuple[Partition, int]]) -> None:
        self._session = session
        self._several = several
        self._prepared: list[tuple[Partition, int]] = []
        self._decided = False
        self._outcome: asyncio.Future[DataplaneError | None] = asyncio.get_running_loop().create_future()
        session.run_soon(self._run())

    async def wait(self) -> None:
        """Wait for the outcome. Raises LeaseExpired, and then nothing counts; OutcomeUnknown where a partition has not
        answered in time."""
        try:
            async with asyncio.timeout(sessions.ASK_S):
                outcome = await asyncio.shield(self._outcome)
        except TimeoutError:
            raise OutcomeUnknown("not all partitions have answered in time whether these rows are done") from None
        if outcome is not None:
            raise outcome

    def abandon(self) -> None:
        """Nobody asks for it any more."""
        if not self._decided:
            self._refuse(LeaseExpired("who had these rows has gone"))

    async def _run(self) -> None:
        try:
            await self._ack()
        except Exception as error:
            if not self._outcome.done():
                self._outcome.set_exception(error)
            raise

    async def _ack(self) -> None:
        await asyncio.gather(*(self._prepare(partition, grant) for partition, grant in self._several))
        if not self._decided:
            self._decided = True
            answers = await asyncio.gather(*(self._conclude(each, keep=True) for each in self._prepared))
            refused = [each for each in answers if isinstance(each, DataplaneError) and not isinstance(each, Lost)]
            self._outcome.set_result(refused[0] if refused else None)

    async def _prepare(self, partition: Partition, grant: int) -> None:
        answer = await self._session.answer(partition, r.Prepare(grant=grant))
        if isinstance(answer, Lost):
            self._refuse(LeaseExpired(f"some of these rows are lost: {answer}"))
        elif isinstance(answer, DataplaneError):
            self._refuse(answer)
        elif self._decided:  # another has refused
            await self._conclude((partition, grant), keep=False)
        else:
            self._prepared.append((partition, grant))

    def _refuse(self, error: DataplaneError) -> None:
        """Nothing counts."""
        if not self._decided:
            self._decided = True
            self._outcome.set_result(error)
            for each in self._prepared:
                self._session.run_soon(self._conclude(each, keep=False))

    async def _conclude(self, prepared: tuple[Partition, int], *, keep: bool) -> Outcome:
        partition, grant = prepared
        return await self._session.answer(partition, r.Conclude(grant=grant, keep=keep))


async def renew(session: Session, grants: Grants) -> None:
    """The leases of these grants begin again; those of grants that are being acked are over. Raises LeaseExpired, also
    for a partition that is lost."""
    if grants.acking is not None:
        return
    try:
        await all_of([session.ask(partition, r.Renew(grant=grant), r.Done) for partition, grant in grants.several])
    except Lost as error:
        raise LeaseExpired(f"some of these rows are lost: {error}") from error


async def settle(acks: Acks, grants: Grants, *, done: bool, seen: bool) -> None:
    """Ack all grants, or give all back. Raises LeaseExpired, and then none counts; OutcomeUnknown where that is not
    known yet, and then it may be repeated."""
    session, several = acks.session, grants.several
    if grants.acking is not None:  # which stands, also where the rows are given back after it
        await grants.acking.wait()
    elif not done:
        await all_of([session.ask(p, r.Nack(grant=grant, seen=seen), r.Result) for p, grant in several])
    elif len(several) == 1:
        await _ack(acks, *several[0])
    else:
        grants.acking = AckOfSeveral(session, several)
        await grants.acking.wait()


async def _ack(acks: Acks, partition: Partition, grant: int) -> None:
    try:
        await acks.ack(partition, grant)
    except Lost as error:
        raise LeaseExpired(f"these rows are lost: {error}") from error

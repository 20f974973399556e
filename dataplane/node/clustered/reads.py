"""What one client asks of a clustered stream to read it: deliveries, acks, candidates, dead letters, snapshots.

Deliveries of one partition are acked and renewed at that partition.
"""

from __future__ import annotations

from dataplane.clock import Deadline
from dataplane.node.clustered.acks import Acks
from dataplane.node.clustered.candidates import CandidateRows
from dataplane.node.clustered.gather import Gather, Turns
from dataplane.node.clustered.member_requests import MemberRequests
from dataplane.node.clustered.merge import letters
from dataplane.node.clustered.session import Session
from dataplane.node.clustered.snapshots import ClusteredSnapshots
from dataplane.node.clustered.streams import Stream
from dataplane.stream import requests as r
from dataplane.wire import messages as m

Read = m.Consume | m.Look | m.Ack | m.Renew | m.Dead | m.TakeSnapshot


class ClientReads:
    """The reads of one client."""

    def __init__(self, session: Session, turns: Turns, replicas: MemberRequests) -> None:
        """`turns` are the node's."""
        self._session = session
        self._replicas = replicas
        self._candidates = CandidateRows(session)
        self.acks = Acks(session)
        self._gather = Gather(self.acks, self._candidates, turns)
        self.snapshots = ClusteredSnapshots(session)

    async def answer(self, request: Read, stream: Stream, deadline: Deadline) -> m.Reply:
        """The reply to a request about the stream as a whole. Raises as each does."""
        match request:
            case m.Consume(replica=int()):
                return await self._replicas.consume(request, stream, deadline)
            case m.Look(replica=int()):
                return await self._replicas.look(request, stream, deadline)
            case m.Ack(replica=int()):
                await self._replicas.ack(request, stream)
            case m.Renew(replica=int()):
                await self._replicas.renew(request, stream)
            case m.Consume():
                return await self._gather.consume(request, stream, deadline)
            case m.Look():
                return await self._candidates.look(request, stream, deadline)
            case m.Ack():
                await self._gather.ack(request)
            case m.Renew():
                await self._gather.renew(request)
            case m.Dead():
                return await self._dead(request, stream)
            case m.TakeSnapshot():
                return await self.snapshots.take(request, stream)
        return m.Done(request.id)

    async def _dead(self, request: m.Dead, stream: Stream) -> m.Delivered:
        """The first rows that were given back too often, with the columns that all of them have."""
        most, found = max(0, request.most), []
        for partition in self._session.partitions(stream):
            reply = await self._session.ask(partition, r.DeadLetters(task=request.task, most=most), r.Letters)
            found.append((partition, reply))
            most -= len(reply.rows)
        return letters(request.id, stream.token, found)

    def leave(self) -> None:
        """The client has gone."""
        self.acks.leave()
        self._gather.leave()
        self._replicas.leave()
        self.snapshots.leave()

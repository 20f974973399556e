"""The streams of the cluster on one node: handles requests of its clients and of other nodes.

Invariants: each client has one session, which ends with the client. Columns of this node that a partition needs are
released when the partition no longer exists, even if another node dropped the stream.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from dataplane.background_tasks import BackgroundTasks
from dataplane.clock import Deadline, monotonic
from dataplane.cluster.membership import Member
from dataplane.coordinator.base import Unavailable
from dataplane.errors import DataplaneError, Lost, PeerUnavailable
from dataplane.node.clustered.append_merger import AppendMerger
from dataplane.node.clustered.column_holders import ColumnHolders, Keep
from dataplane.node.clustered.open_streams import ClusteredStream, OpenStreams, encode_settings, token_of
from dataplane.node.clustered.retained_shards import RetainedShards
from dataplane.node.clustered.session import PartitionSession, patiently
from dataplane.node.partitions.partitions import Partitions
from dataplane.node.partitions.record import EPOCHS, Record
from dataplane.node.sessions.interface import ASK_S, ENDED, MAX_STREAMS, Outcome
from dataplane.stream import requests as r
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.machine import StreamMachine
from dataplane.stream.settings import StreamSettings
from dataplane.stream.statistics import Waiting, figures, labelled
from dataplane.wire import peer_messages as pm
from dataplane.wire import row_messages as rm
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers

T = TypeVar("T")

_LOST = 4096  # the most lost rows that one message reports
_TELL_S = 2.0
_PAUSE_S = 0.02  # the pause between reads of a stream's record while its partition changes


class Restoring:
    """A stream that is being restored and has no name yet."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.generation = record.generation
        self.token = token_of(f"{record.name}/{record.generation}")
        self.partition = record.key or ""


class ClusteredStreams:
    """See the module. The creator of this object starts and stops `partitions`, and passes the entries of their
    outboxes to `retained`."""

    def __init__(
        self,
        node: bytes,
        partitions: Partitions,
        retained: RetainedShards,
        peers: Peers,
        life: int,
        *,
        keep: Keep | None = None,
    ) -> None:
        me = partitions.members.me
        self.partitions = partitions
        self.streams = OpenStreams(partitions.directory)
        self.find, self.named = self.streams.find, self.streams.named
        self.holders = ColumnHolders(node, retained, partitions.members, peers, partitions.router, life, keep)
        self.claim = self.holders.claim
        self._retained = retained
        self._peers = peers
        self._me = f"{me}/{life}"
        self._numbers = itertools.count(1)
        self._background = BackgroundTasks()
        self._together = AppendMerger(node, partitions.router, self._background)
        partitions.replicas.retained = retained.rows
        partitions.directory.records.changed = self._over
        partitions.directory.records.dropped = self._dropped
        self._owners: dict[str, object] = {}  # by the name of the session

    def session(self, owner: object) -> PartitionSession:
        client = f"{self._me}/{next(self._numbers)}"
        self._owners[client] = owner
        return PartitionSession(client, self.partitions, self._background, together=self._together)

    def label(self, client: str) -> str:
        """The label of a client of this node; for any other client, a text that names its node."""
        node = client.partition("/")[0]
        return str(self._owners.get(client, ENDED)) if node == self._me else f"a process of node {node}"

    def forget(self, client: str) -> None:
        self._owners.pop(client, None)

    # whole streams

    async def open(self, name: str, settings: StreamSettings | None) -> ClusteredStream:
        return await patiently(lambda: self.streams.open(name, settings))

    async def prepare(self, name: str, settings: StreamSettings, mark: str) -> Restoring:
        followers, encoded = max(1, settings.replicas - 1), encode_settings(settings)
        try:
            record = await self.partitions.directory.prepare(
                name, encoded, followers=followers, durable=settings.durable
            )
        except Unavailable as error:
            raise PeerUnavailable(f"the cluster's coordinator does not answer: {error}") from error
        return Restoring(record)

    async def publish(self, restored: Restoring) -> None:
        await patiently(lambda: self.partitions.directory.publish(restored.record))

    async def discard(self, restored: Restoring) -> None:
        await patiently(lambda: self.partitions.directory.discard(restored.record))
        self._retained.drop(restored.partition)

    async def on(self, stream: ClusteredStream, work: Callable[[str], Awaitable[T]]) -> T:
        """Return the result of `work` with the partition of the stream. If every replica has died, create another
        partition, and call `work` again. Raises Closed once the stream is dropped, PeerUnavailable, and the errors of
        `work`."""
        directory, until = self.partitions.directory, Deadline.after(ASK_S)
        while True:
            partition = stream.partition
            if partition is None:
                record = stream.record
                await patiently(lambda record=record: directory.placed(record, record))  # type: ignore[misc]
                continue
            try:
                return await work(partition)
            except Lost as error:
                if type(error) is not Lost or not until.remaining_s:
                    raise
                key = partition
                await patiently(lambda key=key: directory.lost(stream.name, key))  # type: ignore[misc]
            await asyncio.sleep(_PAUSE_S)

    async def drop(self, stream: ClusteredStream) -> None:
        """Drop the stream on every node that answers. Raises Closed, PeerUnavailable."""
        record = stream.record
        await patiently(lambda: self.partitions.directory.drop(stream.name, record.generation))
        self._dropped(record)
        members = self.partitions.members
        others = [member for node, member in members.current.items() if node != members.me]
        await asyncio.gather(*[self._tell_dropped(member, record) for member in others])

    async def _tell_dropped(self, member: Member, record: Record) -> None:
        said = pm.StreamDropped(self._peers.next_id(), record.name, record.generation)
        with suppress(DataplaneError):  # the coordinator notifies a node that does not answer
            await self._peers.request(member, said, Done, _TELL_S)

    def _dropped(self, record: Record) -> None:
        if record.key is not None:
            self._over(record.key)
        self.streams.forget(record)

    def _over(self, partition: str) -> None:
        """Release the needs of a partition that no longer exists."""
        self._retained.drop(partition)
        self.partitions.columns.forget(partition)

    async def take_lost(
        self, request: rm.TakeLostRows, stream: ClusteredStream, session: PartitionSession
    ) -> rm.LostRowsTaken:
        """Return lost rows, each once. If every replica of a partition has died, only the numbers of its rows are
        known, by the node of their producers. Raises Closed, PeerUnavailable, OutcomeUnknown."""
        waits = True

        def settled(outcome: Outcome) -> None:
            if not waits and isinstance(outcome, r.LostRowsResult):
                stream.unreported.append(_lost_rows(request, outcome))

        try:
            asked = r.TakeLost(most=_LOST)
            found = await self.on(stream, lambda at: session.ask(at, asked, r.LostRowsResult, settled=settled))
        finally:
            waits = False
        stream.unreported.append(_lost_rows(request, found))
        unnamed: Counter[str] = Counter()
        for lost in await patiently(lambda: self.partitions.directory.take_lost(stream.name)):
            unnamed.update(dict(lost.rows))
        told, stream.unreported = stream.unreported, []
        for reply in told:
            unnamed.update(reply.unnamed)
        return rm.LostRowsTaken(request.id, stream.token, [row for reply in told for row in reply.rows], dict(unnamed))

    def report_again(self, reply: rm.LostRowsTaken) -> None:
        stream = self.streams.named(reply.stream)
        if stream is not None:
            stream.unreported.append(reply)

    # figures

    def figures(self, after: str | None = None, most: int = MAX_STREAMS) -> dict[str, Any]:
        """Statistics by name of the first `most` streams after the name `after` whose partitions are led here."""
        led, now = self._led(), monotonic()
        names = sorted(name for name in led if after is None or name > after)[:most]
        return {
            name: labelled(figures(led[name].leased, led[name].by_its_clock(now), led[name].pending()), self.label)
            for name in names
        }

    def led(self, now: float) -> list[tuple[str, str, LeasedRows, Waiting, bool, float]]:
        """For each partition led here: its key, the name of the stream, its rows, the waiting requests, whether no
        other node led it before, and `now` by the clock of the partition."""
        found = []
        for hosted in self.partitions.replicas:
            machine = hosted.machine
            if isinstance(machine, StreamMachine) and hosted.replica.leads:
                first = hosted.configuration.epoch % EPOCHS <= 1
                waiting, by_its_clock = machine.pending(), machine.by_its_clock(now)
                found.append((hosted.partition, machine.name, machine.leased, waiting, first, by_its_clock))
        return found

    def __len__(self) -> int:
        """The number of streams whose partitions are led here."""
        return len(self._led())

    def _led(self) -> dict[str, StreamMachine]:
        now = monotonic()
        return {
            hosted.machine.name: hosted.machine
            for hosted in self.partitions.replicas
            if isinstance(hosted.machine, StreamMachine)
            and hosted.replica.serves(now)
            and self.partitions.directory.records.may_have(hosted.partition)
        }

    # other nodes

    def answer(self, request: Any) -> Message | Awaitable[Message] | None:
        """The answer to another node; None if the request is not about streams. Raises as `ColumnHolders.retain`."""
        match request:
            case pm.RetainColumns():
                waits = self.holders.retain(request)
                return Done(request.id) if waits is None else self._persisted(request, waits)
            case pm.ReleaseColumns():
                self.holders.release(request)
            case pm.StreamDropped():
                self.partitions.directory.records.forget(request.name, request.generation)
            case _:
                return None
        return Done(request.id)

    async def _persisted(self, request: pm.RetainColumns, waits: Awaitable[None]) -> Message:
        await waits
        return Done(request.id)

    async def aclose(self) -> None:
        await self.holders.aclose()
        await self._background.aclose()


def _lost_rows(request: rm.TakeLostRows, found: r.LostRowsResult) -> rm.LostRowsTaken:
    rows = [(key, group, version, acked) for _, key, group, version, acked in found.rows]
    return rm.LostRowsTaken(request.id, request.stream, rows)

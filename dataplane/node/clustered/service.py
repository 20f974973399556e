"""The streams of the cluster for one node: what its clients ask, and what other nodes ask of it.

What always holds: each client has one session, and it ends with the client; what partitions need here is let go of when
they are gone, also with a stream that another node dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

from dataplane.clock import monotonic
from dataplane.coordinator.base import Unavailable
from dataplane.errors import Closed, DataplaneError, Misuse, OutcomeUnknown, PeerUnavailable
from dataplane.node.clustered.asking import all_of, patiently
from dataplane.node.clustered.client import ClusteredClient
from dataplane.node.clustered.gather import Turns
from dataplane.node.clustered.holders import Holders, Keep
from dataplane.node.clustered.member_requests import MemberRequests, answer_peer
from dataplane.node.clustered.merge import summed
from dataplane.node.clustered.placing import Placing
from dataplane.node.clustered.retained import Retained
from dataplane.node.clustered.session import Session
from dataplane.node.clustered.streams import MAX_STREAMS, Stream, Streams, token_of
from dataplane.node.clustered.task_members import TaskMembers
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.hosted import Hosted
from dataplane.node.partitions.service import Partitions
from dataplane.node.partitions.table import Table
from dataplane.node.streams.streaming import Streaming
from dataplane.stream import requests as r
from dataplane.stream.home import Home, LostRow
from dataplane.stream.machine import StreamMachine
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers

_LOST = 4096  # lost rows that one partition tells of at a time
_TELL_S = 2.0


class ClusteredStreams:
    """See the module. `partitions` are the node's, started and ended by their owner, and tell `retained` what rows do
    not need any more."""

    def __init__(
        self,
        node: bytes,
        partitions: Partitions,
        retained: Retained,
        peers: Peers,
        life: int,
        *,
        keep: Keep | None = None,
    ) -> None:
        me = partitions.members.me
        self.partitions = partitions
        self.streams = Streams(partitions.directory, me)
        self.placing = Placing(partitions.directory)
        self.holders = Holders(node, retained, partitions.members, peers, keep)
        self._retained = retained
        self._peers = peers
        self._me = f"{me}/{life}"
        self._numbers = itertools.count(1)
        self._background = Background()
        self.turns = Turns()
        self._task_members = TaskMembers(self.session, self.turns, monotonic)
        self._lost: dict[bytes, list[LostRow]] = {}  # told by partitions, and by nobody here yet
        partitions.directory.records.changed = self._changed
        partitions.directory.records.dropped = self._dropped
        partitions.members.watch(self._members_changed)
        self._known = frozenset(partitions.members.current)

    def session(self) -> Session:
        """The session of a client that has connected, or of the node itself."""
        return Session(f"{self._me}/{next(self._numbers)}", self.partitions, self._background)

    def client(self, here: Streaming) -> ClusteredClient:
        """The streams as one client uses them, given those that are here alone."""
        return ClusteredClient(self, here)

    def replicas(self, session: Session) -> MemberRequests:
        """The replicas of task members that a client is."""
        return MemberRequests(session.client, self._task_members, self._peers, self.partitions.members)

    # streams as a whole

    async def close(self, stream: Stream) -> None:
        """Nothing is appended to the stream any more. Raises Closed once it was dropped, PeerUnavailable."""
        try:
            await patiently(lambda: self.partitions.directory.close(stream.table.stream))
        except Misuse as error:
            if stream.dropped:
                raise Closed("the stream was dropped") from error
            raise

    async def drop(self, stream: Stream) -> None:
        """There is no such stream any more, on any node that answers. Raises Closed, PeerUnavailable."""
        table = stream.table
        await patiently(lambda: self.partitions.directory.drop(stream.name, table.generation))
        self._dropped(table)
        members = self.partitions.members
        others = [address for node in members.current if node != members.me and (address := members.address(node))]
        await all_of([self._tell_dropped(address, table) for address in others])

    async def _tell_dropped(self, address: str, table: Table) -> None:
        said = pm.StreamDropped(self._peers.next_id(), table.stream, table.generation)
        try:
            await self._peers.request(address, said, Done, _TELL_S)
        except DataplaneError:  # it hears it from the coordinator
            return

    async def dropped(self, stream: Stream) -> bool:
        """Whether there is no such stream any more, by what the coordinator says."""
        with suppress(Unavailable, OutcomeUnknown):
            await self.partitions.directory.read(stream.name)
        return stream.dropped

    def _dropped(self, table: Table) -> None:
        for holder in self._retained.known:
            if holder.rsplit("/", 1)[0] == f"{table.stream}/{table.generation}":
                self._retained.drop(holder)
        for key in table.keys:
            self.partitions.columns.forget(key)
        self._lost.pop(token_of(f"{table.stream}/{table.generation}"), None)
        self.streams.forget(table)

    def _changed(self, table: Table) -> None:
        """A newer placement table: partitions that it names no more are gone, and what they needed."""
        keys = {table.key(each.number) for each in table.partitions}
        prefix = f"{table.stream}/{table.generation}/"
        for holder in self._retained.known:
            if holder.startswith(prefix) and holder not in keys and _number(holder) < table.next:
                self._retained.drop(holder)

    async def take_lost(self, stream: Stream, session: Session) -> list[LostRow]:
        """Rows that are lost, each told once. What a partition tells late is told by the next call."""
        told = self._lost.setdefault(stream.token, [])

        def settled(outcome: object) -> None:
            if isinstance(outcome, r.LostRows):
                told.extend((key, group, version, acked) for _, key, group, version, acked in outcome.rows)

        async def one(partition: Any) -> None:
            try:
                await session.ask(partition, r.TakeLost(most=_LOST), r.LostRows, settled=settled)
            except (PeerUnavailable, OutcomeUnknown):
                return

        await all_of([one(each) for each in stream.partitions])
        rows = list(told)
        told.clear()
        return rows

    # figures

    def figures(self, after: str | None = None, most: int = MAX_STREAMS) -> dict[str, Any]:
        """By stream, the figures of the partitions that this node leads: of the first streams by name, or of those
        after this one."""
        led: dict[str, list[Hosted]] = {}
        for hosted in self.partitions.replicas:
            machine = hosted.machine
            if isinstance(machine, StreamMachine) and hosted.replica.leads and (after is None or machine.name > after):
                table = self.partitions.directory.find(machine.name)
                if table is not None and table.named(hosted.partition):  # others are of a stream that is being restored
                    led.setdefault(machine.name, []).append(hosted)
        found = {name: [values for each in led[name] if (values := _measured(each))] for name in sorted(led)[:most]}
        return {name: summed(measured) for name, measured in found.items() if measured}

    def led(self, now: float) -> list[tuple[str, str, Home, bool, float]]:
        """Of each partition that this node leads its key, the stream's name, its home, whether no other node led it
        before, and `now`, which is of this node's clock, by the home's."""
        found = []
        for hosted in self.partitions.replicas:
            machine = hosted.machine
            if isinstance(machine, StreamMachine) and hosted.replica.leads:
                found.append(
                    (
                        hosted.partition,
                        machine.name,
                        machine.home,
                        hosted.configuration.epoch <= 1,
                        machine.by_its_clock(now),
                    )
                )
        return found

    def __len__(self) -> int:
        """How many streams are open here."""
        return sum(not stream.dropped for stream in self.streams)

    # other nodes

    def answer(self, request: Any) -> Message | Awaitable[Message] | None:
        """What another node is answered; None for what is not about streams. Raises as `Retained.retain`."""
        match request:
            case pm.RetainColumns():
                return self._retain(request)
            case pm.ReleaseColumns():
                self.holders.release(request)
            case pm.StreamDropped():
                self.partitions.directory.forget(request.name, request.generation)
            case pm.ForMember():
                return answer_peer(self._task_members, self.streams, request)
            case _:
                return None
        return Done(request.id)

    async def _retain(self, request: pm.RetainColumns) -> Message:
        await self.holders.retain(request)
        return Done(request.id)

    def _members_changed(self) -> None:
        known, self._known = self._known, frozenset(self.partitions.members.current)
        for node in known - self._known:
            if self.partitions.members.gone(node):
                self.holders.gone(bytes.fromhex(node))

    async def aclose(self) -> None:
        """Ask nothing more. Idempotent."""
        await self._task_members.aclose()
        await self.holders.aclose()
        await self._background.aclose()


def _measured(hosted: Hosted) -> dict[str, Any] | None:
    """The figures of a partition that is led here; None where it has no leader now."""
    answers: list[bytes | DataplaneError] = []
    hosted.request(r.encode_request(r.Measure()), answers.append)
    result = r.decode_result(answers[0]) if answers and isinstance(answers[0], bytes) else None
    return result.values if isinstance(result, r.Figures) else None


def _number(holder: str) -> int:
    """The number in a partition's key."""
    return int(holder.rpartition("/")[2].partition("-")[0])

"""The requests of one client to partitions.

A request that changes rows has a sequence number, counted for each client and partition. It is repeated until its
outcome is known. The partition executes it once, even if it is sent several times. Other requests have no number, and
may be executed more than once. The number of requests without a known outcome is bounded for each partition
(`replication.sessions`). Further requests wait.

Invariants: a sequence number is used for one request. A request whose caller got `OutcomeUnknown`, or was cancelled, is
repeated in the background until its outcome is known. When the client has ended, its leases are released at once. The
final `EndClient` is sent after the outcomes of all other requests are known.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import msgspec

from dataplane.background_tasks import BackgroundTasks
from dataplane.clock import Deadline
from dataplane.coordinator.base import Unavailable
from dataplane.errors import (
    Backpressure,
    DataplaneError,
    DirectoryUnusable,
    NotReady,
    OutcomeUnknown,
    PeerUnavailable,
    ProtocolMismatch,
    Rejected,
)
from dataplane.node.clustered.append_merger import AppendMerger
from dataplane.node.partitions.channel import Late
from dataplane.node.partitions.partitions import Partitions
from dataplane.node.partitions.record import called
from dataplane.node.partitions.waiters import NOTHING
from dataplane.node.sessions.interface import ASK_S, NOT_ASKED, Outcome, R
from dataplane.replication.sessions import WINDOW
from dataplane.stream import requests as r
from dataplane.table import requests as t

log = logging.getLogger(__name__)

T = TypeVar("T")

_BEYOND_S = 1.0  # the time after its deadline in which the answer to a waiting request may arrive
_AGAIN_S = (0.5, 5.0)  # the first and the longest pause between attempts of a request that must be answered
_PATIENCE_S, _PAUSE_S = 12.0, 0.2  # how long requests to a silent coordinator are repeated, and the pause
_REMEMBERED = 4096  # the most acks whose outcome is not known yet
_ADMITS = (r.Admit, r.Append)

_ACKS = (r.Ack, r.Nack)
_UNFINISHED = (r.ExtendRow, r.ResumeRow, r.AbandonRow)
_RESTORING = (r.Restore, r.RestoreBlock, r.RestoreColumnBatch, r.FinishRestore)


_NUMBERED = frozenset(
    (
        *(r.Append, r.Extend, *_ACKS, r.Drop, r.Retry, r.Close, r.Clear, r.TakeLost, *_UNFINISHED, *_RESTORING),
        *t.CHANGES,
    )
)
"""The requests that change rows, of a stream or a table."""
_READS = frozenset((*r.READS, *get_args(t.Question)))
"""The requests that change nothing."""

_NOT_ASKED = Rejected(NOT_ASKED)

_Ack = tuple[str, int, int | None]
"""The partition, the grant and the replica of an ack."""


class _Sequences:
    """The sequences of one client for one partition."""

    __slots__ = ("_changed", "_next", "_open")

    def __init__(self) -> None:
        self._next = 1
        self._open: dict[int, None] = {}  # the sequences that are not settled, ascending
        self._changed = asyncio.Event()

    async def take(self, deadline: Deadline) -> int:
        """The next sequence number. Waits until it is within the window. Raises TimeoutError."""
        while self._open and self._next - next(iter(self._open)) >= WINDOW:
            async with asyncio.timeout(deadline.remaining_s):
                await self._wait()
        number, self._next = self._next, self._next + 1
        self._open[number] = None
        return number

    def over(self, number: int) -> None:
        """Record that the outcome of this sequence number is known. 0 means no sequence number, and is ignored."""
        self._open.pop(number, None)
        self._changed.set()

    async def settled(self) -> None:
        while self._open:
            await self._wait()

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def __bool__(self) -> bool:
        return bool(self._open)


class PartitionSession:
    """One client, named NODE/LIFE/NUMBER."""

    def __init__(
        self,
        client: str,
        partitions: Partitions,
        background: BackgroundTasks,
        decode: Callable[[bytes], Any] = r.decode_result,
        together: AppendMerger | None = None,
    ) -> None:
        """`decode`: the decoder of answers. `together` merges appends with those of other clients of this node."""
        self.client = client
        self._together = together
        self._decode = decode
        self._partitions = partitions
        self._background = background
        self._asked: dict[str, _Sequences] = {}
        self._unknown: dict[_Ack, asyncio.Future[Outcome]] = {}  # acks without a known outcome

    async def ask(
        self,
        partition: str,
        request: r.StreamRequest,
        kind: type[R],
        deadline: Deadline | None = None,
        *,
        waits: Callable[[], str] | None = None,
        settled: Callable[[Outcome], None] | None = None,
        late: Callable[[R], None] | None = None,
    ) -> R:
        """Return the answer of the partition's leader. `waits` returns the queue of a request that may wait at the
        leader until its deadline. `settled`, for a request that changes rows, is called once with the outcome: before
        this returns or raises, or later if it raises OutcomeUnknown or is cancelled. `late`, for other requests, is
        called with each answer that arrived too late to be returned.

        Raises the error with which the partition refuses; at the deadline NotReady or, for an append, Backpressure;
        Lost, PeerUnavailable, OutcomeUnknown."""
        call = _Call(partition, request, deadline, "" if waits is None else waits(), settled, self._decode)
        if type(request) in _NUMBERED:
            outcome = await self._once(call)
        else:
            outcome = await self._plainly(call, kind, late)
        if isinstance(outcome, DataplaneError):
            raise outcome
        if not isinstance(outcome, kind):
            what, found = type(request).__name__, type(outcome).__name__
            raise ProtocolMismatch(f"a partition answers a {what} by a {found}")
        return outcome

    async def ack(self, partition: str, grant: int, replica: int | None = None) -> None:
        """Acknowledge the rows of a grant. Raises LeaseExpired, Lost; OutcomeUnknown, after which the ack may be
        repeated. A repeated ack shares the sequence number of the first one, and gets its outcome. With a sequence
        number of its own it could be refused although the first was applied: a new leader does not know the grants of
        the former leader."""
        key = partition, grant, replica
        if key in self._unknown:
            await self._ack_again(key)
            return
        outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def settled(known: Outcome) -> None:
            if not outcome.done():
                outcome.set_result(known)

        self._unknown[key] = outcome
        if len(self._unknown) > _REMEMBERED:
            del self._unknown[next(iter(self._unknown))]
        try:
            await self.ask(partition, r.Ack(grant=grant, replica=replica), r.Succeeded, settled=settled)
        finally:
            if outcome.done():
                self._unknown.pop(key, None)

    async def _ack_again(self, key: _Ack) -> None:
        try:
            async with asyncio.timeout(ASK_S):
                outcome = await asyncio.shield(self._unknown[key])
        except TimeoutError:
            unknown = OutcomeUnknown("it is not known whether these rows are acked: ack them again")
            raise self._partitions.router.unanswered(key[0], unknown) from None
        self._unknown.pop(key, None)
        if isinstance(outcome, DataplaneError):
            raise outcome

    async def _once(self, call: _Call) -> Outcome:
        sequences = self._sequences(call.partition)
        number = 0
        try:
            number = await sequences.take(call.deadline or Deadline.after(ASK_S))
            body = r.encode_request(msgspec.structs.replace(call.request, client=self.client, sequence=number))
        except BaseException as error:
            sequences.over(number)
            call.settle(_NOT_ASKED)
            if isinstance(error, TimeoutError):
                raise PeerUnavailable(
                    f"{WINDOW} calls of this process are ahead, and {called(call.partition)} has not answered the first"
                ) from None
            raise
        try:
            outcome: Outcome | None = None
            if self._together is not None and self._together.takes(call.request):
                assert isinstance(call.request, r.Append), "it takes nothing else"
                outcome = await self._together.append(call.partition, self.client, number, call.request)
            if outcome is None:
                outcome = call.outcome(await self._ask(call, body))
        except (OutcomeUnknown, asyncio.CancelledError):
            self._background.spawn(self._settle(call, body, sequences, number))
            raise
        except BaseException as error:
            sequences.over(number)
            call.settle(error if isinstance(error, DataplaneError) else _NOT_ASKED)
            raise
        sequences.over(number)
        call.settle(outcome)
        return outcome

    async def _plainly(self, call: _Call, kind: type[R], late: Callable[[R], None] | None) -> Outcome:
        """Send a request without a sequence number, which may be executed more than once. `late` is called with each
        answer that arrives too late to be returned, which may be a grant."""
        self._sequences(call.partition)
        body = r.encode_request(msgspec.structs.replace(call.request, client=self.client))
        if late is None:
            return call.outcome(await self._ask(call, body))

        def came(result: bytes) -> None:
            outcome = call.outcome(result)
            if isinstance(outcome, kind):
                late(outcome)

        return call.outcome(await self._ask(call, body, came))

    def _sequences(self, partition: str) -> _Sequences:
        found = self._asked.get(partition)
        if found is None:
            named = self._partitions.router.named
            for key in [key for key, sequences in self._asked.items() if not sequences and not named(key)]:
                del self._asked[key]  # the partition no longer exists
            found = self._asked[partition] = _Sequences()
        return found

    async def _ask(self, call: _Call, body: bytes, late: Late | None = None) -> bytes:
        key, queue, router = call.partition, call.waits, self._partitions.router
        try:
            if not queue:
                # a refused admission is not repeated: it waits in the queue of the leader
                patient = not isinstance(call.request, _ADMITS)
                return await router.ask(key, body, call.deadline or Deadline.after(ASK_S), late=late, patient=patient)
            wait_s = 0.0 if call.deadline is None else call.deadline.remaining_s
            until = Deadline.after(wait_s + _BEYOND_S)
            return await router.ask(key, body, until, queue=queue, wait_s=wait_s, late=late)
        except OutcomeUnknown as error:
            if type(call.request) in _READS:
                raise PeerUnavailable(str(error)) from error
            raise

    async def _settle(self, call: _Call, body: bytes, sequences: _Sequences, number: int) -> None:
        """Repeat the request under its sequence number until its outcome is known or the partition no longer
        exists."""
        try:
            call.settle(await self._settled(call.partition, body))
        finally:
            sequences.over(number)

    async def _settled(self, key: str, body: bytes) -> Outcome:
        pause_s = _AGAIN_S[0]
        while True:
            try:
                result = await self._partitions.router.ask(key, body, Deadline.after(ASK_S))
                return _outcome(result, None, self._decode)
            except (OutcomeUnknown, PeerUnavailable, Unavailable) as error:
                log.debug("the outcome of a request of %s to %s is not known yet: %s", self.client, key, error)
            except DirectoryUnusable as error:  # an earlier attempt may be on the disk that has failed
                return OutcomeUnknown(str(error))
            except DataplaneError as error:
                if not isinstance(error, Backpressure) or not error.spill_error:
                    return error
                # The leader's disk is full. An earlier attempt may be in its log, and is committed once there is room.
                log.debug("the outcome of a request of %s to %s is not known yet: %s", self.client, key, error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _AGAIN_S[1])

    def soon(self, partition: str, request: r.StreamRequest) -> asyncio.Task[Any]:
        """Send a request without waiting for its answer. It is repeated until there is an answer."""
        if type(request) in _NUMBERED:
            return self.run_soon(lambda: self.ask(partition, request, r.StreamResult))  # `ask` repeats it
        body = r.encode_request(msgspec.structs.replace(request, client=self.client))
        return self._background.spawn(self._settled(partition, body))

    def run_soon(self, work: Callable[[], Coroutine[Any, Any, object]]) -> asyncio.Task[Any]:
        """Run `work` in the background. A DataplaneError that it raises is ignored."""
        return self._background.spawn(_quietly(work))

    def give_back_soon(self, partition: str, grant: int) -> None:
        """Give back rows of a grant that the client never saw. The request has no sequence number, since repeating it
        has no effect, and a client that has ended takes no more sequence numbers."""
        request = r.Nack(client=self.client, grant=grant, seen=False)
        self._background.spawn(self._settled(partition, r.encode_request(request)))

    def leave(self) -> None:
        """Release the leases of a client that has ended, so that its rows are delivered to others."""
        self._unknown.clear()
        for key, sequences in self._asked.items():  # not removed: requests for late results take the next numbers
            self._background.spawn(self._leave(key, sequences))

    async def _leave(self, key: str, sequences: _Sequences) -> None:
        if sequences:  # release its leases before its last requests are settled
            await self._say(key, ended=False)
            await sequences.settled()
        await self._say(key, ended=True)

    async def _say(self, key: str, *, ended: bool) -> None:
        await self._settled(key, r.encode_request(r.EndClient(client=self.client, ended=ended)))


@dataclass(frozen=True, slots=True)
class _Call:
    """A request in flight; see `PartitionSession.ask`."""

    partition: str
    request: r.StreamRequest
    deadline: Deadline | None
    waits: str
    settled: Callable[[Outcome], None] | None
    decode: Callable[[bytes], Any]

    def outcome(self, result: bytes) -> Outcome:
        return _outcome(result, self.request, self.decode)

    def settle(self, outcome: Outcome) -> None:
        if self.settled is not None:
            self.settled(outcome)


def _outcome(result: bytes, request: r.StreamRequest | None, decode: Callable[[bytes], Any]) -> Outcome:
    """The answer of a partition, or the error with which it refused."""
    if result == NOTHING:
        full = request is None or isinstance(request, _ADMITS)
        return Backpressure("the stream is full") if full else NotReady("no rows became ready")
    found: r.StreamResult = decode(result)
    return found.error if isinstance(found, r.CommandRefused) else found


async def _quietly(work: Callable[[], Coroutine[Any, Any, object]]) -> None:
    with suppress(DataplaneError):
        await work()


async def patiently(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Repeat `work`, a request to the coordinator, until the coordinator answers, and return the result. Without an
    answer for `_PATIENCE_S`, raises PeerUnavailable, or OutcomeUnknown if a change may have reached the coordinator."""
    deadline = Deadline.after(_PATIENCE_S)
    unanswered = False
    while True:
        try:
            return await work()
        except (Unavailable, OutcomeUnknown) as error:
            unanswered = unanswered or isinstance(error, OutcomeUnknown)
            if not deadline.remaining_s:
                kind = OutcomeUnknown if unanswered else PeerUnavailable
                raise kind(f"the cluster's coordinator does not answer: {error}") from error
            await asyncio.sleep(_PAUSE_S)

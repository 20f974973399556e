"""Appends of one client, split over the partitions that their rows belong to.

Rows without group and key, and groups that come whole, go to the partition of this node's producers; others where the
placement table has their group, or their key where they have no group. The columns stay where they are stored.

A stream with limits lets an append in before its columns are put: at all partitions that it goes to, or at none. Who
waits at one of them gives back what it was let in with at the others after a while, and begins again with that one; so
appends that wait for each other do not do so for ever.

What always holds: columns are retained before a partition is asked to take them, and until it is known that it has not;
an append whose outcome is not known is asked on under its sequence, and raises OutcomeUnknown meanwhile. The dtypes of
columns are those of the stream's table before any partition is asked. Where one of several partitions refuses its part,
the others drop theirs. An append with keys, which is refused for one that is there, is held back in each until all have
taken theirs, so that nobody has seen it; others are not, which some partitions alone can refuse for a close on its way,
a disk that is full, or the size of one part: to confirm each would cost half as many requests again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import (
    Backpressure,
    Closed,
    DataplaneError,
    LeaseExpired,
    Lost,
    Misuse,
    OutcomeUnknown,
    ProtocolMismatch,
)
from dataplane.node.clustered.asking import all_of
from dataplane.node.clustered.holders import Holders
from dataplane.node.clustered.placing import Placing, Share
from dataplane.node.clustered.session import ASK_S, Outcome, Session
from dataplane.node.clustered.streams import Partition, Stream
from dataplane.node.streams import packed
from dataplane.node.streams.packed import Index
from dataplane.stream import requests as r
from dataplane.stream.block import Value
from dataplane.stream.keys import unnamed
from dataplane.wire import messages as m

log = logging.getLogger(__name__)

T = TypeVar("T")

_PLACED = 8  # times that rows are placed again whose groups belong elsewhere by then
_WAIT_S = 30.0  # for which rows that were let in wait to be let in again, where another leads now
_HOLD_S = (0.25, 2.0)  # for which what was admitted at some is held while others are waited for: at first, at most
_QUEUE = "append"


@dataclass(slots=True)
class _Ticket:
    """Leave to append. `shares`: where its rows go, if that was asked for; `tickets`: those of the partitions, for each
    share, of which two may be of one partition."""

    stream: Stream
    shares: list[Share] | None = None
    tickets: dict[Share, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Append:
    """An append under way. `keep`: what becomes of rows that are held back, once that is known, and of those of which
    it is heard later that they came."""

    ticket: _Ticket
    arriving: Arriving
    until: Deadline
    held: bool = False
    came: list[_Came] = field(default_factory=list)
    keep: bool | None = None


class _Call(NamedTuple):
    """What an append that is made again has again."""

    stream: bytes
    key: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Came:
    """Rows, by position, that are in a partition, and whether they are new."""

    partition: Partition
    rows: Index
    first: int
    new: bool


@dataclass(frozen=True, slots=True)
class Arriving:
    """The rows of an append, checked."""

    ref: BatchRef
    versions: Index
    groups: list[str | int]
    keys: list[str]
    digest: bytes
    tags: dict[str, list[Value]]
    lengths: dict[str, Index]
    copies: tuple[bytes, ...]
    whole: bool
    begin: tuple[int, float, str] | None = None

    @classmethod
    def of(cls, request: m.Append | m.AppendInline, ref: BatchRef, copies: Sequence[bytes] = ()) -> Arriving:
        """Those of a request, with their columns. Raises ProtocolMismatch, LimitExceeded, Misuse."""
        if not len(ref):
            raise Misuse("an append has at least one row")
        return cls(
            ref,
            packed.numbers("versions", request.versions, len(ref)),
            packed.one_a_row("groups", request.groups, len(ref)),
            packed.one_a_row("keys", request.keys, len(ref)),
            request.digest,
            packed.tags(request.tags, len(ref)),
            packed.lengths(request.lengths, ref),
            tuple(copies),
            request.whole,
            request.begin,
        )

    def request(self, share: Share, ref: BatchRef, ticket: int, *, held: bool) -> r.Append:
        """For the partition of a share, whose columns are `ref`."""
        rows, all_rows = share.rows, len(share.rows) == len(self.ref)
        return r.Append(
            ref=ref,
            versions=self.versions if all_rows else self.versions[rows],
            groups=_picked(self.groups, rows) or None,
            keys=_picked(self.keys, rows),
            digest=self.digest,
            tags={name: _picked(values, rows) for name, values in self.tags.items()},
            lengths={name: values if all_rows else values[rows] for name, values in self.lengths.items()},
            nodes=self.copies,
            ticket=ticket,
            table=share.table,
            held=held,
            begin=self.begin,
        )


class ProducerRouter:
    """The appends of one client."""

    def __init__(self, session: Session, placing: Placing, holders: Holders) -> None:
        self._session = session
        self._placing = placing
        self._holders = holders
        self._tickets: dict[int, _Ticket] = {}
        self._numbers = itertools.count(1)
        self._under_way: dict[_Call, asyncio.Future[bool]] = {}
        """Whether all of it came, of appends with keys. Who was not told in time makes it again, and waits for this."""

    # being let in

    async def admit(self, request: m.Admit, stream: Stream, deadline: Deadline) -> int:
        """A ticket for an append, 0 for one that was made before by the very same call. Raises Backpressure, Closed,
        LimitExceeded, ProtocolMismatch, OutcomeUnknown."""
        packed.bound("rows of an append", m.MAX_ROWS, request.rows)
        packed.one_a_row("groups", request.groups, request.rows)
        packed.one_a_row("keys", request.keys, request.rows)
        if request.rows < 1 or request.nbytes < 0:
            raise ProtocolMismatch(f"an append of {request.rows} rows and {request.nbytes} bytes")
        if request.key and await self._came_before(_Call(stream.token, request.key, request.digest), deadline):
            return 0
        ticket = _Ticket(stream)
        if stream.settings.limited:
            for _ in range(_PLACED):
                known = await self._unless_lost(self._admit_at_all(ticket, request, deadline), stream)
                if known is not None:
                    return 0 if known else self._keep(ticket)
            raise Closed(f"the placement of stream {stream.name!r} changes too often")
        return self._keep(ticket)

    async def _admit_at_all(self, ticket: _Ticket, request: m.Admit, deadline: Deadline) -> bool:
        """Be let in at all partitions that the rows go to. True if the very same append was made before: then at none.
        Raises Lost where one of them is lost."""
        ticket.shares = await self._placing.place(
            ticket.stream, request.rows, request.groups, request.keys, whole=request.whole
        )
        if request.key and await self._known(ticket.shares, request):
            return True
        each = request.nbytes / request.rows
        wanted = [
            r.Admit(rows=len(share.rows), nbytes=int(each * len(share.rows)), version=request.version)
            for share in ticket.shares
        ]
        await self._let_in(ticket, ticket.shares, wanted, deadline)
        return False

    def unlimited(self, stream: Stream) -> int:
        """A ticket for an append that no limit holds back."""
        return self._keep(_Ticket(stream))

    def _keep(self, ticket: _Ticket) -> int:
        number = next(self._numbers)
        self._tickets[number] = ticket
        return number

    async def _known(self, shares: Sequence[Share], request: m.Admit) -> bool:
        """Whether the very same append was made before, and all of it is there. The first row is asked for alone, which
        an append that is none again does not have."""
        asked = [(shares[0], [request.key]), *((share, _picked(request.keys, share.rows)) for share in shares)]
        for share, keys in asked:
            found = await self._session.ask(share.partition, r.Find(keys=keys, digest=request.digest), r.Found)
            if not (found.rows >= 0).all():
                return False
        return True

    async def _came_before(self, call: _Call, deadline: Deadline) -> bool:
        """Whether the very same append is under way, and all of it came. Raises OutcomeUnknown where that is not known
        before the deadline."""
        while (going := self._under_way.get(call)) is not None:
            await asyncio.wait([going], timeout=deadline.remaining_s)
            if not going.done():
                raise OutcomeUnknown("the same append was made before, and is under way")
            if going.result():
                return True
        return False

    async def _let_in(
        self, ticket: _Ticket, shares: Sequence[Share], wanted: Sequence[r.Admit], deadline: Deadline
    ) -> None:
        """Be let in with all of these shares. Raises Backpressure, and then is with none."""
        first, hold_s, last = 0, _HOLD_S[0], False
        while True:
            refused = first
            try:
                for at in (first, *(at for at in range(len(shares)) if at != first)):
                    refused = at
                    until = deadline if at == first else Deadline.after(min(hold_s, deadline.remaining_s))
                    await self._admit(ticket, shares[at], wanted[at], until)
                return
            except Backpressure as error:
                self._let_go(ticket)
                if last:
                    raise _full(ticket.stream, error, wanted, deadline) from None
                last = not deadline.remaining_s  # a leader where nobody waits says what limit is in the way
                first, hold_s = refused, min(2 * hold_s, _HOLD_S[1])
            except BaseException:
                self._let_go(ticket)
                raise
            await asyncio.sleep(random.uniform(0.0, min(hold_s, deadline.remaining_s)))  # others hold and wait, too

    async def _admit(self, ticket: _Ticket, share: Share, wanted: r.Admit, deadline: Deadline) -> None:
        partition = share.partition

        def late(admitted: r.Admitted) -> None:
            self._session.soon(partition, r.GiveBack(ticket=admitted.ticket))

        admitted = await self._session.ask(partition, wanted, r.Admitted, deadline, waits=_QUEUE, late=late)
        ticket.tickets[share] = admitted.ticket

    def _let_go(self, ticket: _Ticket) -> None:
        tickets, ticket.tickets = ticket.tickets, {}
        for share, number in tickets.items():
            self._session.soon(share.partition, r.GiveBack(ticket=number))

    def give_back(self, number: int) -> None:
        """What was admitted does not come. Idempotent."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            self._let_go(ticket)

    @property
    def expected(self) -> bool:
        """Whether something was admitted that has not come."""
        return bool(self._tickets)

    def revoke(self) -> None:
        """The client gives no sign of life, or has gone."""
        for number in list(self._tickets):
            self.give_back(number)

    # appending

    async def append(
        self, number: int, stream: Stream, arriving: Arriving, identifier: int, until: Deadline
    ) -> tuple[m.Appended, list[Index]]:
        """Bring rows that were admitted under this number: the reply, and which rows are not new, as positions. A
        partition is asked until the deadline. Raises as `Home.append`; LeaseExpired, OwnerDied, PeerUnavailable,
        OutcomeUnknown."""
        ticket = self._tickets.pop(number, None)
        if ticket is None or ticket.stream is not stream:
            raise LeaseExpired("this append was not admitted, or was given up since its process was silent for long")
        call = _Call(stream.token, arriving.keys[0], arriving.digest) if arriving.keys else None
        if call is None:
            return await self._append(ticket, arriving, identifier, until)
        try:
            again = await self._came_before(call, until)
        except BaseException:
            self._let_go(ticket)
            raise
        if again:
            self._let_go(ticket)
            return m.Appended(identifier, 0, False), [np.arange(len(arriving.ref))]
        self._under_way[call] = asyncio.get_running_loop().create_future()
        try:
            appended = await self._append(ticket, arriving, identifier, until)
        except BaseException:
            self._under_way.pop(call).set_result(False)
            raise
        self._under_way.pop(call).set_result(True)
        return appended

    async def _append(
        self, ticket: _Ticket, arriving: Arriving, identifier: int, until: Deadline
    ) -> tuple[m.Appended, list[Index]]:
        """As `append`, once the same is not under way any more."""
        stream, append = ticket.stream, _Append(ticket, arriving, until)
        try:
            await stream.fit(arriving.ref)
            shares = ticket.shares or await self._placing.place(
                stream, len(arriving.ref), arriving.groups, arriving.keys, whole=arriving.whole
            )
            append.held = len(shares) > 1 and bool(arriving.keys)
            if len(shares) > 1 and stream.table.closed:
                raise Closed(f"stream {stream.name!r} is closed")
            await all_of([self._bring(append, share) for share in shares])
        except OutcomeUnknown:
            raise
        except DataplaneError:
            await self._take_back(append)
            raise
        finally:
            self._let_go(ticket)
            if append.keep is None:  # all have it, or nobody knows
                self._decided(append, keep=True)
        came = append.came
        return _appended(identifier, came, arriving), [each.rows for each in came if not each.new]

    async def _take_back(self, append: _Append) -> None:
        """Drop what some partitions have taken of an append that another refuses."""
        dropping = self._decided(append, keep=False)
        if dropping:
            await asyncio.wait(dropping, timeout=ASK_S)

    def _decided(self, append: _Append, *, keep: bool) -> list[asyncio.Task[Any]]:
        """Let consumers have what was held back, or drop what came, in the background."""
        append.keep = keep
        new = [each for each in append.came if each.new and (append.held or not keep)]
        return [self._settle(append, each.partition, each.first, len(each.rows)) for each in new]

    def _settle(self, append: _Append, partition: Partition, first: int, count: int) -> asyncio.Task[Any]:
        if append.held:
            return self._session.soon(partition, r.Release(first=first, keep=bool(append.keep)))
        return self._session.soon(partition, r.Drop(rows=np.arange(first, first + count)))

    async def _bring(self, append: _Append, share: Share) -> None:
        """Bring the rows of one partition; where their groups belong elsewhere by now, there."""
        stream, arriving = append.ticket.stream, append.arriving
        for _ in range(_PLACED):
            answer = await self._unless_lost(self._ask(append, share), stream)
            if isinstance(answer, r.Appended):
                append.came.append(_Came(share.partition, share.rows, answer.first, answer.new))
                return
            groups, keys = _picked(arriving.groups, share.rows), _picked(arriving.keys, share.rows)
            first, *more = await self._placing.again(stream, len(share.rows), groups, keys, whole=arriving.whole)
            append.held = append.held or (bool(more) and bool(arriving.keys))
            for each in more:
                await self._bring(append, each.among(share))
            share = first.among(share)
        raise Closed(f"the placement of stream {stream.name!r} changes too often")

    async def _unless_lost(self, asked: Coroutine[Any, Any, T], stream: Stream) -> T | None:
        """None where the partition is lost: it is taken out of the placement, so the rows go elsewhere."""
        try:
            return await asked
        except Lost as error:
            log.debug("rows of %r go elsewhere: %s", stream.name, error)
            await self._placing.tend(stream)
            return None

    async def _ask(self, append: _Append, share: Share) -> r.Appended | r.Moved:
        """Ask the partition of a share. One that was let in by a leader before this one is let in again."""
        deadline, ticket, arriving = Deadline.after(_WAIT_S), append.ticket, append.arriving
        while True:
            try:
                return await self._claimed(append, share)
            except Backpressure as error:
                rows = len(share.rows)
                nbytes = arriving.ref.stored_nbytes * rows // len(arriving.ref)
                if not deadline.remaining_s or error.spill_error:  # or it is a disk that is full
                    raise
                wanted = r.Admit(rows=rows, nbytes=nbytes, version=int(arriving.versions.max(initial=0)))
                try:
                    await self._admit(ticket, share, wanted, deadline)
                except Backpressure:
                    raise _full(ticket.stream, error, [wanted], deadline) from None

    async def _claimed(self, append: _Append, share: Share) -> r.Appended | r.Moved:
        partition, arriving, until, held = share.partition, append.arriving, append.until, append.held
        ref = arriving.ref if len(share.rows) == len(arriving.ref) else arriving.ref[share.rows]
        claim = await self._holders.claim(partition.key, [ref], arriving.copies, until)

        def settled(outcome: Outcome) -> None:
            if isinstance(outcome, r.Appended) and outcome.new:
                claim.taken()
                if append.keep is False or (append.keep and held):  # it is known late
                    self._settle(append, partition, outcome.first, len(share.rows))
            else:
                claim.release()

        request = arriving.request(share, ref, append.ticket.tickets.pop(share, 0), held=held)
        answer = await self._session.ask(partition, request, r.Result, until, settled=settled)
        if not isinstance(answer, r.Appended | r.Moved):
            raise ProtocolMismatch(f"a partition answers an append by a {type(answer).__name__}")
        return answer


def _full(stream: Stream, error: Backpressure, wanted: Sequence[r.Admit], deadline: Deadline) -> Backpressure:
    """The error of an append that was not let in before the deadline."""
    needed = sum(each.nbytes for each in wanted)
    told = {**error.fields, "needed": needed, "waited_s": deadline.waited_s}
    return Backpressure(f"the stream {stream.name!r} is full: {error}", **told)


def _appended(identifier: int, came: Sequence[_Came], arriving: Arriving) -> m.Appended:
    new = any(each.new for each in came)
    if arriving.keys:
        return m.Appended(identifier, 0, new)
    if len(came) == 1:
        return m.Appended(identifier, came[0].first, new, mark=came[0].partition.mark)
    keys = [""] * len(arriving.ref)
    for each in came:
        numbers = range(each.first, each.first + len(each.rows))
        for at, key in zip(each.rows.tolist(), unnamed(each.partition.mark, numbers), strict=True):
            keys[at] = key
    return m.Appended(identifier, 0, new, keys)


def _picked(values: list[T], rows: Index) -> list[T]:
    if not values or len(values) == len(rows):  # all, and in order
        return values
    return [values[at] for at in rows.tolist()]

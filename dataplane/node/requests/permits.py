"""The permits of one client to append: a permit admits rows to a stream before their columns are written."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from dataplane.clock import Deadline
from dataplane.errors import Backpressure, LeaseExpired, ProtocolMismatch
from dataplane.node.local.streams import LocalStreams
from dataplane.node.sessions import checks
from dataplane.node.sessions.interface import OpenedStream, StreamService, StreamSession
from dataplane.stream import requests as r
from dataplane.wire import row_messages as rm

T = TypeVar("T")


class Ticket(NamedTuple):
    """A permit to append, and the partition that gave it; None if no limit applies."""

    stream: OpenedStream
    partition: Any = None
    number: int = 0


class Permits:
    """The permits of one client, by number, until each is used or given back."""

    def __init__(self, service: StreamService, session: StreamSession) -> None:
        self._service = service
        self._local = service if isinstance(service, LocalStreams) else None
        self._session = session
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)

    def revoke(self) -> None:
        for number in list(self._tickets):
            self.give_back(number)

    def use(self, number: int, stream: OpenedStream) -> Ticket:
        """Take the permit with this number, to use it now. Raises LeaseExpired."""
        ticket = self._tickets.pop(number, None)
        if ticket is None or ticket.stream is not stream:
            raise LeaseExpired("this append was not admitted, or was given up since its process was silent for long")
        return ticket

    def give_back(self, number: int) -> None:
        """Return a permit that is not used. Idempotent."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            self.put_back(ticket)

    def put_back(self, ticket: Ticket) -> None:
        if ticket.partition is not None:
            self._session.soon(ticket.partition, r.GiveBack(ticket=ticket.number))

    def admit_now(self, request: rm.AdmitRows) -> int | None:
        """The number of a permit to append; 0 if the same append was executed before, None if the request has to wait.
        Raises Closed, LimitExceeded, ProtocolMismatch."""
        stream = self._service.find(request.stream)
        _check_amount(request.rows, request.nbytes)
        if not stream.settings.limited and not (request.key and self._local is not None):
            return self._keep(Ticket(stream))
        if self._local is None:
            return None
        local, client = self._local.find(stream.token), self._session.client
        if request.key and (local.run(r.Find(keys=[request.key], digest=request.digest)).rows >= 0).all():
            return 0
        if not stream.settings.limited:
            return self._keep(Ticket(stream))
        wanted = r.Admit(client=client, rows=request.rows, nbytes=request.nbytes, version=request.version)
        with suppress(Backpressure):
            return self._keep(Ticket(stream, local, local.run(wanted).ticket))
        return None

    async def admit(self, request: rm.AdmitRows, deadline: Deadline) -> int:
        """The number of a permit to append; 0 if the same append was executed before. Raises Backpressure, Closed,
        LimitExceeded, OutcomeUnknown."""
        if (number := self.admit_now(request)) is not None:
            return number
        stream = self._service.find(request.stream)
        if request.key:
            asked = r.Find(keys=[request.key], digest=request.digest)
            found = await self._service.on(stream, lambda at: self._session.ask(at, asked, r.FoundRows))
            if (found.rows >= 0).all():
                return 0
        wanted = r.Admit(rows=request.rows, nbytes=request.nbytes, version=request.version)
        return self._keep(await self._service.on(stream, lambda at: self.let_in(stream, at, wanted, deadline)))

    async def let_in(self, stream: OpenedStream, partition: Any, wanted: r.Admit, deadline: Deadline) -> Ticket:
        def late(admitted: r.AdmitResult) -> None:
            self._session.soon(partition, r.GiveBack(ticket=admitted.ticket))

        def queue() -> str:  # by version: older versions may be admitted earlier
            return f"append {wanted.version}" if stream.settings.max_lag >= 0 else "append"

        try:
            try:
                admitted = await self._session.ask(partition, wanted, r.AdmitResult, deadline, waits=queue, late=late)
            except Backpressure:  # asked again without waiting, for the error that names the limit
                admitted = await self._session.ask(partition, wanted, r.AdmitResult, late=late)
        except Backpressure as error:
            holders = tuple(self._holder(stream, each) for each in error.holders)
            told = {**error.fields, "needed": wanted.nbytes, "waited_s": deadline.waited_s, "holders": holders}
            raise Backpressure(f"the stream {stream.name!r} {str(error).removeprefix('the stream ')}", **told) from None
        return Ticket(stream, partition, admitted.ticket)

    def _holder(self, stream: OpenedStream, holder: dict[str, Any]) -> dict[str, Any]:
        name = str(holder["holder"])
        admitted = holder["how"] == "admitted"
        return {**holder, "holder": self._service.label(name) if admitted else f"{name} of stream {stream.name!r}"}

    def _keep(self, ticket: Ticket) -> int:
        number = next(self._numbers)
        self._tickets[number] = ticket
        return number


def _check_amount(rows: int, nbytes: int) -> None:
    """Raise LimitExceeded for more rows than an append can have, ProtocolMismatch for less than one row or negative
    bytes."""
    checks.bound("rows of an append", rm.MAX_ROWS, rows)
    if rows < 1 or nbytes < 0:
        raise ProtocolMismatch(f"an append of {rows} rows and {nbytes} bytes")

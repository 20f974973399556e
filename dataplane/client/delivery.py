"""Rows that were delivered to a task, and how their consumer settles them.

Invariant: a delivery is settled once, by the first `ack` or `nack`. Repeating that call does nothing; the other call
raises LeaseExpired. A delivery that is not settled within its `with` block is acked at the end of the block, and given
back if the block raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.client import arguments, events
from dataplane.clock import monotonic
from dataplane.errors import DataplaneError, LeaseExpired, Misuse, OutcomeUnknown, SchemaMismatch
from dataplane.stream import requests as r
from dataplane.stream.balance import balanced
from dataplane.stream.keys import unnamed
from dataplane.wire import row_messages as rm

if TYPE_CHECKING:
    from dataplane.client.streams import AsyncStream

LEFT = "the loop over deliveries was left with them in hand"
"""The reason of a nack by a loop that was left. The loop does not know the error that ended it."""

_REASON = 200  # characters


def reason_of(error: BaseException | None) -> str:
    """The reason of a nack because of this error, for the log."""
    if error is None:
        return ""
    said = f"{type(error).__name__}: {error}".encode("utf-8", "replace").decode()
    return said if len(said) <= _REASON else f"{said[: _REASON - 3]}..."


class Delivery:
    """Leased rows of one task. `ref` and all lists are in the order of delivery."""

    def __init__(self, stream: AsyncStream, delivered: r.Delivered, balance: tuple[str, int] | None) -> None:
        self.ref = delivered.ref.with_origin(stream._token, delivered.rows, delivered.holds)
        """A reference to the requested columns of the rows."""
        self.groups: list[str | int | None] = delivered.groups
        self.versions: list[int] = delivered.versions
        self.tags: dict[str, list[Any]] = delivered.tags
        self.settled = False
        """Whether the delivery was acked or given back."""
        self._acked = False
        self._since_s = monotonic()
        self._given = delivered
        self._mark, self._stream = stream._mark, stream._token
        self._connection, self._getter = stream._connection, stream._getter
        self._balance = balance
        events.delivered(self._connection, self._mark, self._stream, delivered)

    @cached_property
    def keys(self) -> list[str]:
        """The keys of the rows."""
        return self._given.keys or unnamed(self._mark, self._given.rows.tolist())

    def __len__(self) -> int:
        return len(self.ref)

    def __repr__(self) -> str:
        return f"Delivery({len(self)} rows; {', '.join(self.ref.columns)})"

    async def get(self, *columns: str, timeout: float = 60.0) -> Batch:
        """Read the rows, or these columns of them. timeout: seconds to wait for memory. Raises as `AsyncPlane.get`, and
        SchemaMismatch for a column that was not consumed."""
        if missing := [name for name in columns if name not in self.ref.columns]:
            there = ", ".join(self.ref.columns)
            raise SchemaMismatch(
                f"these rows were consumed without column {missing[0]!r}: name it in `columns` there, beside {there}",
                column=str(missing[0]),
            )
        ref = self.ref.select(*columns) if columns else self.ref
        return await self._getter.get(ref, arguments.seconds(timeout))

    async def ack(self) -> None:
        """Acknowledge the rows: the task is done with them. Does nothing if they were acked before.

        Raises LeaseExpired if the lease has ended, even if no other consumer has the rows. Also if the rows were given
        back, or some of them were lost with their host. None is acked then.
        Raises OutcomeUnknown if neither the ack nor a repetition was answered. The call can then be repeated."""
        await self._settle(done=True)

    async def nack(self, reason: str = "") -> None:
        """Give the rows back, to be delivered again. Does nothing if they were given back before. If the rows become
        dead letters, `dead_letters` and the node's log have the reason.

        Raises LeaseExpired if the lease has ended or the rows were acked, Misuse if the reason is no text. A repetition
        of a cancelled call may raise LeaseExpired too: the rows have been given back."""
        if not isinstance(reason, str):
            raise Misuse(f"the reason of a nack is text, not {reason!r:.100}")
        await self._settle(done=False, reason=reason.encode("utf-8", "replace").decode())

    async def unseen(self) -> None:
        """Give back rows that were not read. The delivery does not count for `max_deliveries`. Raises as `nack`."""
        await self._settle(done=False, seen=False)

    async def _settle(self, *, done: bool, seen: bool = True, reason: str = "") -> None:
        if self.settled:
            if done != self._acked:
                raise self._settled_before()
            return
        grant, replica = self._given.grant, self._given.replica
        if done:
            ack = r.Ack(grant=grant, replica=replica)
            try:
                await self._ask(ack)
            except OutcomeUnknown:  # the same ack again settles it
                await self._ask(ack)
            events.settled(self._connection, self._stream, grant)
        else:
            await self._ask(r.Nack(grant=grant, replica=replica, seen=seen, reason=reason))
        self.settled, self._acked = True, done

    def _settled_before(self) -> LeaseExpired:
        return LeaseExpired(f"these rows were {'acked' if self._acked else 'given back'} before")

    async def renew(self) -> None:
        """Renew the lease for its original duration. Raises LeaseExpired if it has ended or the rows were settled."""
        if self.settled:
            raise self._settled_before()
        await self._ask(r.Renew(grant=self._given.grant, replica=self._given.replica))

    async def _ask(self, asked: r.FromClient) -> None:
        request = rm.AskStream(self._connection.next_id(), self._stream, asked)
        await self._connection.request(request, rm.StreamAnswer, 0.0)

    def split(self, shards: int | None = None, *, equal: bool = True) -> list[BatchRef]:
        """Split the rows over `shards` ranks. Returns a reference for each rank. Reads no column.

        With a `TokenBalanced` sampler, ranks get about equally many tokens, and with `equal` numbers of rows that
        differ by at most one. None means the sampler's `shards`. With any other sampler, ranks get contiguous runs of
        about equal length, and None means one rank.
        """
        return [self.ref[rows] for rows in self.rows_of(shards, equal=equal)]

    def rows_of(self, shards: int | None = None, *, equal: bool = True) -> list[npt.NDArray[np.int64]]:
        """The positions of the rows that `split` gives each rank."""
        column, count = self._balance or ("", 1)
        count = count if shards is None else shards
        if count < 1:
            raise Misuse(f"a delivery is split over one rank or more, not {count}")
        if not column:
            return list(np.array_split(np.arange(len(self)), count))
        return balanced(self._given.lengths[column], count, equal=equal)

    async def __aenter__(self) -> Delivery:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, _: object = None
    ) -> None:
        if self.settled:
            return
        if kind is None:
            await self.ack()
        else:
            with suppress(DataplaneError):  # the caller must see the error that left the block
                await self.nack(reason_of(error))


class Taken(Sequence[BatchRef]):
    """The rows of one step: a sequence with a reference for each rank. All ranks are settled by one ack or nack."""

    def __init__(self, delivery: Delivery, refs: list[BatchRef]) -> None:
        self.delivery = delivery
        self._refs = refs

    def __len__(self) -> int:
        return len(self._refs)

    def __getitem__(self, rank: Any) -> Any:
        return self._refs[rank]

    async def ack(self) -> None:
        """Acknowledge all rows. Raises as `Delivery.ack`."""
        await self.delivery.ack()

    async def nack(self, reason: str = "") -> None:
        """Give all rows back. Raises as `Delivery.nack`."""
        await self.delivery.nack(reason)

    async def __aenter__(self) -> Taken:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, _: object = None
    ) -> None:
        await self.delivery.__aexit__(kind, error)


class DeadLetters:
    """Dead letters of a task. All lists are in the order of `keys`.

    `ref`: a reference to the columns that all of them have; None if there is none. `reasons`: the reason why the last
    delivery of each ended: the argument of `nack`, the exception that left the `with` block, or the end of the loop,
    lease or process; "" if unknown."""

    def __init__(self, stream: bytes, letters: r.Letters) -> None:
        self.ref = None if letters.ref is None else letters.ref.with_origin(stream, letters.rows)
        self.keys = letters.keys
        self.groups = letters.groups
        self.versions = letters.versions
        self.tags = letters.tags
        self.reasons = letters.reasons

    def __len__(self) -> int:
        return len(self.keys)

    def __repr__(self) -> str:
        named = f": {', '.join(self.keys[:3])}{', ...' if len(self) > 3 else ''}" if self.keys else ""
        columns = "" if self.ref is None else f"; columns {', '.join(self.ref.columns)}"
        return f"<{len(self)} dead letters{named}{columns}>"


class LostRow(NamedTuple):
    """A lost row: its key, its group (None for none), and the policy version that made it."""

    key: str
    group: str | int | None
    version: int


class LostRows(list[LostRow]):
    """A list of lost rows. `unnamed`: the number of lost rows whose keys are unknown, by the node in hex whose clients
    appended them."""

    def __init__(self, rows: Iterable[LostRow], unnamed: Mapping[str, int]) -> None:
        super().__init__(rows)
        self.unnamed = dict(unnamed)

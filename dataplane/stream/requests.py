"""What a stream's partition is asked, and what it answers.

Each request that changes rows names its client and a sequence, from 1, and is done once: sent again, it is answered as
it was the first time. Those without are the driver's own, and may be repeated. Arrays and references are as in
`commands`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, DataplaneError, ProtocolMismatch, describe, revive
from dataplane.stream.block import Value
from dataplane.stream.commands import hook, unhook
from dataplane.stream.page import Index
from dataplane.stream.quota import Loan
from dataplane.stream.sampler import BuiltIn, Fifo
from dataplane.stream.settings import Settings

_NONE: Index = np.empty(0, np.int64)


class Request(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The root."""

    client: str = ""
    sequence: int = 0


class Admit(Request, frozen=True, tag=1, kw_only=True):
    """Leave to append, in turn: answered by `Admitted`, or by `Waiting` and later by `Served`. `number` is the
    client's, for the wait."""

    number: int
    rows: int
    nbytes: int
    version: int


class GiveBack(Request, frozen=True, tag=2, kw_only=True):
    """What was admitted under the ticket does not come."""

    ticket: int


class Append(Request, frozen=True, tag=3, kw_only=True):
    """New rows; without a ticket, if they are let in now. Answered by `Appended`."""

    ref: BatchRef
    versions: Index
    groups: list[str | int] | None = None
    keys: list[str] = []
    digest: bytes = b""
    tags: dict[str, list[Value]] = {}
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()
    ticket: int = 0


class Extend(Request, frozen=True, tag=4, kw_only=True):
    """More columns for rows, by offset or by key."""

    ref: BatchRef
    rows: Index = _NONE
    keys: list[str] = []
    lengths: dict[str, Index] = {}
    holds: Index = _NONE
    replace: bool = False
    nodes: tuple[bytes, ...] = ()


class Consume(Request, frozen=True, tag=5, kw_only=True):
    """Rows of a task: answered by `Delivered`, or by `Waiting` and later by `Served`, or refused by `NotReady`.
    `chosen` and `expired`, without a sampler: what the client's own made of what it was shown."""

    number: int
    task: str
    columns: tuple[str, ...]
    rows: int
    min_rows: int = 1
    sampler: BuiltIn | None = Fifo()
    chosen: Index = _NONE
    expired: Index = _NONE
    lease_s: float = 60.0
    member: str = ""
    replica: int | None = None
    replicas: int = 0
    wait: bool = False


class Cancel(Request, frozen=True, tag=6, kw_only=True):
    """The client no longer waits under this number."""

    number: int


class Ack(Request, frozen=True, tag=7, kw_only=True):
    """The rows of a grant are done."""

    grant: int
    replica: int | None = None


class Nack(Request, frozen=True, tag=8, kw_only=True):
    """The rows of a grant are given back; `seen`: that counts as a delivery."""

    grant: int
    replica: int | None = None
    seen: bool = True


class Renew(Request, frozen=True, tag=9, kw_only=True):
    """The lease of a grant begins again."""

    grant: int
    replica: int | None = None


class Drop(Request, frozen=True, tag=10, kw_only=True):
    """No task is to be given these rows any more: by offset, by key, and those of groups."""

    rows: Index = _NONE
    keys: list[str] = []
    groups: list[str | int] = []


class Close(Request, frozen=True, tag=11, kw_only=True):
    """Nothing is appended any more."""


class Clear(Request, frozen=True, tag=12, kw_only=True):
    """Everything goes."""


class TakeLost(Request, frozen=True, tag=13, kw_only=True):
    """Tell of lost rows, each once: answered by `LostRows`."""

    most: int


class Lose(Request, frozen=True, tag=14, kw_only=True):
    """As the command of this name."""

    node: bytes
    incarnation: int = 0
    before: int = 1 << 63


class Configure(Request, frozen=True, tag=15, kw_only=True):
    """As the command of this name."""

    settings: Settings


class Borrow(Request, frozen=True, tag=16, kw_only=True):
    """Another partition asks the first for so much of the limits in all: answered by a `Loan`. `version` as it has."""

    partition: int
    version: int
    rows: int
    nbytes: int


class TakeQuota(Request, frozen=True, tag=17, kw_only=True):
    """What the first partition has answered."""

    loan: Loan


class YieldQuota(Request, frozen=True, tag=18, kw_only=True):
    """Keep no more than this of the loan, or what is in use; then the rest can be given back by `Borrow`. Answered by
    the `Loan` that is left."""

    rows: int
    nbytes: int


class Leave(Request, frozen=True, tag=19, kw_only=True):
    """The client has gone: what it holds goes to others, and it waits no longer. `ended`: it sends nothing again."""

    ended: bool = False


class Tick(Request, frozen=True, tag=20, kw_only=True):
    """Time has passed, or something has changed: see `StreamMachine.deadline`."""


AnyRequest = (
    Admit
    | GiveBack
    | Append
    | Extend
    | Consume
    | Cancel
    | Ack
    | Nack
    | Renew
    | Drop
    | Close
    | Clear
    | TakeLost
    | Lose
    | Configure
    | Borrow
    | TakeQuota
    | YieldQuota
    | Leave
    | Tick
)


class Result(msgspec.Struct, frozen=True, array_like=True):
    """The root of answers."""


class Done(Result, frozen=True, tag=1):
    """It is done."""


class Refused(Result, frozen=True, tag=2):
    """A committed command that could not be done, and changed nothing: the error that it is for who asked."""

    kind: str
    message: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: DataplaneError) -> Refused:
        return cls(*describe(error))

    @property
    def error(self) -> DataplaneError:
        return revive(self.kind, self.message, self.fields)


class Appended(Result, frozen=True, tag=3):
    """The offset of the first row. Not `new`: the very same rows came before, and these columns are not needed."""

    first: int
    rows: int
    new: bool


class Admitted(Result, frozen=True, tag=4):
    """Leave to append."""

    ticket: int


class Waiting(Result, frozen=True, tag=5):
    """The answer comes later, by `Served`."""


class Delivered(Result, frozen=True, tag=6):
    """Rows that the client holds now, under a grant."""

    grant: int
    rows: Index
    ref: BatchRef
    holds: int
    keys: list[str]
    groups: list[str | int | None]
    versions: list[int]
    tags: dict[str, list[Value]]
    lengths: dict[str, Index]


class LostRows(Result, frozen=True, tag=7):
    """Offset, key, group and version of rows that are gone with what stored their columns."""

    rows: list[tuple[int, str, str | int | None, int]]


class Lent(Result, frozen=True, tag=8):
    """The loan of a partition."""

    loan: Loan


AnyResult = Done | Refused | Appended | Admitted | Waiting | Delivered | LostRows | Lent

encode_request: Callable[[Request], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
encode_result: Callable[[Result], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
_requests = msgspec.msgpack.Decoder(AnyRequest, dec_hook=unhook)
_results = msgspec.msgpack.Decoder(AnyResult, dec_hook=unhook)


def decode_request(request: bytes) -> AnyRequest:
    """Raises ProtocolMismatch for what is no request."""
    try:
        found: AnyRequest = _requests.decode(request)
        return found
    except (msgspec.MsgspecError, ValueError, TypeError, Corrupt) as error:
        raise ProtocolMismatch(f"this is no request to a stream's partition: {error}") from error


def decode_result(result: bytes) -> AnyResult:
    """Raises ProtocolMismatch for what is no answer."""
    try:
        found: AnyResult = _results.decode(result)
        return found
    except (msgspec.MsgspecError, ValueError, TypeError, Corrupt) as error:
        raise ProtocolMismatch(f"this is no answer of a stream's partition: {error}") from error

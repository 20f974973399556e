"""The event name of each kind of request, and the kinds with a lasting effect."""

from __future__ import annotations

from typing import Any

from dataplane.observe.ring import CODE
from dataplane.stream import requests as r
from dataplane.table import requests as t
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

_OPERATIONS: dict[type[Any], str] = {
    sm.PutShard: "put",
    sm.Reserve: "reserve",
    sm.SealShards: "seal",
    sm.PinShards: "get",
    sm.Free: "free",
    rm.AdmitRows: "wait",
    rm.AppendRows: "append",
    rm.ExtendRows: "extend",
    r.Consume: "consume",
    r.Ack: "ack",
    r.Nack: "ack",
    t.Upsert: "table write",
    t.Read: "table read",
    t.LookRows: "table read",
    t.Claim: "table claim",
}
_CHANGES = frozenset(
    (
        sm.Free,
        rm.OpenStream,
        rm.AppendRows,
        rm.ExtendRows,
        r.ResumeRow,
        r.AbandonRow,
        r.RenewRow,
        rm.DropStream,
        rm.TakeLostRows,
        rm.PublishRestored,
        r.Ack,
        r.Nack,
        r.Renew,
        r.Drop,
        r.Close,
        t.Upsert,
        t.ClearRows,
        t.Claim,
        t.Release,
        t.DropTable,
    )
)
"""The requests with a lasting effect. A late answer to any other leaves nothing behind: the grant of a put, a pin, an
admission or a delivery is released (`client.connection`)."""
_CODES = {kind: CODE[name] for kind, name in _OPERATIONS.items()}


def code(request: Any) -> int:
    """The event as which a request is recorded."""
    if isinstance(request, rm.AppendRows) and request.columns is None:
        return CODE["request"]  # the append is recorded as a whole, with its admission
    return _CODES.get(type(_asked(request)), CODE["request"])


def changes(request: Any) -> bool:
    """Whether a request has a lasting effect."""
    return type(_asked(request)) in _CHANGES


def _asked(request: Any) -> Any:
    return request.asked if isinstance(request, rm.AskStream | rm.AskTable) else request

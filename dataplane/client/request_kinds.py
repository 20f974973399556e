"""The event name of each kind of request, and the kinds with a lasting effect."""

from __future__ import annotations

from typing import Any

from dataplane.observe.ring import CODE
from dataplane.stream import requests as r
from dataplane.table import requests as t
from dataplane.wire import messages as m

_OPERATIONS: dict[type[Any], str] = {
    m.Put: "put",
    m.Reserve: "reserve",
    m.Seal: "seal",
    m.Pin: "get",
    m.Free: "free",
    m.FreeElsewhere: "free",
    m.Admit: "wait",
    m.Append: "append",
    m.Extend: "extend",
    r.Consume: "consume",
    r.Ack: "ack",
    r.Nack: "ack",
    t.Upsert: "table write",
    t.Read: "table read",
    t.Look: "table read",
    t.Claim: "table claim",
}
_CHANGES = frozenset(
    (
        m.Free,
        m.FreeElsewhere,
        m.Open,
        m.Append,
        m.Extend,
        r.TakeUp,
        r.GiveUp,
        r.Hear,
        m.DropStream,
        m.TakeLost,
        m.Restored,
        r.Ack,
        r.Nack,
        r.Renew,
        r.Drop,
        r.Close,
        t.Upsert,
        t.Clear,
        t.Claim,
        t.Release,
        t.Drop,
    )
)
"""The requests with a lasting effect. A late answer to any other leaves nothing behind: the grant of a put, a pin, an
admission or a delivery is released (`client.connection`)."""
_CODES = {kind: CODE[name] for kind, name in _OPERATIONS.items()}


def code(request: Any) -> int:
    """The event as which a request is recorded."""
    if isinstance(request, m.Append) and request.columns is None:
        return CODE["request"]  # the append is recorded as a whole, with its admission
    return _CODES.get(type(_asked(request)), CODE["request"])


def changes(request: Any) -> bool:
    """Whether a request has a lasting effect."""
    return type(_asked(request)) in _CHANGES


def _asked(request: Any) -> Any:
    return request.asked if isinstance(request, m.AskStream | m.AskTable) else request

"""What clients ask of tables and are answered, as messages, and as a table has it.

What always holds: what comes out of a message is within the bounds that a table may rely on.
"""

from __future__ import annotations

from typing import Any, TypeAlias, overload

from dataplane.errors import ProtocolMismatch
from dataplane.node.streams import packed
from dataplane.stream.requests import Done
from dataplane.table import requests as r
from dataplane.wire import messages as m

TableRequest: TypeAlias = (
    m.WriteRows
    | m.ReadRows
    | m.DescribeTable
    | m.LookAtRows
    | m.NumberRows
    | m.ReadyRows
    | m.TakeRows
    | m.UntakeRows
    | m.TakenRows
    | m.ClearRows
    | m.DropTable
    | m.Tables
)


def check_name(name: str) -> None:
    """Raises LimitExceeded, ProtocolMismatch for what is no name of a table, task or claim."""
    packed.bound("the name of a table, task or claim", m.MAX_SCOPE, len(name))
    if not name:
        raise ProtocolMismatch("a table, task or claim without a name")


@overload
def asked(request: m.WriteRows) -> r.Write: ...


@overload
def asked(request: m.ReadyRows) -> r.Ready: ...


@overload
def asked(request: Any) -> r.AnyRequest: ...


def asked(request: Any) -> r.AnyRequest:
    """What a message asks of its table. Raises LimitExceeded, ProtocolMismatch."""
    match request:
        case m.WriteRows():
            return _write(request)
        case m.NumberRows(create=True):
            return r.Write(keys=_keys("rows of a call", request.keys))
        case m.NumberRows():
            return r.Number(keys=_keys("rows of a call", request.keys))
        case m.ReadRows():
            rows = _rows("rows of a read", request)
            return r.Read(keys=request.keys, rows=rows, columns=request.columns)
        case m.DescribeTable():
            return r.Describe()
        case m.LookAtRows():
            return r.Look(
                keys=request.keys,
                rows=_rows("rows of a look", request),
                all=request.all,
                after=request.after,
                columns=request.columns,
                tags=request.tags,
                since=request.since,
            )
        case m.ReadyRows():
            return r.Ready(
                columns=request.columns,
                task=request.task,
                claim=request.claim,
                least=request.least,
                after=request.after,
            )
        case m.TakeRows():
            return _take(request)
        case m.UntakeRows():
            return r.Untake(task=request.task, rows=packed.int64("rows", request.rows), all=request.all)
        case m.TakenRows():
            rows = packed.int64("rows", request.rows)
            return r.Taken(task=request.task, rows=rows, all=request.all, after=request.after)
        case m.ClearRows():
            return r.Clear(keys=request.keys, rows=packed.int64("rows", request.rows))
        case m.DropTable():
            return r.Drop()
    raise ProtocolMismatch(f"a {type(request).__name__} is nothing that a table is asked")


def _write(request: m.WriteRows) -> r.Write:
    rows = _rows("rows of a write", request)
    packed.bound("characters of a key", m.MAX_SCOPE, max(map(len, request.keys), default=0))
    return r.Write(keys=request.keys, rows=rows, ref=request.ref, tags=request.tags, look=request.look)


def _take(request: m.TakeRows) -> r.Take | r.Claimed:
    check_name(request.task)
    check_name(request.claim or "-")
    if request.ask:
        return r.Claimed(task=request.task, claim=request.claim)
    rows, give = packed.int64("rows", request.rows), packed.int64("rows", request.give)
    return r.Take(task=request.task, rows=rows, give=give, claim=request.claim)


def _keys(what: str, keys: list[str]) -> list[str]:
    packed.bound(what, m.MAX_ROWS, len(keys))
    return keys


def _rows(what: str, request: Any) -> packed.Index:
    """The numbers of rows that are named by number."""
    rows = packed.int64("rows", request.rows)
    packed.bound(what, m.MAX_ROWS, len(request.keys) or len(rows))
    return rows


def replied(number: int, home: bytes, result: r.AnyResult) -> m.Reply:
    """The message that says so, in answer to the request of this number. `home`: as tables are known by."""
    match result:
        case r.Numbered(rows, more):
            return m.Numbered(number, home, rows.tobytes(), more)
        case r.Referred(ref):
            return m.Referred(number, home, ref)
        case r.Looked():
            return m.Looked(
                number,
                home,
                result.changes,
                result.rows.tobytes(),
                result.keys,
                result.tags,
                result.have,
                result.more,
                result.columns,
            )
        case r.Given(granted, rows):
            return m.Given(number, home, granted, rows.tobytes())
        case r.Flagged(flags, last, more):
            return m.Taken(number, home, flags, last, more)
        case Done():
            return m.Done(number)
    raise ProtocolMismatch(f"no client is answered by a {type(result).__name__}")

"""The methods of the blocking classes that do nothing but wait for those of the asynchronous classes.

The stub beside this module has their signatures and docstrings. `python -m tests.stubs` writes it.
"""

from __future__ import annotations

from dataplane.client import delivery, draft
from dataplane.client.appender import AsyncAppender
from dataplane.client.blocking import Blocking, blocking
from dataplane.client.histories import AsyncHistory
from dataplane.client.plane import AsyncPlane
from dataplane.client.streams import AsyncStream
from dataplane.client.tables import AsyncTable
from dataplane.client.unfinished import AsyncRow
from dataplane.client.weights import AsyncWeights


@blocking(
    AsyncPlane,
    *("address", "put", "draft", "get", "prefetch", "free", "retain", "retain_each"),
    *("stats", "stream", "streams", "restore", "replay", "table", "history", "weights", "tables"),
    *("members", "graphs", "diagnose"),
)
class PlaneCalls(Blocking):
    """The calls of `Plane`."""


@blocking(
    AsyncStream,
    *("__repr__", "append", "appender", "extend", "consume", "deliveries", "take", "drop_rows", "dead_letters"),
    *("lost", "begin", "unfinished", "resume", "stats", "checkpoint", "record", "close", "drop"),
)
class StreamCalls(Blocking):
    """The calls of `Stream`."""


@blocking(delivery.Delivery, "__len__", "__repr__", "get", "ack", "nack", "renew", "split", "rows_of")
class DeliveryCalls(Blocking):
    """The calls of `Delivery`."""


@blocking(draft.Draft, "__getitem__", "__iter__", "torch", "seal")
class DraftCalls(Blocking):
    """The calls of `Draft`."""


@blocking(delivery.Taken, "__len__", "__getitem__", "ack", "nack")
class TakenCalls(Blocking):
    """The calls of `Taken`."""


@blocking(AsyncRow, "__repr__", "append", "finish", "abandon", "renew", "release", "ref", "get")
class RowCalls(Blocking):
    """The calls of `Row`."""


@blocking(AsyncAppender, "__repr__", "pending", "append", "flush")
class AppenderCalls(Blocking):
    """The calls of `Appender`."""


@blocking(
    AsyncTable,
    *("__repr__", "upsert", "upsert_and_look", "numbers", "keys", "read", "schema", "look", "ready", "claim"),
    *("find_claim", "release", "claimed", "clear", "drop", "_put_row"),
)
class TableCalls(Blocking):
    """The calls of `Table`."""


@blocking(
    AsyncHistory,
    *("__repr__", "add", "record", "follow", "following", "known", "responses", "drafter", "lengths"),
    *("schedule", "drop"),
)
class HistoryCalls(Blocking):
    """The calls of `History`."""


@blocking(AsyncWeights, "__repr__", "publish", "get", "versions", "newer", "watch", "drop")
class WeightsCalls(Blocking):
    """The calls of `Weights`."""

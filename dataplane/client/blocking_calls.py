"""The methods of the blocking classes that only run an asynchronous method and wait for its result.

The stub beside this module has the signatures and docstrings. `python -m tests.stubs` writes the stub.
"""

from __future__ import annotations

from dataplane.client.appender import AsyncAppender
from dataplane.client.blocking import blocking
from dataplane.client.delivery import Delivery, Taken
from dataplane.client.draft import Draft
from dataplane.client.histories import AsyncHistory
from dataplane.client.plane import AsyncPlane
from dataplane.client.streams import AsyncStream
from dataplane.client.tables import AsyncTable
from dataplane.client.unfinished import AsyncRow
from dataplane.client.weights import AsyncWeights

PlaneCalls = blocking(
    AsyncPlane,
    "address put draft get prefetch free retain retain_each stats stream streams restore replay table history weights"
    " tables members graphs diagnose",
)
StreamCalls = blocking(
    AsyncStream,
    "__repr__ append appender extend consume deliveries take drop_rows dead_letters retry lost begin unfinished resume"
    " stats checkpoint record close drop",
)
DeliveryCalls = blocking(Delivery, "__len__ __repr__ get ack nack renew split rows_of")
DraftCalls = blocking(Draft, "__getitem__ __iter__ torch seal")
TakenCalls = blocking(Taken, "__len__ __getitem__ ack nack")
RowCalls = blocking(AsyncRow, "__repr__ append finish abandon renew release ref get")
AppenderCalls = blocking(AsyncAppender, "__repr__ pending flush")
TableCalls = blocking(
    AsyncTable,
    "__repr__ upsert upsert_and_look numbers keys read schema look ready claim find_claim release claimed clear drop"
    " _put_row",
)
HistoryCalls = blocking(
    AsyncHistory, "__repr__ add record follow following known responses drafter lengths schedule drop"
)
WeightsCalls = blocking(AsyncWeights, "__repr__ publish get versions newer watch drop")

"""The asynchronous interface: `async with dataplane.aio.connect() as plane: ref = await plane.put(...)`.

It has the methods of the synchronous one, as coroutines.
"""

from dataplane.client.appender import AsyncAppender
from dataplane.client.connecting import connect
from dataplane.client.delivery import Delivery, Taken
from dataplane.client.draft import Draft, dense, ragged
from dataplane.client.histories import AsyncHistory
from dataplane.client.plane import AsyncPlane
from dataplane.client.streams import AsyncStream
from dataplane.client.tables import AsyncTable
from dataplane.client.unfinished import AsyncRow
from dataplane.client.weights import AsyncWeights

__all__ = [
    "AsyncAppender",
    "AsyncHistory",
    "AsyncPlane",
    "AsyncRow",
    "AsyncStream",
    "AsyncTable",
    "AsyncWeights",
    "Delivery",
    "Draft",
    "Taken",
    "connect",
    "dense",
    "ragged",
]

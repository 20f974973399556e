"""The asynchronous face: `async with dataplane.aio.connect() as plane: ref = await plane.put(...)`.

The same names as the synchronous one, awaited.
"""

from dataplane.client.delivery import Delivery
from dataplane.client.draft import Draft, dense, ragged
from dataplane.client.plane import AsyncPlane, connect
from dataplane.client.streams import AsyncStream
from dataplane.client.tables import AsyncTable

__all__ = ["AsyncPlane", "AsyncStream", "AsyncTable", "Delivery", "Draft", "connect", "dense", "ragged"]

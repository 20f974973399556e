"""The asynchronous face: `async with dataplane.aio.connect() as plane: ref = await plane.put(...)`.

The same names as the synchronous one, awaited.
"""

from dataplane.client.draft import Draft, dense, ragged
from dataplane.client.plane import AsyncPlane, connect

__all__ = ["AsyncPlane", "Draft", "connect", "dense", "ragged"]

"""Planes and streams whose calls are spans (`client.spans`). They add nothing else, and serve both faces: a call of the
synchronous one runs that of the asynchronous one, in the caller's context."""

from __future__ import annotations

from typing import Any, ClassVar

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.client import delivery, spans, streams
from dataplane.client.blocking import CLASSES
from dataplane.client.plane import AsyncPlane


class TracedAsyncPlane(AsyncPlane):
    """See `AsyncPlane`."""

    traced: ClassVar[bool] = True

    async def put(self, columns: Any, **how: Any) -> BatchRef:
        with spans.span("put", "PRODUCER", scope=how.get("scope")) as span:
            ref = await super().put(columns, **how)
            _made(span, ref)
            return ref

    async def read(self, ref: BatchRef, timeout: float, device: Any = None) -> Batch:
        with spans.span("get", "CONSUMER") as span:
            _read(span, ref)
            return await super().read(ref, timeout, device)

    async def stream(self, name: str, *given: Any, **how: Any) -> streams.AsyncStream:
        return TracedAsyncStream(await super().stream(name, *given, **how))


class TracedAsyncStream(streams.AsyncStream):
    """See `AsyncStream`."""

    traced: ClassVar[bool] = True

    def __init__(self, made: streams.AsyncStream) -> None:
        self.__dict__.update(made.__dict__)

    async def append(self, columns: Any, **how: Any) -> list[str]:
        about = spans.about_append(how.get("group"), how.get("keys"), how.get("tags"))
        with spans.span("append", "PRODUCER", self.name, **about) as span:
            spans.link(span, getattr(columns, "traces", ()))
            keys = await super().append(columns, **how | {"tags": spans.tagged(span, how.get("tags"))})
            spans.appended(span, keys, how.get("tags"))
            return keys

    async def extend(self, rows: Any, columns: Any, **how: Any) -> None:
        with spans.span("extend", "PRODUCER", self.name, rows=len(rows)) as span:
            spans.link(span, getattr(rows, "traces", ()))
            await super().extend(rows, columns, **how)

    async def _consume(self, task: str, *given: Any) -> delivery.Delivery:
        with spans.span("consume", "CONSUMER", self.name, task=task) as span:
            found = await super()._consume(task, *given)
            spans.consumed(span, found)
            return TracedAsyncDelivery(found, self.name, task, spans.parent(span))


class TracedAsyncDelivery(delivery.Delivery):
    """See `delivery.Delivery`."""

    def __init__(self, made: delivery.Delivery, stream: str, task: str, parents: tuple[str, ...]) -> None:
        self.__dict__.update(made.__dict__)
        self._of, self._task, self._parents = stream, task, parents

    async def get(self, *columns: str, **how: Any) -> Batch:
        with spans.span("get", "CONSUMER", task=self._task) as span:
            _read(span, self.ref)
            return await super().get(*columns, **how)

    async def _settle(self, *, done: bool, seen: bool = True, reason: str = "") -> None:
        if self.settled:
            await super()._settle(done=done, seen=seen, reason=reason)
            return
        with spans.span("ack" if done else "nack", "CLIENT", self._of, task=self._task, rows=len(self)) as span:
            spans.link(span, self._parents)
            await super()._settle(done=done, seen=seen, reason=reason)


def _made(span: Any, ref: BatchRef) -> None:
    ref.traces = spans.parent(span)
    span.set_attribute("rows", len(ref))
    span.set_attribute("bytes", ref.nbytes)


def _read(span: Any, ref: Any) -> None:
    if isinstance(ref, BatchRef):
        spans.link(span, ref.traces)
        span.set_attribute("rows", len(ref))
        span.set_attribute("bytes", ref.nbytes)


for _kind, _plain in ((TracedAsyncStream, streams.AsyncStream), (TracedAsyncDelivery, delivery.Delivery)):
    if _plain in CLASSES:  # the synchronous face is there
        CLASSES[_kind] = CLASSES[_plain]

"""Planes and streams whose calls are spans (`client.spans`): both faces. They add nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.client import delivery, spans, streams, sync, sync_streams
from dataplane.client.plane import AsyncPlane


class TracedPlane(sync.Plane):
    """See `Plane`."""

    def put(self, columns: Any, **how: Any) -> BatchRef:
        with spans.span("put", "PRODUCER", scope=how.get("scope")) as span:
            ref = super().put(columns, **how)
            _made(span, ref)
            return ref

    def get(self, ref: BatchRef, **how: Any) -> Batch:
        with spans.span("get", "CONSUMER") as span:
            _read(span, ref)
            return super().get(ref, **how)

    def stream(self, name: str, *given: Any, **how: Any) -> sync_streams.Stream:
        return TracedStream(super().stream(name, *given, **how))


class TracedStream(sync_streams.Stream):
    """See `Stream`."""

    def __init__(self, made: sync_streams.Stream) -> None:
        super().__init__(made._inner, made._wait, made._turns)

    def append(self, columns: Any, **how: Any) -> list[str]:
        about = spans.about_append(how.get("group"), how.get("keys"), how.get("tags"))
        with spans.span("append", "PRODUCER", self.name, **about) as span:
            spans.link(span, getattr(columns, "traces", ()))
            keys = super().append(columns, **how | {"tags": spans.tagged(span, how.get("tags"))})
            spans.appended(span, keys, how.get("tags"))
            return keys

    def extend(self, rows: Any, columns: Any, **how: Any) -> None:
        with spans.span("extend", "PRODUCER", self.name, rows=len(rows)) as span:
            spans.link(span, getattr(rows, "traces", ()))
            super().extend(rows, columns, **how)

    def consume(self, task: str, **how: Any) -> sync_streams.Delivery:
        with spans.span("consume", "CONSUMER", self.name, task=task) as span:
            found = super().consume(task, **how)
            spans.consumed(span, found)
            return TracedDelivery(found, self.name, task, spans.parent(span))

    def deliveries(self, task: str, **how: Any) -> Iterator[sync_streams.Delivery]:
        for found in super().deliveries(task, **how):
            with spans.span("consume", "CONSUMER", self.name, task=task) as span:
                spans.consumed(span, found)
                made = spans.parent(span)
            traced = TracedDelivery(found, self.name, task, made)
            yield traced
            if not traced.settled:
                traced.ack()


class TracedDelivery(sync_streams.Delivery):
    """See `Delivery`."""

    def __init__(self, made: sync_streams.Delivery, stream: str, task: str, parents: tuple[str, ...]) -> None:
        super().__init__(made._inner, made._wait, made._turns)
        self._stream, self._task, self._parents = stream, task, parents

    def get(self, *columns: str, **how: Any) -> Batch:
        with spans.span("get", "CONSUMER", task=self._task) as span:
            _read(span, self.ref)
            return super().get(*columns, **how)

    def ack(self) -> None:
        with spans.span("ack", "CLIENT", self._stream, task=self._task, rows=len(self)) as span:
            spans.link(span, self._parents)
            super().ack()

    def nack(self, reason: str = "") -> None:
        with spans.span("nack", "CLIENT", self._stream, task=self._task, rows=len(self)) as span:
            spans.link(span, self._parents)
            super().nack(reason)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, _: object = None) -> None:
        operation = "ack" if kind is None else "nack"
        with spans.span(operation, "CLIENT", self._stream, task=self._task, rows=len(self)) as span:
            spans.link(span, self._parents)
            super().__exit__(kind, error)


class TracedAsyncPlane(AsyncPlane):
    """See `AsyncPlane`."""

    async def put(self, columns: Any, **how: Any) -> BatchRef:
        with spans.span("put", "PRODUCER", scope=how.get("scope")) as span:
            ref = await super().put(columns, **how)
            _made(span, ref)
            return ref

    async def get(self, ref: BatchRef, **how: Any) -> Batch:
        with spans.span("get", "CONSUMER") as span:
            _read(span, ref)
            return await super().get(ref, **how)

    async def stream(self, name: str, *given: Any, **how: Any) -> streams.AsyncStream:
        return TracedAsyncStream(await super().stream(name, *given, **how))


class TracedAsyncStream(streams.AsyncStream):
    """See `AsyncStream`."""

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

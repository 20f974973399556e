"""Spans of OpenTelemetry for puts, gets, appends, extends, consumes and acks (the extra `otel`).

A plane makes spans if its process imported `opentelemetry` before it connected. Otherwise this module is not loaded,
and calls cost nothing more. The process's OpenTelemetry SDK sends the spans, for example by an OTLP exporter. The
classes of this module only add spans. They serve the blocking interface too, which runs the asynchronous calls in the
caller's context.

A reference has the trace parents of the spans that made its rows, also when pickled or after an operation. A row of a
stream has its trace parent in the tag `traceparent` (W3C Trace Context). So the span of a consume or get is linked to
the spans of the appends and puts, in any process. A span has the attributes `stream`, `task`, `group`, `rollout_id`
(the tag of that name, else the rows' keys) and `rows`. For several rows, it has the first `_SOME` different values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.batch.ref_codec import MOST_TRACES
from dataplane.client import delivery, streams
from dataplane.client.blocking import CLASSES
from dataplane.client.plane import AsyncPlane
from dataplane.stream import requests as r

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext


class TracedAsyncPlane(AsyncPlane):
    """An `AsyncPlane` whose puts and gets make spans."""

    traced: ClassVar[bool] = True

    async def put(self, columns: Any, **how: Any) -> BatchRef:
        with spanned("put", "PRODUCER", scope=how.get("scope")) as span:
            ref = await super().put(columns, **how)
            _made(span, ref)
            return ref

    async def read(self, ref: BatchRef, timeout: float) -> Batch:
        with spanned("get", "CONSUMER") as span:
            _read(span, ref)
            return await super().read(ref, timeout)

    async def stream(self, name: str, *given: Any, **how: Any) -> streams.AsyncStream:
        return TracedAsyncStream(await super().stream(name, *given, **how))


class TracedAsyncStream(streams.AsyncStream):
    """An `AsyncStream` whose appends, extends and consumes make spans."""

    traced: ClassVar[bool] = True

    def __init__(self, made: streams.AsyncStream) -> None:
        self.__dict__.update(made.__dict__)

    async def append(self, columns: Any, **how: Any) -> list[str]:
        tags = how.get("tags") or {}
        rollouts = tags.get("rollout_id", how.get("keys"))
        with spanned("append", "PRODUCER", self.name, group=some(how.get("group")), rollout_id=some(rollouts)) as span:
            link(span, getattr(columns, "traces", ()))
            made = parent(span)
            keys = await super().append(columns, **how | ({"tags": {TAG: made[0], **tags}} if made else {}))
            span.set_attribute("rows", len(keys))
            if "rollout_id" not in tags:
                span.set_attribute("rollout_id", some(keys) or "")
            return keys

    async def extend(self, rows: Any, columns: Any, **how: Any) -> None:
        with spanned("extend", "PRODUCER", self.name, rows=len(rows)) as span:
            link(span, getattr(rows, "traces", ()))
            await super().extend(rows, columns, **how)

    async def _consume(self, asked: r.Consume, *given: Any) -> delivery.Delivery:
        with spanned("consume", "CONSUMER", self.name, task=asked.task) as span:
            found = await super()._consume(asked, *given)
            _consumed(span, found)
            return TracedAsyncDelivery(found, self.name, asked.task, parent(span))


class TracedAsyncDelivery(delivery.Delivery):
    """A `delivery.Delivery` whose gets, acks and nacks make spans."""

    def __init__(self, made: delivery.Delivery, stream: str, task: str, parents: tuple[str, ...]) -> None:
        self.__dict__.update(made.__dict__)
        self._of, self._task, self._parents = stream, task, parents

    async def get(self, *columns: str, **how: Any) -> Batch:
        with spanned("get", "CONSUMER", task=self._task) as span:
            _read(span, self.ref)
            return await super().get(*columns, **how)

    async def _settle(self, *, done: bool, seen: bool = True, reason: str = "") -> None:
        if self.settled:
            await super()._settle(done=done, seen=seen, reason=reason)
            return
        with spanned("ack" if done else "nack", "CLIENT", self._of, task=self._task, rows=len(self)) as span:
            link(span, self._parents)
            await super()._settle(done=done, seen=seen, reason=reason)


def _made(span: Any, ref: BatchRef) -> None:
    ref.traces = parent(span)
    span.set_attribute("rows", len(ref))
    span.set_attribute("bytes", ref.nbytes)


def _read(span: Any, ref: Any) -> None:
    if isinstance(ref, BatchRef):
        link(span, ref.traces)
        span.set_attribute("rows", len(ref))
        span.set_attribute("bytes", ref.nbytes)


for _kind, _plain in ((TracedAsyncStream, streams.AsyncStream), (TracedAsyncDelivery, delivery.Delivery)):
    if _plain in CLASSES:  # the synchronous interface is imported
        CLASSES[_kind] = CLASSES[_plain]


TAG = "traceparent"
"""The name of the tag with the trace parent of a row."""

_SOME = 16
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


@contextmanager
def spanned(operation: str, kind: str, stream: str = "", **attributes: Any) -> Iterator[Span]:
    """A context manager with the span of a call, current within the block. An exception ends the span with an error.
    kind: a name of `SpanKind`."""
    from opentelemetry import trace

    tracer = trace.get_tracer("dataplane")
    name = f"{operation} {stream}" if stream else operation
    given = {"messaging.system": "dataplane", "messaging.operation.name": operation, **attributes}
    if stream:
        given |= {"messaging.destination.name": stream, "stream": stream}
    found = {name: value for name, value in given.items() if value is not None}
    with tracer.start_as_current_span(name, kind=trace.SpanKind[kind], attributes=found) as current:
        yield current


def parent(current: Span) -> tuple[str, ...]:
    """The trace parent of a span, as references carry it; none if the span is not recorded."""
    context = current.get_span_context()
    if not context.is_valid:
        return ()
    return (f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}",)


def link(current: Span, parents: Iterable[Any]) -> None:
    """Link the span to the first `MOST_TRACES` different ones of these trace parents; ignore invalid ones."""
    for each in list(dict.fromkeys(each for each in parents if isinstance(each, str)))[:MOST_TRACES]:
        context = _context(each)
        if context is not None:
            current.add_link(context)


def _context(text: str) -> SpanContext | None:
    from opentelemetry.trace import SpanContext, TraceFlags

    match = _PARENT.fullmatch(text)
    if match is None:
        return None
    trace_id, span_id, flags = (int(group, 16) for group in match.groups())
    context = SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(flags))
    return context if context.is_valid else None


def some(values: Any) -> Any:
    """Values in the form of an attribute: a single value unchanged, several as a list of the first `_SOME` different
    ones as text, or one text; None if there are none."""
    if values is None or isinstance(values, str | int | float | bool):
        return values
    if hasattr(values, "tolist"):
        values = values.tolist()
    found = list(dict.fromkeys(str(each) for each in values if each is not None))[:_SOME]
    return None if not found else found[0] if len(found) == 1 else found


def _consumed(current: Span, delivery: Any) -> None:
    """Record the delivered rows in the span, and link it to the spans that made the rows. The delivery's reference gets
    their trace parents. Tags may have any values, because users set them."""
    parents = [each for each in delivery.tags.get(TAG, ()) if isinstance(each, str)]
    parents = list(dict.fromkeys([*delivery.ref.traces, *parents]))[:MOST_TRACES]
    delivery.ref.traces = tuple(parents)
    link(current, parents)
    current.set_attribute("rows", len(delivery))
    rollouts = delivery.tags.get("rollout_id", delivery.keys)
    for name, value in (("group", some(delivery.groups)), ("rollout_id", some(rollouts))):
        if value is not None:
            current.set_attribute(name, value)

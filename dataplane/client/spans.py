"""Spans of OpenTelemetry for puts, gets, appends, extends, consumes and acks (the extra `otel`).

Planes make them that are connected in a process which has imported `opentelemetry`; elsewhere nothing of this is
loaded, and no call takes longer. Where they go is up to the SDK that the process configures, such as an OTLP exporter.

A reference carries the trace parents of the spans that made its rows, also pickled and through every operation; rows
of a stream carry theirs as the tag `traceparent` (W3C Trace Context). So the span of a consume or get has links to
those of the appends and puts, in whatever process they were. A span has the attributes `stream`, `task`, `group`,
`rollout_id` (the tag of that name, else the rows' keys) and `rows`; of several rows the first `_SOME` different ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dataplane.batch.ref_codec import MOST_TRACES

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

TAG = "traceparent"
"""The tag by which rows of a stream carry their span."""

_SOME = 16
_PARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")


def enabled() -> bool:
    """Whether this process has imported OpenTelemetry."""
    return "opentelemetry.trace" in sys.modules


@contextmanager
def span(operation: str, kind: str, stream: str = "", **attributes: Any) -> Iterator[Span]:
    """A span of this call, the current one while it lasts; an error ends it as such. kind: of `SpanKind`."""
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
    """The trace parent of a span, as references carry it; none where it is not recorded anywhere."""
    context = current.get_span_context()
    if not context.is_valid:
        return ()
    return (f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}",)


def link(current: Span, parents: Iterable[Any]) -> None:
    """Link the span to these trace parents, each once; what is none is passed over."""
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
    """Values as an attribute: one as itself, several as a list of the first different ones; None for none."""
    if values is None or isinstance(values, str | int | float | bool):
        return values
    if hasattr(values, "tolist"):
        values = values.tolist()
    found = list(dict.fromkeys(str(each) for each in values if each is not None))[:_SOME]
    return None if not found else found[0] if len(found) == 1 else found


def about_append(group: Any, keys: Sequence[str] | None, tags: Mapping[str, Any] | None) -> dict[str, Any]:
    """The attributes of an append, as far as its caller says them."""
    rollouts = (tags or {}).get("rollout_id", keys)
    return {"group": some(group), "rollout_id": some(rollouts)}


def appended(current: Span, keys: Sequence[str], tags: Mapping[str, Any] | None) -> None:
    """The append gave its rows these keys."""
    current.set_attribute("rows", len(keys))
    if "rollout_id" not in (tags or {}):
        current.set_attribute("rollout_id", some(keys) or "")


def tagged(current: Span, tags: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The tags of an append with its span's trace parent; one that the caller gives stays."""
    made = parent(current)
    if not made or TAG in (tags or {}):
        return tags
    return {**(tags or {}), TAG: made[0]}


def consumed(current: Span, delivery: Any) -> None:
    """The span got this delivery, whose reference carries on the spans that made its rows. Its tags are the user's."""
    parents = [each for each in delivery.tags.get(TAG, ()) if isinstance(each, str)]
    parents = list(dict.fromkeys([*delivery.ref.traces, *parents]))[:MOST_TRACES]
    delivery.ref.traces = tuple(parents)
    link(current, parents)
    current.set_attribute("rows", len(delivery))
    about = {"group": some(delivery.groups), "rollout_id": some(delivery.tags.get("rollout_id", delivery.keys))}
    for name, value in about.items():
        if value is not None:
            current.set_attribute(name, value)

"""Spans of OpenTelemetry: by the real SDK, in one process and over OTLP from several."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from tests.cases import each_case
from tests.optional import needs
from tests.processes import StandingNode

pytestmark = needs("opentelemetry")

_PRELUDE = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(endpoint=sys.argv[2])))
trace.set_tracer_provider(provider)
import dataplane as dp
plane = dp.connect(sys.argv[1])
"""
_PRODUCER = """
stream = plane.stream("rollouts", tasks=["actor"])
stream.append({"x": [1, 2]}, group="g7", keys=["r1", "r2"])
stream.append({"x": [3]}, group="g8", tags={"rollout_id": "mine", "traceparent": "garbage"})
"""
_CONSUMER = """
with plane.stream("rollouts").consume("actor", rows=3, min_rows=3, columns=["x"]) as delivery:
    delivery.get()
"""
_END = """
plane.close()
provider.shutdown()
"""


class Receiver:
    """An OTLP collector over HTTP: the spans that it was sent."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                import gzip

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                spans.extend(s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def run(code: str, *arguments: str) -> None:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def attributes(span: Any) -> dict[str, Any]:
    def value(each: Any) -> Any:
        kind = each.WhichOneof("value")
        return [value(v) for v in each.array_value.values] if kind == "array_value" else getattr(each, kind)

    return {each.key: value(each.value) for each in span.attributes}


def test_two_processes_send_spans_over_otlp_that_are_linked(tmp_path: Path, receiver: Receiver) -> None:
    with StandingNode(tmp_path) as node:
        for code in (_PRODUCER, _CONSUMER):
            run(_PRELUDE + code + _END, node.address, receiver.url)
        found = {(span.name): span for span in receiver.spans}
    assert set(found) == {"append rollouts", "consume rollouts", "get", "ack rollouts"}
    appends = [span for span in receiver.spans if span.name == "append rollouts"]
    consume, ack = found["consume rollouts"], found["ack rollouts"]
    assert attributes(appends[0])["rollout_id"] == ["r1", "r2"]
    assert attributes(appends[0])["group"] == "g7"
    assert attributes(appends[1])["rollout_id"] == "mine"
    assert attributes(consume)["task"] == "actor"
    assert attributes(consume)["group"] == ["g7", "g8"]
    assert attributes(consume)["rows"] == 3
    assert [each.span_id for each in consume.links] == [appends[0].span_id], "garbage is no link"
    assert consume.links[0].trace_id == appends[0].trace_id
    assert [each.span_id for each in ack.links] == [consume.span_id]
    assert [each.span_id for each in found["get"].links] == [appends[0].span_id]


_IN_MEMORY = """
import asyncio, pickle, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
exporter = InMemorySpanExporter()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(exporter))
import dataplane as dp
from dataplane.errors import NotReady

def linked(span):
    return [link.context.span_id for link in span.links]

def named(name):
    return [span for span in exporter.get_finished_spans() if span.name == name]

def both(ref):
    one, other = ref
    return dp.concat([one[:1], other])
"""
_SYNC = """
with dp.connect(sys.argv[1]) as plane:
    refs = [plane.put({"x": [1, 2]}), plane.put({"x": [3]})]
    again = pickle.loads(pickle.dumps(both(refs).select("x").repeat(2)))
    plane.get(again)
    puts, (get,) = named("put"), named("get")
    assert linked(get) == [span.context.span_id for span in puts], linked(get)
    stream = plane.stream("s", tasks=["t"])
    try:
        stream.consume("t", rows=1, columns=["x"], timeout=0.01)
    except NotReady:
        pass
    (failed,) = named("consume s")
    assert not failed.status.is_ok and failed.events[0].name == "exception"
    exporter.clear()
    for n in range(3):
        stream.append({"x": [n]})
    stream.close()
    for delivery in stream.deliveries("t", rows=2, columns=["x"]):
        assert "traceparent" in delivery.tags and delivery.ref.traces
        stream.extend(delivery.ref, {"y": [0] * len(delivery)})
    assert [len(span.links) for span in named("consume s")] == [2, 1]
    assert len(named("ack s")) == 2 and len(named("extend s")) == 2
    with trace.get_tracer("user").start_as_current_span("step") as step:
        plane.put({"x": [1]})
    assert named("put")[0].parent.span_id == step.get_span_context().span_id
"""
_ASYNC = """
async def main():
    async with dp.aio.connect(sys.argv[1]) as plane:
        ref = await plane.put({"x": [1, 2]})
        await plane.get(ref)
        assert linked(named("get")[0]) == [named("put")[0].context.span_id]
        stream = await plane.stream("a", tasks=["t"])
        await asyncio.gather(*(stream.append({"x": [n]}, group=n) for n in range(5)))
        async with stream.consume("t", rows=5, min_rows=5, columns=["x"]) as delivery:
            await delivery.get()
        (consume,) = named("consume a")
        assert sorted(linked(consume)) == sorted(span.context.span_id for span in named("append a"))
        assert linked(named("ack a")[0]) == [consume.context.span_id]
        assert consume.attributes["group"] == tuple("01234"), consume.attributes["group"]
asyncio.run(main())
"""


@each_case("code", [_SYNC, _ASYNC], ids=["sync", "async"])
def test_a_reference_carries_the_span_that_made_it(tmp_path: Path, code: str) -> None:
    with StandingNode(tmp_path) as node:
        run(_IN_MEMORY + code, node.address)


def test_without_opentelemetry_nothing_of_it_is_loaded(tmp_path: Path) -> None:
    code = """
import sys, dataplane as dp
with dp.connect(sys.argv[1]) as plane:
    plane.get(plane.put({"x": [1]}))
    assert type(plane) is dp.Plane
assert not [name for name in sys.modules if name.startswith(("opentelemetry", "dataplane.client.traced"))]
"""
    with StandingNode(tmp_path) as node:
        run(code, node.address)


def test_a_reference_with_too_many_or_too_long_traces_is_none() -> None:
    from dataplane.batch import refcodec
    from dataplane.errors import ProtocolMismatch

    ref = dp.BatchRef.of(b"12345678", 1, [("x", dp.Field("dense", "int64", ()), 8, 1, 0)])
    assert pickle.loads(pickle.dumps(ref)).traces == ()
    for traces in (("x" * 65,), ("x",) * (refcodec.MOST_TRACES + 1)):
        ref.traces = traces
        with pytest.raises(ProtocolMismatch):
            dp.BatchRef.decode(ref.encode())

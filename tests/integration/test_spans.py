"""Spans of OpenTelemetry: by the real SDK, in one process and over OTLP from several."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

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


def test_opentelemetry_is_not_imported_unless_it_is_configured(tmp_path: Path) -> None:
    code = """
import sys, dataplane as dp
with dp.connect(sys.argv[1]) as plane:
    plane.get(plane.put({"x": [1]}))
    assert type(plane) is dp.Plane
assert not [name for name in sys.modules if name.startswith(("opentelemetry", "dataplane.client.traced"))]
"""
    with StandingNode(tmp_path) as node:
        run(code, node.address)

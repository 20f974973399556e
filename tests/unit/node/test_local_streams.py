"""Streams of one node."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.node import telemetry
from dataplane.node.local.streams import LocalStream, LocalStreams
from dataplane.stream import requests as r
from dataplane.stream.settings import StreamSettings


class Needed:
    """Shards that rows need, of which this test looks at none."""

    def released(self, batches: Any, stream: str) -> None:
        pass


async def test_a_failing_waiter_does_not_fail_the_request_that_wakes_it() -> None:
    needed: Any = Needed()
    stream = LocalStream("s", StreamSettings(("a",)), "m", needed, lambda: 0.0)
    outcomes: list[Any] = []
    nothing: Any = object()  # no request that there is
    stream.wait(nothing, "q", outcomes.append, 60.0)
    (error,) = outcomes
    assert isinstance(error, KeyError)
    waits = r.Consume(client="c", task="a", columns=("x",), rows=1)
    stream.wait(waits, "r", outcomes.append, 60.0)
    stream.wait(nothing, "q", outcomes.append, 60.0)
    ref = ref_to(b"the-node", 1, [("x", Field("dense", "int64", ()), 8, 1, 0)])
    stream.run(r.Append(client="c", ref=ref, versions=np.zeros(1, np.int64)))
    assert [type(each) for each in outcomes] == [KeyError, KeyError, r.Delivered]
    stream.end()


async def test_a_stream_that_is_dropped_while_statistics_are_taken_is_counted_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "_SLICE", 1)
    needed: Any = Needed()
    streams = LocalStreams(needed, lambda: 0.0)
    observing = telemetry.Telemetry(streams, dict, records=False)
    opened = [await streams.open(name, StreamSettings(("a",))) for name in "st"]
    ref = ref_to(b"the-node", 2, [("x", Field("dense", "int64", ()), 16, 1, 0)])
    for stream in opened:
        stream.run(r.Append(client="c", ref=ref, versions=np.zeros(2, np.int64)))
    taking = asyncio.create_task(observing.snapshot())
    await asyncio.sleep(0)
    await streams.drop(opened[0])
    assert (await taking)["appended"] == 4
    assert (await observing.snapshot())["appended"] == 4
    await streams.drop(opened[1])
    await observing.aclose()

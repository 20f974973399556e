"""Streams of one node."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.node.local.streams import LocalStream
from dataplane.stream import requests as r
from dataplane.stream.settings import StreamSettings


class Needed:
    """Shards that rows need, of which this test looks at none."""

    def released(self, batches: Any, stream: str) -> None:
        pass


async def test_what_fails_for_one_that_waits_is_no_end_of_who_ends_the_wait() -> None:
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

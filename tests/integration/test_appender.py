"""Rows sent one by one and appended in blocks: their order, their keys, their errors, and how many may wait."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.processes import StandingNode, eventually


@pytest.fixture
def plane(node: StandingNode) -> Iterator[dp.Plane]:
    with dp.connect(node.address) as plane:
        yield plane


def row(x: int) -> dict[str, Any]:
    return {"x": np.array([x]), "ids": [list(range(x % 5))], "answer": [f"réponse {x}"]}


def drained(stream: Any, rows: int) -> list[tuple[int, list[int], str]]:
    with stream.consume("t", rows=rows, min_rows=rows, columns=["x", "ids", "answer"], timeout=60) as delivery:
        batch = delivery.get()
        return list(zip(*[batch[name].to_list() for name in ("x", "ids", "answer")], strict=True))


def test_sent_rows_are_appended_in_order_with_their_keys(plane: dp.Plane) -> None:
    stream = plane.stream("s", tasks=["t"])
    with stream.appender(max_rows=7, max_delay=60) as appender:
        sent = [
            appender.send(row(x), group=x // 2, version=x, tags={"odd": bool(x % 2)}, keys=[f"k{x}"]) for x in range(40)
        ]
        assert appender.pending >= 40 % 7
    assert appender.pending == 0
    assert [each.result() for each in sent] == [[f"k{x}"] for x in range(40)]
    with stream.consume("t", rows=40, columns=["x", "ids", "answer"], timeout=0) as delivery:
        assert delivery.keys == [f"k{x}" for x in range(40)]
        assert delivery.groups == [x // 2 for x in range(40)]
        assert delivery.versions == list(range(40))
        assert delivery.tags == {"odd": [bool(x % 2) for x in range(40)]}
        batch = delivery.get()
        assert batch["ids"].to_list() == [list(range(x % 5)) for x in range(40)]
        assert batch["answer"].to_list() == [f"réponse {x}" for x in range(40)]
        del batch
    assert eventually(lambda: plane.stats().shards == 0)


def test_a_sent_row_is_appended_after_the_maximum_delay(plane: dp.Plane) -> None:
    stream = plane.stream("s", tasks=["t"])
    appender = stream.appender(max_rows=1000, max_delay=0.001)
    sent = [appender.send(row(x)) for x in range(3)]  # nobody asks for anything, and they come
    assert [x for x, _, _ in drained(stream, 3)] == [0, 1, 2]
    assert len({key for each in sent for key in each.result()}) == 3
    assert len(appender.append({"x": np.arange(2), "ids": [[1], [2]], "answer": ["", "b"]})) == 2
    appender.close()
    appender.close()
    with pytest.raises(dp.Closed):
        appender.send(row(1))


def test_rows_that_an_appender_accepted_are_appended_when_the_plane_closes(node: StandingNode, plane: dp.Plane) -> None:
    with dp.connect(node.address) as closing:
        appender = closing.stream("s", tasks=["t"]).appender(max_delay=math.inf)
        sent = [appender.send(row(x)) for x in range(3)]
    assert [x for x, _, _ in drained(plane.stream("s"), 3)] == [0, 1, 2]
    assert all(each.done for each in sent)


def test_refused_rows_have_separate_errors_and_the_others_are_appended(plane: dp.Plane) -> None:
    stream = plane.stream("s", tasks=["t"])
    stream.append(row(0), keys=["a"])
    with pytest.raises(dp.Misuse, match="'a'"), stream.appender(max_delay=60) as appender:
        sent = [appender.send(row(x), keys=[key]) for x, key in enumerate("bacba", 1)]
        with pytest.raises(dp.SchemaMismatch):
            appender.send({"x": np.arange(2), "ids": [[1]]})
    assert [each.done for each in sent] == [True] * 5
    assert [sent[0].result(), sent[2].result()] == [["b"], ["c"]]
    for refused in (1, 3, 4):
        with pytest.raises(dp.Misuse):
            sent[refused].result()
    assert [x for x, _, _ in drained(stream, 3)] == [0, 1, 3]


def test_a_full_stream_blocks_the_sending_thread(plane: dp.Plane) -> None:
    stream = plane.stream("s", tasks=["t"], max_rows=4)
    sent: list[int] = []
    with stream.appender(max_rows=1) as appender:

        def send() -> None:
            for x in range(60):
                appender.send(row(x))
                sent.append(x)

        thread = threading.Thread(target=send)
        thread.start()
        assert eventually(lambda: stream.stats()["rows"] == 4 and appender.pending == 8)
        assert eventually(lambda: len(sent) == 4 + 8)
        assert [x for _ in range(15) for x, _, _ in drained(stream, 4)] == list(range(60))
        thread.join()


def test_pending_sends_fail_when_the_stream_closes_or_the_node_dies(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        stream = plane.stream("s", tasks=["t"], max_rows=1)
        appender = stream.appender(max_rows=1)
        sent = [appender.send(row(x)) for x in range(4)]
        assert len(sent[0].result()) == 1
        stream.close()
        for each in sent[1:]:
            with pytest.raises(dp.Closed):
                each.result()
        other = plane.stream("other", tasks=["t"], max_rows=1).appender(max_rows=1)
        sent = [other.send(row(x)) for x in range(4)]
        assert len(sent[0].result()) == 1
        node.kill()
        with pytest.raises((dp.OutcomeUnknown, dp.PeerUnavailable)):  # it was under way, most likely
            sent[1].result()
        for each in sent[2:]:
            with pytest.raises(dp.PeerUnavailable):
                each.result()


def test_a_forked_child_cannot_send(plane: dp.Plane) -> None:
    appender = plane.stream("s", tasks=["t"]).appender()
    appender.append(row(1))
    if (child := os.fork()) == 0:
        try:
            appender.send(row(2))
        except dp.Forked:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


async def test_agents_of_one_loop_share_an_appender(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("s", tasks=["t"])
        async with stream.appender(max_rows=16, max_delay=0.001) as appender:

            async def agent(first: int) -> list[str]:
                return [key for x in range(first, first + 20) for key in await appender.append(row(x))]

            keys = await asyncio.gather(*[agent(20 * n) for n in range(8)])
            sent = await appender.send(row(160))
            cancelled = asyncio.ensure_future(sent.wait())
            await asyncio.sleep(0)
            cancelled.cancel()  # who waits, and not the row
            assert len(await sent) == 1
        async with stream.consume("t", rows=161, min_rows=161, columns=["x"], timeout=60) as delivery:
            assert sorted((await delivery.get())["x"].to_list()) == list(range(161))
            assert set(delivery.keys) >= {key for each in keys for key in each}


async def test_an_appender_continues_after_an_append_that_got_no_thread(
    node: StandingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no thread can be started")

    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("s", tasks=["t"])
        async with stream.appender(max_rows=1, max_delay=60) as appender:
            with monkeypatch.context() as patched:
                patched.setattr(plane.writer._pool, "submit", refuse)
                with pytest.raises(dp.Retryable, match="no thread"):
                    await appender.append({"x": np.zeros((1, 1 << 20))})
            await appender.append({"x": np.zeros((1, 1 << 20))})

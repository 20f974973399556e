"""Rows sent one by one and appended in blocks: their order, their keys, their errors, and how many may wait."""

from __future__ import annotations

import asyncio
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


def test_rows_come_in_the_order_in_which_they_were_sent_each_with_its_own_keys(plane: dp.Plane) -> None:
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


def test_a_row_is_appended_after_its_delay_and_others_with_it(plane: dp.Plane) -> None:
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


def test_rows_that_are_refused_have_their_own_errors_and_the_others_are_in(plane: dp.Plane) -> None:
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


def test_what_was_sent_may_be_changed_and_kinds_may_follow_each_other(plane: dp.Plane) -> None:
    stream = plane.stream("s", tasks=["t"])
    kinds: list[Any] = [np.zeros(1), [[1, 2]], [[0.5]], [[2**63]], [np.zeros(3)], ["a"], [b"b"], [{"k": 1}], [None]]
    with stream.appender(max_delay=60) as appender:
        for n, kind in enumerate(kinds):
            for values in (kind, kind):
                appender.send({f"c{n}": values})
                if isinstance(values[0], np.ndarray | float):
                    values[0] += 1
                elif isinstance(values[0], list):
                    del values[0][1:]
    expected = {0: [0, 1], 1: [[1, 2], [1]], 4: [[0, 0, 0], [1, 1, 1]]}
    for n, kind in enumerate(kinds):
        with stream.consume("t", rows=2, min_rows=2, columns=[f"c{n}"], timeout=0) as delivery:
            assert delivery.get()[f"c{n}"].to_list() == expected.get(n, [kind[0], kind[0]])


def test_a_stream_that_is_full_holds_who_sends(plane: dp.Plane) -> None:
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
        assert len(sent) == 4 + 8
        assert [x for _ in range(15) for x, _, _ in drained(stream, 4)] == list(range(60))
        thread.join()


def test_what_was_sent_when_the_stream_or_the_node_goes_fails(node: StandingNode) -> None:
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
        for each in sent[1:]:
            with pytest.raises(dp.PeerUnavailable):
                each.result()


def test_threads_share_an_appender(plane: dp.Plane) -> None:
    stream = plane.stream("s", tasks=["t"])
    keys: list[str] = []
    with stream.appender(max_rows=16, max_delay=0.001) as appender:
        work = lambda first: keys.extend(  # noqa: E731
            key for x in range(first, first + 50) for key in appender.append(row(x))
        )
        threads = [threading.Thread(target=work, args=(50 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(set(keys)) == 200
    assert sorted(x for x, _, _ in drained(stream, 200)) == list(range(200))


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


async def test_appends_that_are_under_way_go_together_and_one_that_is_cancelled_does_not(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane:
        stream = await plane.stream("s", tasks=["t"], max_rows=4)
        first = [asyncio.ensure_future(stream.append(row(x))) for x in range(4)]
        assert len({key for keys in await asyncio.gather(*first) for key in keys}) == 4
        waiting = [asyncio.ensure_future(stream.append(row(x), group=f"g{x}", version=x)) for x in range(4, 12)]
        while (await stream.stats())["waiting"] == 0:
            await asyncio.sleep(0)
        for x in (4, 6, 11):
            waiting[x - 4].cancel()
        assert isinstance((await asyncio.gather(waiting[0], return_exceptions=True))[0], asyncio.CancelledError)
        came: list[tuple[int, int, Any]] = []
        while len(came) < 9:
            async with stream.consume("t", rows=4, columns=["x"], timeout=60) as delivery:
                found = (await delivery.get())["x"].to_list()
                came += list(zip(found, delivery.versions, delivery.groups, strict=True))
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in ended] == [x in (4, 6, 11) for x in range(4, 12)]
        assert sorted(came) == sorted([(x, 0, None) for x in range(4)] + [(x, x, f"g{x}") for x in (5, 7, 8, 9, 10)])
        assert (await stream.stats())["rows"] == 0

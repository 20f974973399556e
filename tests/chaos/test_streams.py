"""Streams under faults: whoever dies, stops, lies or never comes harms himself alone, and nothing of his is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import dataplane as dp
from dataplane.batch.locations import ref_to
from dataplane.stream import requests as r
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from tests.cases import each_case
from tests.chaos.history import Event, History
from tests.chaos.kills import TASKS, run
from tests.chaos.raw import Raw, int64s, token
from tests.processes import MIB, StandingNode, Worker, eventually, pattern
from tests.streams import take, values

NODE = {"spill": 0}


def consumer(pipe: Any, address: str, lease: float) -> None:
    """Holds rows, and acks them when it is told to."""
    stream = dp.connect(address).stream("s")
    delivery = stream.consume("a", rows=3, columns=["x"], lease=lease)
    pipe.send(values(delivery))
    pipe.recv()
    try:
        delivery.ack()
    except dp.DataplaneError as error:
        pipe.send(type(error).__name__)
    else:
        pipe.send("acked")


def test_rows_of_a_killed_consumer_are_redelivered_at_once(node: StandingNode) -> None:
    with dp.connect(node.address) as plane, Worker(consumer, node.address, 3600.0) as worker:
        stream = plane.stream("s", ["a"])
        stream.append({"x": range(5)})
        assert worker.hear() == [0, 1, 2]
        assert take(stream) == [3, 4]
        with pytest.raises(dp.NotReady):
            take(stream)
        worker.kill()
        assert take(stream, timeout=60) == [0, 1, 2]
        assert plane.stats().memory_used == 0


def producer(pipe: Any, address: str, step: str) -> None:
    """Appends and extends; stops at `step`, to be killed there."""
    plane = dp.connect(address)
    stream = plane.stream("s")
    original = stream._inner._connection.request

    async def request(what: Any, *args: Any) -> Any:
        if isinstance(what, {"append": rm.AppendRows, "extend": rm.ExtendRows}[step]):
            pipe.send("there")
            pipe.recv()
        return await original(what, *args)

    stream._inner._connection.request = request
    keys = stream.append({"x": np.arange(4), "big": pattern(1, MIB, 4)})
    stream.extend(keys, {"score": pattern(2, MIB, 4)})


def hands_over(pipe: Any, address: str) -> None:
    """Puts, and appends by reference what it put; stops where there is leave to append, to be killed there. Until then
    it does what it is told: `True`, give up waiting."""
    plane = dp.connect(address)
    stream = plane.stream("s")
    ref, kept = plane.put({"x": np.arange(4), "big": pattern(1, MIB, 4)}), plane.put({"x": [7]})
    scoped = plane.put({"x": [8]}, scope="mine")
    original = stream._inner._connection.request

    async def request(what: Any, *args: Any) -> Any:
        if isinstance(what, rm.AppendRows):
            pipe.send("admitted")
            pipe.recv()
        return await original(what, *args)

    stream._inner._connection.request = request
    pipe.send((ref, kept, scoped))
    while pipe.recv():
        try:
            stream.append(ref, timeout=0.05)
        except dp.Backpressure:
            pipe.send("full")
    stream.append(ref, timeout=60)


@pytest.mark.long
@pytest.mark.parametrize("step", ["waiting", "admitted"])
def test_columns_of_a_pending_append_are_freed_with_their_killed_producer(node: StandingNode, step: str) -> None:
    with dp.connect(node.address) as plane, Worker(hands_over, node.address) as worker:
        stream = plane.stream("s", ["a"], max_rows=4)
        stream.append({"x": range(3)})
        ref, kept, scoped = worker.hear()
        for _ in range(2):
            assert worker.ask(True) == "full"
            assert len(plane.get(ref)) == 4
        worker.say(False)
        eventually(lambda: stream.stats()["waiting"] == 1, "it waits")
        if step == "admitted":
            assert take(stream) == [0, 1, 2]
            assert worker.hear() == "admitted"
        worker.kill()
        eventually(lambda: plane.stats().memory_used < MIB, "it is freed")
        with pytest.raises(dp.Freed):
            plane.get(ref)
        assert plane.get(kept)["x"].to_list() == [7]
        assert plane.get(scoped)["x"].to_list() == [8]
        if step == "waiting":
            assert take(stream) == [0, 1, 2]
        stream.append({"x": range(4)}, timeout=60)  # its place is free


@pytest.mark.parametrize("step", ["append", "extend"])
def test_staged_columns_of_a_killed_producer_are_freed(node: StandingNode, step: str) -> None:
    with dp.connect(node.address) as plane, Worker(producer, node.address, step) as worker:
        stream = plane.stream("s", ["a"], max_rows=4)
        assert worker.hear() == "there"
        assert plane.stats().memory_used > 0
        worker.kill()
        appended = step == "extend"
        eventually(lambda: plane.stats().shards == 2 * appended, "what was staged is freed")
        eventually(lambda: plane.stats().memory_used < 1.1 * MIB * appended + 1, "its memory too")
        assert stream.stats()["rows"] == 4 * appended
        with pytest.raises(dp.NotReady):
            stream.consume("a", rows=4, columns=["x", "score"], timeout=0)
        if appended:
            stream.extend([f"~{stream._inner._mark}.2"], {"score": [1]})
            with stream.consume("a", rows=4, columns=["x", "score"], timeout=0) as delivery:
                assert values(delivery) == [2]
            assert take(stream) == [0, 1, 3]
        stream.append({"x": range(4)}, timeout=60)  # its place is free
        stream.drop()
        assert plane.stats().memory_used == 0


@pytest.mark.long
def test_a_task_that_never_consumes_is_named(node: StandingNode) -> None:
    with dp.connect(node.address) as plane:
        stream = plane.stream("s", ["a", "idle"], max_rows=4)
        stream.append({"x": range(4)})
        assert take(stream, "a") == [0, 1, 2, 3]
        with pytest.raises(dp.Backpressure, match="idle") as full:
            stream.append({"x": [4]}, timeout=0.05)
        (holder,) = full.value.holders
        assert "'idle'" in holder["holder"]
        assert stream.stats()["behind"] == ["idle"]
        lag = plane.stream("lag", ["a", "idle"], max_lag=1)
        lag.append({"x": [0]}, version=1)
        take(lag, "a")
        lag.append({"x": [1]}, version=2)
        with pytest.raises(dp.Backpressure, match=r"max_lag.*idle"):
            lag.append({"x": [2]}, version=3, timeout=0.05)


def consume(raw: Raw, stream: Any, /, **how: Any) -> rm.AskStream:
    asked: dict[str, Any] = {"task": "a", "rows": 10, "columns": ("x",)}
    return rm.AskStream(raw.next(), token(stream), r.Consume(**(asked | how)), 60.0)


def admitted(raw: Raw, stream: Any, rows: int = 1, nbytes: int = 8) -> int:
    reply = raw.ask(rm.AdmitRows(raw.next(), token(stream), rows, nbytes, 0, "", b"", 5.0))
    assert isinstance(reply, rm.RowsAdmitted), reply
    return reply.ticket


def append(raw: Raw, stream: Any, ticket: int, ref: dp.BatchRef, /, **how: Any) -> rm.AppendRows:
    said: dict[str, Any] = {
        "id": raw.next(),
        "stream": token(stream),
        "ticket": ticket,
        "staged": "",
        "ref": ref.encode(),
        "keys": [],
        "digest": b"",
        "groups": [],
        "versions": bytes(8 * len(ref)) if len(ref) < 1000 else b"",
        "tags": {},
        "begin": None,
        "lengths": {},
    }
    return rm.AppendRows(**(said | how))


@pytest.fixture
def lied_to(node: StandingNode) -> Iterator[tuple[StandingNode, dp.Plane, dp.Stream]]:
    """A node and a stream of somebody who is honest, with rows; it works afterwards as it should."""
    with dp.connect(node.address) as plane:
        stream = plane.stream("s", ["a", "b"], max_rows=1000)  # so that permits count
        stream.append({"x": range(4)}, keys=list("pqrs"))
        held = stream.consume("a", rows=2, columns=["x"])
        yield node, plane, stream
        assert values(held) == [0, 1]
        held.ack()
        assert take(stream, "a") == [2, 3]
        assert take(stream, "b") == [0, 1, 2, 3]
        stream.append({"x": [4]}, timeout=0)
        assert take(stream, "a") == take(stream, "b") == [4]
        stats = stream.stats()
        assert (stats["rows"], stats["bytes"], stats["task"]["a"]["left"]) == (0, 0, 0)
        stream.close()
        for task in ("a", "b"):
            with pytest.raises(dp.Closed):
                take(stream, task, timeout=5)


FALSE_APPENDS: dict[str, dict[str, Any]] = {
    "too few versions": {"versions": b""},
    "versions that are none": {"versions": b"abc"},
    "too many versions": {"versions": int64s(1, 2)},
    "too many keys": {"keys": ["v", "w"]},
    "too many groups": {"groups": [1, 2]},
    "a tag of no rows": {"tags": {"t": []}},
    "a tag of many": {"tags": {"t": [1, 2, 3]}},
    "very many tags": {"tags": {f"{i}": [1] for i in range(5000)}},
    "lengths of no rows": {"lengths": {"x": b""}},
    "lengths of no column": {"lengths": {f"{i}": int64s(1) for i in range(5000)}},
    "lengths below zero": {"lengths": {"x": int64s(-1)}},
    "lengths beyond measure": {"lengths": {"x": int64s(2**62)}},
    "no reference": {"ref": b"\x90"},
    "another's ticket": {"ticket": 12345},
    "no ticket": {"ticket": -1},
    "no stream": {"stream": b"12345678"},
    "another's scope": {"staged": "\0abc", "ticket": 0},
}


@each_case("what", FALSE_APPENDS)
def test_invalid_append_requests_are_refused(lied_to: tuple[StandingNode, dp.Plane, dp.Stream], what: str) -> None:
    node, plane, stream = lied_to
    with Raw(node.address) as raw:
        ref = plane.put({"x": [9]})
        ticket = admitted(raw, stream)
        reply = raw.ask(append(raw, stream, ticket, ref, **FALSE_APPENDS[what]))
        assert isinstance(reply, m.Failure)
    assert plane.get(ref)["x"].to_list() == [9]
    plane.free(ref)


@pytest.mark.long
def test_appends_and_extends_with_invalid_references_are_refused(
    lied_to: tuple[StandingNode, dp.Plane, dp.Stream],
) -> None:
    node, plane, stream = lied_to
    field = plane.put({"x": [1]}).schema["x"]
    there = plane.put({"x": np.arange(6)})
    ((own, number),) = there.shards()
    refs = {
        "more rows than admitted": there,
        "no rows": there[:0],
        "rows beyond the shard": ref_to(own, 1 << 40, [("x", field, 8, number, 0)])[1 << 39 :][:1],
        "a column beyond": ref_to(own, 6, [("x", field, 8, number, 7)])[:1],
        "very many rows": ref_to(own, 1 << 40, [("x", field, 8, number, 0)]),
        "many bytes": ref_to(own, 1, [(f"{i}", field, (1 << 62) - 1, number, 0) for i in range(8)]),
        "no shard": ref_to(own, 1, [("x", field, 8, 999_999, 0)]),
        "another node's": ref_to(b"elsewher", 1, [("x", field, 8, number, 0)]),
    }
    with Raw(node.address) as raw:
        for what, ref in refs.items():
            said: dict[str, Any] = {"versions": b"" if len(ref) > 1000 else bytes(8 * len(ref))}
            with Raw(node.address) as liar:
                reply = liar.ask(append(liar, stream, admitted(liar, stream), ref, **said))
                assert isinstance(reply, m.Failure), what
            if len(ref) == 1:
                reply = raw.ask(
                    rm.ExtendRows(
                        raw.next(),
                        token(stream),
                        int64s(2),
                        b"",
                        [],
                        {},
                        False,
                        ref=ref.rename({ref.columns[0]: "y"}).encode(),
                    )
                )
                assert isinstance(reply, m.Failure), what
            assert stream.stats()["rows"] == 4
    assert plane.get(there)["x"].to_list() == list(range(6))


def test_requests_with_invalid_rows_and_grants_are_refused(lied_to: tuple[StandingNode, dp.Plane, dp.Stream]) -> None:
    node, plane, stream = lied_to
    ref = plane.put({"y": [1]})
    with Raw(node.address) as raw:
        there = token(stream)
        for rows in (int64s(4), int64s(-1), int64s(2**62), int64s(-(2**63))):
            for message in (
                rm.AskStream(raw.next(), there, r.Drop(rows=np.frombuffer(rows, np.int64))),
                rm.ExtendRows(raw.next(), there, rows, b"", [], {}, True, ref=ref.encode()),
            ):
                assert raw.ask(message).name == "Misuse"
        for number in (0, 1, 2, -1, 2**62):  # one of them is another's
            for asked in (r.Ack(grant=number), r.Nack(grant=number, replica=0), r.Renew(grant=number)):
                for client in ("", "1", "2"):  # nobody is who he says he is
                    said = msgspec.structs.replace(asked, client=client, sequence=number)
                    assert raw.ask(rm.AskStream(raw.next(), there, said)).name == "LeaseExpired"
        raw.send(rm.ReturnPermit(there, 1), rm.ReturnPermit(there, -5))
        for message in (
            rm.AskStream(raw.next(), there, r.ListDeadLetters(task="nobody", most=10)),
            consume(raw, stream, task="nobody"),
            consume(raw, stream, rows=0, min_rows=0),
            consume(raw, stream, lease_s=float("nan")),
            consume(raw, stream, columns=()),
            consume(raw, stream, replica=1, member=""),
        ):
            assert raw.ask(message).name == "Misuse"
        for message in (
            consume(raw, stream, rows=1 << 40),
            rm.AdmitRows(raw.next(), there, 1 << 40, 0, 0, "", b"", 1.0),
        ):
            assert raw.ask(message).name == "LimitExceeded"
        for message in (rm.DropStream(raw.next(), b""), rm.AskStream(raw.next(), b"x" * 9, r.Ack(grant=1))):
            assert raw.ask(message).name == "Closed"
        # Rows chosen twice, held by others, or not there: only those that can be had, each once.
        chosen, expired = np.array([2, 2, 0, 99, -7, 3, 2**62]), np.array([99, 99, 0])
        given = raw.ask(consume(raw, stream, sampler=None, chosen=chosen, expired=expired)).result
        assert given.keys == ["r", "s"]
        assert raw.ask(rm.AskStream(raw.next(), there, r.Nack(grant=given.grant))).result == r.Succeeded()
    plane.free(ref)


# Kills under load on one host (`tests.chaos.kills`): no row is lost or doubled, and nothing is left.


@pytest.mark.long
@each_case("seed", [1])
def test_forty_kills_under_load_neither_lose_nor_duplicate_rows(seed: int, tmp_path: Path) -> None:
    found = run(seed, 40, tmp_path)
    assert found.broken == []
    assert found.kills == 40
    assert found.appended > 100, "they were under load"
    assert found.spilled, "and so was the disk"


def test_each_rule_of_a_history_detects_its_violation() -> None:
    def broken(*events: tuple[str, list[int], str, float]) -> list[str]:
        history = History(TASKS, [Event("append", (1, 2), "", 0.0, 1.0)])
        for what, rows, task, began in events:
            history.events.append(Event(what, tuple(rows), task, began, began + 1.0))
        return [each.splitlines()[0] for each in history.broken()]

    fine = [("ack", [1, 2], task, 0.0) for task in TASKS]
    assert broken(*fine) == []
    assert broken(*fine[1:]) == ["2 rows were never acked by 'reward': [1, 2]"]
    assert broken(*fine, ("ack", [2], "actor", 0.0)) == ["1 rows were acked twice by 'actor': [2]"]
    assert broken(*fine, ("deliver", [1], "actor", 0.0)) == []
    again = ["1 rows were delivered again to 'actor' after it had acked them: [1]"]
    assert broken(*fine, ("deliver", [1], "actor", 60.0)) == again

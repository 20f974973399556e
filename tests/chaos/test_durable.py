"""A node whose durable stream is under load is killed at random: nothing answered is lost, nothing acked comes again.

`KILLS=100 pytest tests/chaos/test_durable.py` kills more often.
"""

from __future__ import annotations

import os
import random
import resource
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import dataplane as dp
from tests.mounts import mounted
from tests.processes import WAIT_S, Command, StandingNode, eventually

KILLS = int(os.environ.get("KILLS", "3"))
MIB = 1 << 20
PRODUCERS, CONSUMERS = 2, 2
AHEAD = 400  # rows that may be there and not acked
SIZES = (300, 5_000, 40_000, MIB)


@dataclass
class History:
    """What clients were told in all lives, and what of it did not hold. Rows are called by keys of their producers, and
    have the hash of their bytes in them."""

    answered: set[str] = field(default_factory=set)
    acked: set[str] = field(default_factory=set)
    acking: set[str] = field(default_factory=set)
    """Rows whose ack was asked for, and is perhaps not answered."""
    seen: set[str] = field(default_factory=set)
    asked: dict[str, tuple[list[str], list[bytes]]] = field(default_factory=dict)
    """By producer, what it appends until that is answered."""
    broken: list[str] = field(default_factory=list)
    lives: int = 0
    due: int = 0
    busy: threading.Event = field(default_factory=threading.Event)
    """Set once so many rows as are `due` were acked."""

    def produced(self, name: str, number: int, draw: random.Random) -> None:
        rows = [draw.randbytes(draw.choice(SIZES)) for _ in range(draw.randint(1, 3))]
        keys = [f"{name}.{number}.{at}:{xxhash.xxh3_64_hexdigest(row)}" for at, row in enumerate(rows)]
        self.asked[name] = keys, rows

    def leased(self, keys: list[str], rows: list[bytes]) -> None:
        self.seen |= set(keys)
        again = self.acked & set(keys)
        self.holds(not again, f"rows came again after their ack: {again}")
        wrong = [key for key, row in zip(keys, rows, strict=True) if not key.endswith(xxhash.xxh3_64_hexdigest(row))]
        self.holds(not wrong, f"rows have other bytes than were put: {wrong}")

    def holds(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)


def node(path: Path, data: Path | None = None) -> Command:
    where = ["--data-dir", data or path / "data", "--memory", "32MiB", "--socket", path / "s"]
    return Command("node", *where, "--spill", "0", "--prewarm", "0")


def produce(plane: dp.Plane, history: History, name: str, draw: random.Random) -> None:
    stream = plane.stream("rows", ["train"], max_rows=AHEAD, durable=True)
    number = history.lives << 20
    while True:
        if name not in history.asked:
            number += 1
            history.produced(name, number, draw)
        keys, rows = history.asked[name]
        if not history.seen.isdisjoint(keys):  # in an earlier life; a key is remembered for as long as its row is there
            history.answered |= set(keys)
            del history.asked[name]
            continue
        with suppress(dp.Backpressure):
            stream.append({"x": rows}, keys=keys, timeout=60)
            history.answered |= set(keys)
            del history.asked[name]


def consume(plane: dp.Plane, history: History, draw: random.Random) -> None:
    stream = plane.stream("rows", ["train"], max_rows=AHEAD, durable=True)
    while True:
        with suppress(dp.NotReady):
            delivery = stream.consume("train", rows=draw.randint(1, 8), columns=["x"], min_rows=1, timeout=1.0)
            history.leased(list(delivery.keys), [bytes(row) for row in delivery.get()["x"]])
            history.acking |= set(delivery.keys)
            delivery.ack()
            history.acked |= set(delivery.keys)
            if len(history.acked) >= history.due:
                history.busy.set()


def until_gone(work: Callable[[dp.Plane], None], address: str) -> None:
    """Work until the node has died."""
    with suppress(dp.PeerUnavailable, dp.OutcomeUnknown, dp.NotReady), dp.connect(address) as plane:
        work(plane)


def live(
    path: Path, works: list[Callable[[dp.Plane], None]], worked: threading.Event, seconds: float, *, starting: bool
) -> bool:
    """One life, killed so long after it was started, or after it has done some work; whether it had started."""
    worked.clear()
    with node(path) as process:
        killing = threading.Timer(seconds, process.kill)
        if starting:
            killing.start()
        started = bool(process.stdout.readline())
        if started:
            threads = [threading.Thread(target=until_gone, args=(work, f"unix://{path / 's'}")) for work in works]
            for thread in threads:
                thread.start()
            if not starting and worked.wait(WAIT_S):
                killing.start()
            for thread in threads:
                thread.join()
        killing.cancel()
        if killing.ident is not None:
            killing.join()
        process.kill()
    return started


@contextmanager
def living(path: Path) -> Iterator[tuple[Command, dp.Plane]]:
    """A node and a client of it, until the node is killed."""
    with node(path) as process:
        try:
            assert process.stdout.readline(), "it starts"
            with dp.connect(f"unix://{path / 's'}") as plane:
                yield process, plane
        finally:
            process.kill()


def drained(path: Path, history: History) -> set[str]:
    """All rows that are left, in a last life."""
    left: set[str] = set()
    with living(path) as (_, plane):
        stream = plane.stream("rows", ["train"], max_rows=AHEAD, durable=True)
        stream.close()
        with suppress(dp.Closed):
            while True:
                delivery = stream.consume("train", rows=64, columns=["x"], min_rows=1, timeout=60)
                history.leased(list(delivery.keys), [bytes(row) for row in delivery.get()["x"]])
                history.holds(left.isdisjoint(delivery.keys), "a row is there twice")
                left |= set(delivery.keys)
                delivery.ack()
        assert stream.lost() == []
    return left


@pytest.mark.long
def test_a_loader_resumes_after_a_kill_of_all_processes(tmp_path: Path) -> None:
    pytest.importorskip("torch")

    def loader(plane: dp.Plane) -> dp.Loader:
        stream = plane.stream("rows", ["train"], durable=True)
        return dp.loader(stream, "train", rows=2, columns=["id"], timeout=30.0)

    state: dict[str, Any] = {}
    for life in range(3):
        with living(tmp_path) as (process, plane):
            if not life:
                stream = plane.stream("rows", ["train"], durable=True)
                for version in range(6):
                    stream.append({"id": [2 * version, 2 * version + 1]}, version=version)
            batches = loader(plane)
            if state:
                batches.load_state_dict(state)
            step = iter(batches)
            assert next(step)["id"].tolist() == [4 * life, 4 * life + 1]
            assert next(step)["id"].tolist() == [4 * life + 2, 4 * life + 3]
            batches.ack()
            state = batches.state_dict()
            assert (state["steps"], state["rows"], state["version"]) == (2 * life + 2, 4 * life + 4, 2 * life + 1)
            process.kill()
            step.close()  # type: ignore[attr-defined]


@pytest.mark.timeout(max(180, 20 * KILLS))
def test_durable_streams_survive_random_kills_under_load(tmp_path: Path) -> None:
    draw, history = random.Random(), History()
    for number in range(KILLS):
        starting = number % 5 == 3
        history.due = len(history.acked) + draw.randint(4, 40)
        works = [partial(produce, history=history, name=f"p{n}", draw=draw) for n in range(PRODUCERS)]
        works += [partial(consume, history=history, draw=draw) for _ in range(CONSUMERS)]
        seconds = draw.uniform(0.0, 3.0 if starting else 0.2)
        history.lives += live(tmp_path, works, history.busy, seconds, starting=starting)
        assert history.broken == []
    left = drained(tmp_path, history)
    assert history.broken == []
    lost = history.answered - history.acking - left
    assert not lost, f"answered rows are lost: {lost}"
    assert history.lives > KILLS / 2
    assert len(history.answered) > 3 * KILLS, "it was under load"
    assert len(history.acked) > KILLS
    print(f"{KILLS} kills: {len(history.answered)} rows answered, {len(history.acked)} acked")  # noqa: T201


def test_a_durable_stream_that_filled_its_disk_goes_on_by_acks(tmp_path: Path) -> None:
    appended = 0
    with mounted(tmp_path / "disk", "-o", "size=12m") as disk:
        with StandingNode(tmp_path, data_dir=disk / "data") as running, dp.connect(running.address) as plane:
            stream = plane.stream("s", tasks=["t"], durable=True)
            with pytest.raises(dp.Backpressure, match="No space left"):
                while True:
                    appended += len(stream.append({"x": np.zeros((20, 16))}, timeout=0.5))
            for _ in range(5):
                with stream.consume("t", rows=2000, columns=["x"]):
                    pass
            running.kill()
        with StandingNode(tmp_path, data_dir=disk / "data") as running, dp.connect(running.address) as plane:
            stream = plane.stream("s")
            assert stream.stats()["rows"] == appended - 10_000
            stream.append({"x": np.zeros((20, 16))}, timeout=WAIT_S)


def test_calls_on_a_stream_whose_disk_has_failed_raise_its_error(tmp_path: Path) -> None:
    """Also a consumer that waits, and all calls after the disk works again: nobody knows what is on it."""
    with living(tmp_path) as (process, plane), ThreadPoolExecutor(1) as pool:
        stream = plane.stream("s", ["t"], durable=True)
        stream.append({"x": [1, 2]}, keys=["a", "b"])
        delivery = stream.consume("t", rows=1, columns=["x"])
        waiting = pool.submit(stream.consume, "t", rows=2, min_rows=2, columns=["x"], timeout=WAIT_S)
        eventually(lambda: stream.stats()["task"]["t"]["waiting"], "it waits")
        limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(dp.OutcomeUnknown, match="start the node again"):
            delivery.ack()
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
        with pytest.raises(dp.OutcomeUnknown, match="start the node again"):
            waiting.result()
        for call in (stream.stats, delivery.ack, lambda: stream.append({"x": [3]})):
            with pytest.raises(dp.DirectoryUnusable, match="start the node again"):
                call()
    with living(tmp_path) as (_, plane):
        assert plane.stream("s").stats()["rows"] in (1, 2)


def test_streams_and_tables_that_are_not_durable_end_with_the_process(tmp_path: Path) -> None:
    with living(tmp_path) as (_, plane):
        plane.stream("kept", ["train"], durable=True).append({"x": np.array([1])})
        plane.stream("rows", ["train"]).append({"x": [2]})
        plane.table("kept-table", durable=True).upsert(["a"], {"x": np.array([3])})
        plane.table("table").upsert(["a"], {"x": [4]})
        with pytest.raises(dp.Misuse, match="durable=False"):
            plane.stream("rows", ["train"], durable=True)
        with pytest.raises(dp.Misuse, match="not to be durable"):
            plane.table("table", durable=True).upsert(["b"], {"x": [5]})
        dropped = plane.stream("dropped", ["train"], durable=True)
        dropped.append({"x": [6]})
        dropped.drop()
    with living(tmp_path) as (_, plane):
        for name in ("rows", "dropped"):
            with pytest.raises(dp.Misuse, match="there is no stream"):
                plane.stream(name)
        assert plane.stream("kept").consume("train", rows=1, columns=["x"]).get()["x"].numpy().tolist() == [1]
        assert plane.get(plane.table("kept-table").read(["a"]))["x"].numpy().tolist() == [3]
        plane.table("table", durable=True).upsert(["a"], {"x": [7]})
        assert plane.stream("rows", ["train"], durable=True).stats()["rows"] == 0


# A node whose durable table is under load is killed at random: what was answered is as it was answered.
#
# `KILLS=100 pytest tests/chaos/test_durable.py` kills more often.

WRITERS, TAKERS = 2, 2
NAMES = 40  # of rows that a writer writes again and again
TASK = "train"


@dataclass
class Writer:
    """What one writer was answered: the digest of each of its rows. What was not answered is asked again as it was."""

    name: str
    draw: random.Random
    worked: threading.Event
    there: dict[str, str] = field(default_factory=dict)
    asked: tuple[list[str], list[bytes] | None] | None = None
    answered: int = 0

    def next(self) -> tuple[list[str], list[bytes] | None]:
        """Rows to be written or, without values, cleared."""
        if self.draw.random() < 0.2 and self.there:
            return self.draw.sample(sorted(self.there), min(3, len(self.there))), None
        names = self.draw.sample(range(NAMES), self.draw.randint(1, 4))
        return [f"{self.name}.{name}" for name in names], [self.draw.randbytes(self.draw.choice(SIZES)) for _ in names]

    def work(self, plane: dp.Plane) -> None:
        table = plane.table("rows", durable=True)
        while True:
            self.asked = self.asked or self.next()
            keys, rows = self.asked
            if rows is None:
                table.clear(keys)
                for key in keys:
                    self.there.pop(key, None)
            else:
                tags = [{"sum": xxhash.xxh3_64_hexdigest(row)} for row in rows]
                table.upsert(keys, {"x": rows}, tags=tags)
                self.there.update({key: tag["sum"] for key, tag in zip(keys, tags, strict=True)})
            self.answered += 1
            self.asked = None
            self.worked.set()


@dataclass
class Taker:
    """What one taker was given, by claim; and it makes the rows that it takes. Those of its last claim may be taken
    without an answer."""

    name: str
    draw: random.Random
    given: dict[str, list[int]] = field(default_factory=dict)

    def work(self, plane: dp.Plane) -> None:
        table = plane.table("taken", durable=True)
        while True:
            number = len(self.given)
            table.upsert([f"{self.name}.{number}.{at}" for at in range(3)], tags=[{"at": at} for at in range(3)])
            claim = f"{self.name}.{number}"
            ready = table.ready([], task=TASK, claim_id=claim, timeout=1.0)
            taken = table.claim(TASK, ready[: self.draw.randint(1, 3)], claim_id=claim)
            if taken is not None:
                self.given[claim] = taken.tolist()


def check(path: Path, writers: list[Writer], takers: list[Taker]) -> None:
    """In a last life: rows, their columns and tags, what was taken, and under which claim."""
    with living(path) as (_, plane):
        table = plane.table("rows")
        seen = table.look(columns=["x"])
        tags = dict(zip(seen.keys, seen.tags, strict=True))
        for writer in writers:
            unsettled = set(writer.asked[0]) if writer.asked else set()
            found = {key for key in seen.keys if key.startswith(f"{writer.name}.")}
            assert found - unsettled == writer.there.keys() - unsettled
            for key in sorted(found):
                (row,) = plane.get(table.read([key], ["x"]))["x"]
                assert tags[key]["sum"] == xxhash.xxh3_64_hexdigest(row), key
                if key not in unsettled:
                    assert tags[key]["sum"] == writer.there[key], key
        taken, given = plane.table("taken"), [rows for taker in takers for rows in taker.given.values()]
        numbers = [number for rows in given for number in rows]
        assert len(set(numbers)) == len(numbers), "a row was given twice"
        assert taken.claimed(TASK, sorted(numbers)).all()
        for taker in takers:
            for claim, rows in taker.given.items():
                found_rows = taken.find_claim(TASK, claim)
                assert found_rows is not None, claim
                assert found_rows.tolist() == rows


@pytest.mark.timeout(max(180, 20 * KILLS))
def test_durable_tables_survive_random_kills_under_load(tmp_path: Path) -> None:
    draw, worked = random.Random(), threading.Event()
    writers = [Writer(f"w{n}", random.Random(draw.random()), worked) for n in range(WRITERS)]
    takers = [Taker(f"t{n}", random.Random(draw.random())) for n in range(TAKERS)]
    works = [each.work for each in (*writers, *takers)]
    lives = 0
    for number in range(KILLS):
        starting = number % 5 == 3
        lives += live(tmp_path, works, worked, draw.uniform(0.0, 3.0 if starting else 1.5), starting=starting)
    check(tmp_path, writers, takers)
    assert lives > KILLS / 2
    answered = sum(writer.answered for writer in writers), sum(len(taker.given) for taker in takers)
    assert answered[0] > KILLS / 2, "it was under load"
    print(f"{KILLS} kills: {answered[0]} writes and {answered[1]} claims answered")  # noqa: T201

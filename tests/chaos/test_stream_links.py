"""Streams over hosts whose links fail: they are led on where the coordinator is, the other side is told so, and when
the link is back nothing is lost, and each row is delivered once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from tests.cases import each_case
from tests.chaos.test_links import known
from tests.integration.test_hosts import leader
from tests.integration.test_stream_hosts import drained, ids, nothing_kept
from tests.netns import Host, hosts, needs_namespaces
from tests.processes import eventually

pytestmark = [needs_namespaces, pytest.mark.long]

GROUPS = [f"prompt-{i}" for i in range(24)]
KEYS = [f"row-{i}" for i in range(12)]


@contextmanager
def streams(count: int, directory: Path) -> Iterator[tuple[list[Host], list[Any], list[Any]]]:
    """Hosts, of which the last leads the stream "rollouts", a plane on each, and the stream on each."""
    with hosts(count, directory) as made, ExitStack() as undo:
        planes = [undo.enter_context(dp.connect(host.address)) for host in made]
        eventually(lambda: all(known(plane) == count for plane in planes), "they know each other")
        eventually(lambda: all(host.coordinated() for host in made), "the coordinator answers all", 40)
        last = leader(planes, "rollouts")
        made.append(made.pop(last))
        planes.append(planes.pop(last))
        yield made, planes, [plane.stream("rollouts", tasks=["actor"]) for plane in planes]


def followed(planes: list[Any], streams: int) -> None:
    """Wait until so many streams are led by one host and followed by another."""

    def roles() -> bool:
        seen = [each for plane in planes for each in plane.members()["members"].values()]
        led = {key for each in seen for key in each["leads"]}
        return len(led) == streams and led <= {key for each in seen for key in each["follows"]}

    eventually(roles, "all are led and followed")


def numbers(delivery: Any) -> list[int]:
    return sorted(int(i) for i in delivery.get()["id"].to_list())


def taken(stream: Any, rows: int, lease: float) -> Any:
    """So many rows, held."""
    return stream.consume("actor", rows=rows, min_rows=rows, columns=["id"], timeout=20, lease=lease).__enter__()


def made_again(stream: Any) -> None:
    """Append the twelve rows that may have been appended, until that is answered."""
    while True:
        try:
            stream.append(ids(12, 100), group=GROUPS[:12], keys=KEYS, timeout=10)
            return
        except (dp.Retryable, dp.OutcomeUnknown):
            pass


def read_again(plane: Any, ref: Any) -> Any:
    """The ids, once the connection to who stores them has come to life again."""
    until = time.monotonic() + 20
    while True:
        try:
            return plane.get(ref)["id"].to_list()
        except dp.PeerUnavailable:
            if time.monotonic() > until:
                raise


@each_case("how", ["cut", "one way"])
def test_a_link_that_fails_and_heals(tmp_path: Path, how: str) -> None:
    """The host leads two streams, and has columns of rows, a client that holds rows, and one that appends. Others lead,
    also if it is heard and hears nothing."""
    cut = how == "cut"
    with streams(3, tmp_path) as ((one, two, far), planes, (here, also, there)), ThreadPoolExecutor(1) as pool:
        here.append(ids(24), group=GROUPS)
        held = taken(there, 24, 2.0)
        assert numbers(held) == list(range(24))
        name = next(name for name in KEYS if leader(planes, name) == 2)
        kept = [plane.stream(name, tasks=["actor"]) for plane in planes]
        kept[2].append(ids(24), group=GROUPS)
        ref = planes[2].put({"id": [7]})
        followed(planes, 2)
        far.cut() if cut else [each.mute_to(far) for each in (one, two)]
        appending = pool.submit(made_again, kept[2])
        try:
            here.append(ids(24, 300), group=GROUPS, timeout=20)
            seen: list[int] = []
            while not {*range(24), *range(300, 324)} <= set(seen):
                with also.consume("actor", rows=48, columns=["id"], timeout=20) as delivery:
                    seen += numbers(delivery)
            assert not appending.done(), "it is told so, and asks again"
        finally:
            far.heal() if cut else [each.speak_to(far) for each in (one, two)]
        appending.result()
        while not {*range(24)} <= set(seen):  # the lease is over, and another is given the rows
            with also.consume("actor", rows=48, columns=["id"], timeout=20) as delivery:
                seen += numbers(delivery)
        with pytest.raises(dp.LeaseExpired):
            held.ack()
        held._inner.settled = True
        here.close()
        seen += drained(there, "actor", ["id"])
        assert sorted(seen) == [*range(24), *range(300, 324)], "each once"
        kept[0].close()
        assert sorted(drained(kept[0], "actor", ["id"])) == [*range(24), *range(100, 112)]
        assert [row for stream in (here, also, there, *kept) for row in stream.lost()] == [], "silence is not death"
        assert read_again(planes[0], ref) == [7]
        planes[0].free(ref)
        eventually(lambda: all(map(nothing_kept, planes)), "every column is freed where it is")

"""Streams over hosts whose links fail, or whose nodes are stopped: each side goes on with what it has, rows are
delivered once, and what one side said for rows that were not its any more is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from tests.chaos.test_links import known
from tests.integration.test_stream_hosts import drained, ids, nothing_kept
from tests.netns import Host, hosts, needs_namespaces
from tests.processes import eventually

pytestmark = [needs_namespaces, pytest.mark.timeout(60)]

GROUPS = [f"prompt-{i}" for i in range(24)]


@contextmanager
def streams(count: int, directory: Path) -> Iterator[tuple[list[Host], list[Any], list[Any]]]:
    with hosts(count, directory) as made, ExitStack() as undo:
        planes = [undo.enter_context(dp.connect(host.address)) for host in made]
        eventually(lambda: all(known(plane) == count for plane in planes), "they know each other")
        yield made, planes, [plane.stream("rollouts", tasks=["actor"]) for plane in planes]


def taken(stream: Any, rows: int) -> Any:
    """So many rows, held."""
    return stream.consume("actor", rows=rows, min_rows=rows, columns=["id"], timeout=10).__enter__()


def numbers(delivery: Any) -> list[int]:
    return sorted(int(i) for i in delivery.get()["id"].to_list())


def test_a_host_that_is_cut_off_and_comes_back_begins_anew(tmp_path: Path) -> None:
    with streams(3, tmp_path) as ((_, _, far), planes, (here, _, there)):
        here.append(ids(24), group=GROUPS)
        far.cut()
        eventually(lambda: [known(plane) for plane in planes] == [2, 2, 1], "it is alone")
        there.append(ids(12, 100), group=GROUPS[:12], timeout=5)
        ref = planes[2].put({"id": [7]})
        far.heal()
        eventually(lambda: all(known(plane) == 3 for plane in planes), "they know each other again")
        with pytest.raises(dp.OwnerDied):
            there.append(ref)
        there.append(ids(12, 200), group=GROUPS[12:])
        here.close()
        assert sorted(drained(here, "actor", ["id"])) == [*range(24), *range(200, 212)]
        assert len(here.lost()) == 12, "what it had let in by itself"
        assert planes[0].get(ref)["id"].to_list() == [7], "what is in no stream is there still"
        planes[0].free(ref)
        eventually(lambda: all(map(nothing_kept, planes)), "every column is freed where it is")


@pytest.mark.parametrize("how", ["cut", "one way"])
def test_a_link_that_fails_and_heals(tmp_path: Path, how: str) -> None:
    """Of two hosts either begins anew, and what it had is lost."""
    with streams(2, tmp_path) as ((near, far), planes, (here, there)):
        here.append(ids(24), group=GROUPS)
        held = taken(there, 24)
        assert numbers(held) == list(range(24))
        far.cut() if how == "cut" else near.mute_to(far)
        eventually(lambda: known(planes[0]) == known(planes[1]) == 1, "each is alone")
        again = taken(here, 24)
        assert numbers(again) == list(range(24)), "their columns are here, and so who held them holds nothing"
        there.append(ids(12, 100), group=GROUPS[:12], timeout=5)
        with pytest.raises(dp.LeaseExpired):
            held.ack()
        held._inner.settled = True
        far.heal() if how == "cut" else near.speak_to(far)
        eventually(lambda: known(planes[0]) == known(planes[1]) == 2, "they know each other again")
        try:
            again.ack()
            left = []
        except dp.LeaseExpired:
            left = list(range(100, 112))
        again._inner.settled = True
        here.append(ids(12, 200), group=GROUPS[12:])
        here.close()
        assert sorted(drained(there, "actor", ["id"])) == [*left, *range(200, 212)]
        assert {"prompt-11"} <= {row.group for row in here.lost()}
        assert here.stats()["rows"] == there.stats()["rows"] == 0
        eventually(lambda: all(map(nothing_kept, planes)), "every column is freed where it is")


def test_a_node_that_is_stopped_past_its_membership(tmp_path: Path) -> None:
    with streams(2, tmp_path) as ((_, far), planes, (here, there)):
        here.append(ids(24), group=GROUPS)
        held = taken(there, 24)
        far.freeze()
        eventually(lambda: known(planes[0]) == 1, "it is taken for dead")
        with taken(here, 24) as delivery:
            assert numbers(delivery) == list(range(24))
        far.thaw()
        eventually(lambda: known(planes[0]) == known(planes[1]) == 2, "it is there again")
        with pytest.raises(dp.LeaseExpired):
            held.ack()
        held._inner.settled = True
        there.append(ids(24, 100), group=GROUPS)
        there.close()
        assert sorted(drained(here, "actor", ["id"])) == list(range(100, 124))
        eventually(lambda: all(map(nothing_kept, planes)), "every column is freed where it is")

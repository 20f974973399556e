"""Hosts that die or come and go under a stream: what was there goes on elsewhere, what was lost is said once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from tests.etcd import needs_etcd
from tests.integration.test_hosts import Host, leader, members, together
from tests.integration.test_stream_hosts import drained, ids, nothing_kept
from tests.processes import eventually

pytestmark = needs_etcd

GROUPS = [f"prompt-{i}" for i in range(30)]


class Cluster:
    """Hosts, and a plane on each; the last is the one whose node leads the stream "rollouts"."""

    def __init__(self, hosts: list[Host], planes: list[Any]) -> None:
        last = leader(planes, "rollouts")
        order = [number for number in range(len(planes)) if number != last] + [last]
        self.hosts = [hosts[number] for number in order]
        self.planes = [planes[number] for number in order]
        self.nodes = [plane.stats().node for plane in self.planes]

    def kill(self, which: int) -> None:
        """The host's node dies, and the others notice."""
        self.hosts[which].kill()
        self.unseen(which)

    def unseen(self, which: int) -> None:
        """Wait until no other takes the host's node for a member."""
        others = [plane for number, plane in enumerate(self.planes) if number != which]
        eventually(lambda: all(self.nodes[which] not in members(plane) for plane in others), "the dead are noticed")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        hosts = [stack.enter_context(Host(tmp_path / "0"))]
        hosts += [stack.enter_context(Host(tmp_path / name, *hosts)) for name in "12"]
        planes = [stack.enter_context(dp.connect(host.address)) for host in hosts]
        together(*planes)
        yield Cluster(hosts, planes)


@pytest.mark.long
def test_rows_with_lost_columns_are_reported_once_and_can_be_appended_again(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    streams[2].append(ids(30), group=GROUPS, version=4)
    cluster.kill(2)
    told: list[Any] = []

    def all_told() -> bool:
        told.extend([*streams[0].lost(), *streams[1].lost()])
        return len(told) >= 30

    eventually(all_told, "each of them is told, also those that the dead host led")
    assert sorted(str(row.group) for row in told) == sorted(GROUPS)
    assert {row.version for row in told} == {4}
    assert streams[0].lost() == []
    streams[0].append(ids(30), group=GROUPS)
    streams[0].close()
    assert sorted(drained(streams[1], "actor", ["id"])) == list(range(30))


@pytest.mark.long
def test_a_suspended_consumer_cannot_ack_rows_whose_lease_has_expired(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    streams[0].append(ids(30), group=GROUPS)
    with streams[2].consume("actor", rows=30, min_rows=30, columns=["id"], timeout=60, lease=2.0) as held:
        os.kill(cluster.hosts[2].pid, signal.SIGSTOP)
        with streams[1].consume("actor", rows=30, min_rows=30, columns=["id"], timeout=60) as delivery:
            assert sorted(delivery.get()["id"].to_list()) == list(range(30))
            here = cluster.planes[:2]  # it is no member at last: where it goes on sooner, that may come at any time
            eventually(lambda: [len(members(plane)) for plane in here] == [2, 2], "the stopped one is no member")
            os.kill(cluster.hosts[2].pid, signal.SIGCONT)
            together(*cluster.planes)
            with pytest.raises(dp.LeaseExpired):
                held.ack()
        held._inner.settled = True  # there is nothing more to be said of it
    streams[2].append(ids(30, 100), group=GROUPS)
    streams[0].close()
    assert sorted(drained(streams[1], "actor", ["id"])) == list(range(100, 130))


def test_rows_of_a_stream_on_two_hosts_survive_one(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["reward", "actor"], replicas=2) for plane in cluster.planes]
    streams[2].append(ids(30), group=GROUPS, version=5)
    with streams[1].consume("reward", rows=30, min_rows=30, columns=["id"], timeout=60) as delivery:
        streams[1].extend(delivery.ref, {"reward": delivery.get()["id"].numpy() * 2.0})
    with streams[0].consume("actor", rows=6, columns=["id"], timeout=60) as delivery:
        done = {int(i) for i in delivery.get()["id"].to_list()}
    cluster.kill(2)
    assert streams[0].lost() == []
    streams[0].close()
    seen: list[int] = []
    while True:
        try:
            with streams[0].consume("actor", rows=30, columns=["id", "reward"], timeout=60) as delivery:
                batch = delivery.get()
                got = [int(i) for i in batch["id"].to_list()]
                seen += got
                assert delivery.groups == [GROUPS[i] for i in got]
                assert (batch["reward"].numpy() == batch["id"].numpy() * 2.0).all()
                assert set(delivery.versions) == {5}
                del batch
        except dp.Closed:
            break
    assert sorted(seen) == sorted(set(range(30)) - done)
    eventually(lambda: all(map(nothing_kept, cluster.planes[:2])), "all is freed where it is left")

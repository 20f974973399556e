"""Hosts that die or come and go under a stream: what was there goes on elsewhere, what was lost is said once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.cases import each_case
from tests.etcd import EtcdServer, needs_etcd
from tests.integration.test_hosts import LEASE_S, Host, connected, leader, members, together
from tests.integration.test_stream_hosts import drained, ids, nothing_kept
from tests.processes import eventually

pytestmark = needs_etcd

GROUPS = [f"prompt-{i}" for i in range(30)]
AWAY_S = 1.5 * LEASE_S
"""For which a coordinator is away: longer than the leases of members, and those of leaders."""


class Cluster:
    """Hosts, and a plane on each; the last is the one whose node leads the stream "rollouts"."""

    def __init__(self, hosts: list[Host], planes: list[Any]) -> None:
        last = leader(planes, "rollouts")
        order = [number for number in range(len(planes)) if number != last] + [last]
        self.hosts = [hosts[number] for number in order]
        self.planes = [planes[number] for number in order]
        self.nodes = [plane.stats().node for plane in self.planes]

    def followed(self) -> None:
        def roles() -> set[str]:
            seen = self.planes[-1].members()["members"][self.nodes[-1]]["leads"]
            others = [each["follows"] for plane in self.planes for each in plane.members()["members"].values()]
            return {key for key in seen if key.startswith("rollouts/")} & {key for each in others for key in each}

        eventually(roles, "it leads, and another follows")

    def kill(self, which: int) -> None:
        """The host's node dies, and the others notice."""
        self.hosts[which].kill()
        self.unseen(which)

    def unseen(self, which: int) -> None:
        others = [plane for number, plane in enumerate(self.planes) if number != which]
        eventually(lambda: all(self.nodes[which] not in members(plane) for plane in others), "the dead are noticed")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with connected(tmp_path, 3) as (hosts, planes):
        yield Cluster(hosts, planes)


class Flow:
    """Rows that are appended on each host and acked on each, one after the other, until told to end."""

    def __init__(self, planes: list[Any]) -> None:
        streams = [plane.stream("rollouts", tasks=["actor"]) for plane in planes]
        self.appended = [0 for _ in planes]
        self.acked: list[int] = []
        self._producing = self._consuming = True
        self._threads = ThreadPoolExecutor(2 * len(planes))
        self._producers = [self._threads.submit(self._produce, *each) for each in enumerate(streams)]
        self._consumers = [self._threads.submit(self._consume, stream) for stream in streams]

    def _produce(self, which: int, stream: Any) -> None:
        while self._producing:
            first = which + len(self.appended) * self.appended[which]
            stream.append({"id": np.array([first])}, timeout=60)
            self.appended[which] += 1

    def _consume(self, stream: Any) -> None:
        while self._consuming:
            with (
                suppress(dp.NotReady, dp.LeaseExpired),
                stream.consume("actor", rows=16, columns=["id"], timeout=0.5, lease=LEASE_S) as delivery,
            ):
                found = [int(i) for i in delivery.get()["id"].to_list()]
                delivery.ack()
                self.acked += found

    def goes_on(self) -> None:
        """Wait until each host has appended more, and somebody has acked more."""
        appended, acked = [*self.appended], len(self.acked)
        eventually(
            lambda: (
                all(now > was for now, was in zip(self.appended, appended, strict=True)) and len(self.acked) > acked
            ),
            "rows flow",
        )

    def end(self) -> list[int]:
        """End it once all is acked; what was."""
        self._producing = False
        for each in self._producers:
            each.result()
        eventually(lambda: len(self.acked) >= sum(self.appended), "all is acked")
        self._consuming = False
        for each in self._consumers:
            each.result()
        self._threads.shutdown()
        return self.acked


def led(planes: list[Any]) -> dict[str, set[str]]:
    """What each node says that it leads."""
    return {plane.stats().node: {*plane.members()["members"][plane.stats().node]["leads"]} for plane in planes}


@pytest.mark.long
@each_case("how", ["away", "wiped"])
def test_rows_flow_while_the_coordinator_is_down_and_after_it_was_wiped(tmp_path: Path, how: str) -> None:
    with EtcdServer(tmp_path) as etcd, connected(tmp_path, 3, f"etcd://{etcd.address}/flow") as (hosts, planes):
        flow = Flow(planes)
        Cluster(hosts, planes).followed()
        before = led(planes)
        etcd.stop()
        eventually(lambda: not any(plane.members()["coordination"]["answers"] for plane in planes), "it is missed")
        until_s = time.monotonic() + AWAY_S
        while time.monotonic() < until_s:
            flow.goes_on()
        if how == "wiped":
            etcd.wipe()
        etcd.start()
        eventually(lambda: all(plane.members()["coordination"]["answers"] for plane in planes), "it answers")
        flow.goes_on()
        eventually(lambda: etcd.count("/dataplane/flow/values/partitions/") == 1, "it knows the partition")
        assert led(planes) == before, "nobody takes another's place"
        together(*planes)
        acked = flow.end()
        assert sorted(acked) == sorted(3 * row + which for which in range(3) for row in range(flow.appended[which]))


@pytest.mark.long
def test_rows_with_lost_columns_are_reported_once_and_can_be_appended_again(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    streams[2].append(ids(30), group=GROUPS, version=4)
    cluster.kill(2)
    eventually(lambda: streams[0].stats()["lost"] == 30, "each of them is counted, also if the dead host led")
    with (
        pytest.raises(dp.NotReady, match="30 rows lost with a host"),
        streams[1].consume("actor", rows=1, columns=["id"], timeout=0.01),
    ):
        pass
    told = streams[1].lost()
    assert sorted(str(row.group) for row in told) == sorted(GROUPS)
    assert {row.version for row in told} == {4}
    assert streams[0].lost() == []
    assert streams[0].stats()["lost"] == 0
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

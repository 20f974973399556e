"""Hosts that die or come and go under a stream: what was there goes on elsewhere, what was lost is said once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.cluster.placement import Placement
from tests.integration.test_hosts import Host, members, together
from tests.integration.test_stream_hosts import drained, ids, nothing_kept
from tests.processes import MIB, eventually, pattern

GROUPS = [f"prompt-{i}" for i in range(30)]


class Cluster:
    """Hosts, and a plane on each."""

    def __init__(self, hosts: list[Host], planes: list[Any]) -> None:
        self.hosts = hosts
        self.planes = planes
        self.nodes = [plane.stats().node for plane in planes]

    def kill(self, which: int) -> None:
        """The host's node dies, and the others notice."""
        self.hosts[which].kill()
        self.unseen(which)

    def unseen(self, which: int) -> None:
        """Wait until no other takes the host's node for a member."""
        others = [plane for number, plane in enumerate(self.planes) if number != which]
        eventually(lambda: all(self.nodes[which] not in members(plane) for plane in others), "the dead are noticed")

    def home(self, stream: str, group: str, *without: int) -> int:
        """Which host is the home of a group."""
        nodes = [bytes.fromhex(node) for number, node in enumerate(self.nodes) if number not in without]
        return self.nodes.index(Placement(nodes).home(stream, group).hex())

    def homed(self, stream: str, which: int) -> list[str]:
        """The groups that have their home on this host."""
        return [group for group in GROUPS if self.home(stream, group) == which]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        hosts: list[Host] = []
        for number in range(3):
            hosts.append(stack.enter_context(Host(tmp_path / str(number), *hosts[:1])))
        planes = [stack.enter_context(dp.connect(host.address)) for host in hosts]
        together(*planes)
        yield Cluster(hosts, planes)


def test_rows_go_on_at_other_homes_when_theirs_dies(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    streams[0].append(ids(30), group=GROUPS, version=7, tags={"n": list(range(30))})
    assert cluster.homed("rollouts", 2), "some rows have their home there"
    cluster.kill(2)
    with streams[1].consume("actor", rows=30, min_rows=30, columns=["id"], timeout=10) as delivery:
        got = [int(i) for i in delivery.get()["id"].to_list()]
        assert sorted(got) == list(range(30))
        assert delivery.groups == [GROUPS[i] for i in got]
        assert delivery.versions == [7] * 30
        assert delivery.tags["n"] == got
    assert streams[0].lost() == []
    eventually(lambda: nothing_kept(cluster.planes[0]), "what was acked is freed")


def test_what_a_task_has_acked_is_not_delivered_to_it_again(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["reward", "actor"]) for plane in cluster.planes]
    streams[0].append(ids(30), group=GROUPS)
    acked: set[int] = set()
    while len(acked) < 5:
        with streams[1].consume("actor", rows=5, columns=["id"], timeout=10) as delivery:
            acked.update(int(i) for i in delivery.get()["id"].to_list())
    held = streams[1].consume("actor", rows=30, min_rows=30 - len(acked), columns=["id"], timeout=10).__enter__()
    cluster.kill(2)
    with pytest.raises(dp.LeaseExpired):
        held.ack()  # some of them go to others
    streams[0].close()
    again = drained(streams[0], "actor", ["id"])
    assert not acked.intersection(again)
    assert len(again) == len(set(again))
    assert sorted(drained(streams[1], "reward", ["id"])) == list(range(30))


def test_of_a_delivery_some_of_whose_rows_are_lost_nothing_is_done(cluster: Cluster) -> None:
    """The home that has the others lets go of them: who is told that his work does not count leaves no row undone."""
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    here, there = cluster.homed("rollouts", 1), cluster.homed("rollouts", 2)
    streams[0].append(ids(len(here)), group=here)
    streams[2].append(ids(len(there), 100), group=there)
    rows = len(here) + len(there)
    held = streams[1].consume("actor", rows=rows, min_rows=rows, columns=["id"], timeout=10).__enter__()
    cluster.kill(0)
    with pytest.raises(dp.LeaseExpired):
        held.ack()
    streams[1].close()
    assert sorted(drained(streams[1], "actor", ["id"])) == list(range(100, 100 + len(there)))


def test_columns_that_came_from_a_third_host_survive_the_home(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["reward", "actor"]) for plane in cluster.planes]
    streams[0].append(ids(30), group=GROUPS)
    with streams[1].consume("reward", rows=30, min_rows=30, columns=["id"], timeout=10) as delivery:
        streams[1].extend(delivery.ref, {"reward": delivery.get()["id"].numpy() * 2.0})
    cluster.kill(2)
    with streams[0].consume("actor", rows=30, min_rows=30, columns=["id", "reward"], timeout=10) as delivery:
        batch = delivery.get()
        assert sorted(batch["id"].to_list()) == list(range(30))
        assert (batch["reward"].numpy() == batch["id"].numpy() * 2.0).all()
        del batch
    eventually(lambda: all(map(nothing_kept, cluster.planes[:2])), "what was acked is freed on both")


def test_rows_whose_columns_died_are_told_once_and_can_be_made_again(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    streams[2].append(ids(30), group=GROUPS, version=4)
    gone = sorted(set(GROUPS) - set(cluster.homed("rollouts", 2)))  # of the others nobody knows any more
    cluster.kill(2)
    told = [*streams[0].lost(), *streams[1].lost()]
    assert sorted(str(row.group) for row in told) == gone
    assert {row.version for row in told} == {4}
    assert streams[0].lost() == []
    streams[0].append(ids(len(gone)), group=gone)
    streams[0].close()
    assert sorted(drained(streams[1], "actor", ["id"])) == list(range(len(gone)))


def test_a_stream_with_limits_goes_on_when_any_host_dies(cluster: Cluster) -> None:
    for victim in (2,):
        name = f"bounded-{victim}"
        streams = [plane.stream(name, tasks=["actor"], max_rows=40) for plane in cluster.planes]
        streams[0].append(ids(30), group=GROUPS)
        cluster.kill(victim)
        with pytest.raises(dp.Backpressure):
            streams[1].append(ids(30, 30), group=GROUPS, timeout=0.3)
        streams[1].append(ids(10, 30), group=GROUPS[:10], timeout=10)
        with streams[0].consume("actor", rows=40, min_rows=40, columns=["id"], timeout=10) as delivery:
            assert sorted(delivery.get()["id"].to_list()) == list(range(40))
        streams[1].append(ids(30), group=GROUPS, timeout=10)


def test_a_consumer_that_waits_when_a_home_dies_is_given_what_survives(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    streams[0].append(ids(30), group=GROUPS)
    held = streams[2].consume("actor", rows=30, min_rows=30, columns=["id"], timeout=10).__enter__()
    assert len(held) == 30
    os.kill(cluster.hosts[2].pid, signal.SIGKILL)  # its client holds all rows, and cannot give them back
    with streams[1].consume("actor", rows=30, min_rows=30, columns=["id"], timeout=15) as delivery:
        assert sorted(delivery.get()["id"].to_list()) == list(range(30))


def test_who_was_stopped_and_taken_for_dead_has_nothing_to_say(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    streams[0].append(ids(30), group=GROUPS)
    with streams[2].consume("actor", rows=30, min_rows=30, columns=["id"], timeout=10) as held:
        os.kill(cluster.hosts[2].pid, signal.SIGSTOP)
        cluster.unseen(2)
        with streams[1].consume("actor", rows=30, min_rows=30, columns=["id"], timeout=10) as delivery:
            assert sorted(delivery.get()["id"].to_list()) == list(range(30))
            os.kill(cluster.hosts[2].pid, signal.SIGCONT)
            together(*cluster.planes)
            with pytest.raises(dp.LeaseExpired):
                held.ack()
        held._inner.settled = True  # there is nothing more to be said of it
    streams[2].append(ids(30, 100), group=GROUPS)
    streams[0].close()
    assert sorted(drained(streams[1], "actor", ["id"])) == list(range(100, 130))


def test_a_host_that_joins_takes_its_share(cluster: Cluster, tmp_path: Path) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    streams[0].append(ids(30), group=GROUPS)
    with Host(tmp_path / "late", cluster.hosts[0]) as late, dp.connect(late.address) as plane:
        together(*cluster.planes, plane)
        stream = plane.stream("rollouts")
        streams[1].append(ids(30, 30), group=GROUPS)
        streams[0].close()
        seen: list[int] = []
        with stream.consume(
            "actor", rows=60, min_rows=60, columns=["id"], sampler=dp.CompleteGroups(2), timeout=10
        ) as delivery:
            seen += [int(i) for i in delivery.get()["id"].to_list()]
    assert sorted(seen) == list(range(60))
    assert np.array_equal(np.sort(seen), np.arange(60))


def test_what_was_put_on_two_hosts_survives_one(cluster: Cluster) -> None:
    large = np.random.default_rng(1).integers(0, 255, (64, 20_000), np.uint8)
    ref = cluster.planes[2].put({"pixels": large, "n": np.arange(64)}, replicas=2)
    assert sum(plane.stats().shards for plane in cluster.planes) == 4
    small = cluster.planes[2].put({"n": np.arange(3)}, replicas=3)
    single = cluster.planes[2].put({"n": np.arange(3)})
    assert cluster.planes[0].get(ref[:4])["n"].to_list() == [0, 1, 2, 3]
    cluster.kill(2)
    for plane in cluster.planes[:2]:
        batch = plane.get(ref[10:20])
        assert np.array_equal(batch["pixels"].numpy(), large[10:20])
        assert plane.get(small)["n"].to_list() == [0, 1, 2]
        with pytest.raises(dp.OwnerDied):
            plane.get(single)
    del batch
    cluster.planes[0].free(ref)
    cluster.planes[0].free(small)
    eventually(lambda: all(map(nothing_kept, cluster.planes[:2])), "replicas are freed")
    with pytest.raises(dp.Lost):
        cluster.planes[1].get(ref)


def test_what_is_freed_is_freed_on_both(cluster: Cluster) -> None:
    ref = cluster.planes[0].put({"n": np.arange(64)}, replicas=3)
    other = cluster.planes[0].put({"n": np.arange(64)}, replicas=2, scope="step")
    cluster.planes[0].free(ref[:32])
    cluster.planes[1].free(ref[32:])
    cluster.planes[0].free(scope="step")
    eventually(lambda: all(map(nothing_kept, cluster.planes)), "replicas are freed with what they are of")
    assert len(other) == 64
    with pytest.raises(dp.LimitExceeded, match="there are 3"):
        cluster.planes[0].put({"n": np.arange(64)}, replicas=4)
    assert nothing_kept(cluster.planes[0])


def test_rows_of_a_stream_on_two_hosts_survive_one(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["reward", "actor"], replicas=2) for plane in cluster.planes]
    streams[2].append(ids(30), group=GROUPS, version=5)
    with streams[1].consume("reward", rows=30, min_rows=30, columns=["id"], timeout=10) as delivery:
        streams[1].extend(delivery.ref, {"reward": delivery.get()["id"].numpy() * 2.0})
    with streams[0].consume("actor", rows=6, columns=["id"], timeout=10) as delivery:
        done = {int(i) for i in delivery.get()["id"].to_list()}
    cluster.kill(2)
    assert streams[0].lost() == []
    streams[0].close()
    seen: list[int] = []
    while True:
        try:
            with streams[0].consume("actor", rows=30, columns=["id", "reward"], timeout=10) as delivery:
                batch = delivery.get()
                seen += [int(i) for i in batch["id"].to_list()]
                assert (batch["reward"].numpy() == batch["id"].numpy() * 2.0).all()
                assert set(delivery.versions) == {5}
                del batch
        except dp.Closed:
            break
    assert sorted(seen) == sorted(set(range(30)) - done)
    eventually(lambda: all(map(nothing_kept, cluster.planes[:2])), "all is freed where it is left")


def test_rows_on_two_hosts_survive_one_also_where_rows_of_several_come_together(cluster: Cluster) -> None:
    """A new home has rows that died with the old one on their second host, together with rows of that host's own."""
    streams = [plane.stream("rollouts", tasks=["actor"], replicas=2) for plane in cluster.planes]
    for number in (1, 2, 0):
        for part in range(4):
            streams[number].append(ids(30, 30 * (4 * number + part)), group=GROUPS)
    cluster.kill(0)
    streams[1].close()
    found = drained(streams[1], "actor", ["id"])
    assert [row for stream in streams[1:] for row in stream.lost()] == []
    assert sorted(found) == list(range(360))


def test_rows_that_lack_what_died_with_their_home_are_told_and_keep_nobody(cluster: Cluster) -> None:
    """A column that was brought on the home's own host is known to nobody else but by what was said of the ack."""
    streams = [plane.stream("rollouts", tasks=["reward", "actor"]) for plane in cluster.planes]
    streams[0].append(ids(30), group=GROUPS)
    with streams[2].consume("reward", rows=30, min_rows=30, columns=["id"], timeout=10) as delivery:
        streams[2].extend(delivery.ref, {"reward": delivery.get()["id"].numpy() * 2.0})
    cluster.kill(2)
    streams[0].close()
    assert drained(streams[1], "actor", ["id", "reward"]) == []
    told = [*streams[0].lost(), *streams[1].lost()]
    assert sorted(str(row.group) for row in told) == sorted(GROUPS)
    eventually(lambda: all(map(nothing_kept, cluster.planes[:2])), "their other columns are freed")


def test_columns_that_were_replaced_from_another_host_are_freed(cluster: Cluster) -> None:
    streams = [plane.stream("rollouts", tasks=["reward", "actor"]) for plane in cluster.planes]
    streams[0].append(ids(30), group=GROUPS)
    for number in (1, 2):
        delivery = streams[number].consume("reward", rows=30, min_rows=30, columns=["id"], timeout=10).__enter__()
        streams[number].extend(delivery.ref, {"reward": np.full(30, float(number))})
        delivery.nack() if number == 1 else delivery.ack()
    with streams[0].consume("actor", rows=30, min_rows=30, columns=["reward"], timeout=10) as delivery:
        assert delivery.get()["reward"].to_list() == [2.0] * 30
    eventually(lambda: all(map(nothing_kept, cluster.planes)), "also what nobody needs since it was replaced")


def test_only_rows_whose_columns_died_are_lost_of_those_that_moved_together(cluster: Cluster, tmp_path: Path) -> None:
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in cluster.planes]
    for number, stream in enumerate(streams):
        stream.append(ids(30, 30 * number), group=GROUPS)
    with Host(tmp_path / "late", cluster.hosts[0]) as late, dp.connect(late.address) as plane:
        together(*cluster.planes, plane)
        stream = plane.stream("rollouts")
        moved = [group for group in GROUPS if home_of(group, [*cluster.nodes, plane.stats().node])]
        assert moved, "some rows have their home there"
        eventually(lambda: here(plane) == 3 * len(moved), "they have moved")
        os.kill(cluster.hosts[2].pid, signal.SIGKILL)
        cluster.unseen(2)
        eventually(lambda: len(members(plane)) == 3, "the new one notices it too")
        streams[0].close()
        assert sorted(drained(stream, "actor", ["id"])) == list(range(60))


def home_of(group: str, nodes: list[str]) -> bool:
    """Whether the last of these is the home of a group."""
    return Placement(bytes.fromhex(node) for node in nodes).home("rollouts", group).hex() == nodes[-1]


def here(plane: Any) -> int:
    """How many rows have their home on the plane's own host."""
    return int(plane.stats().streams["rollouts"]["rows"])


def test_a_full_disk_on_one_of_three_holds_up_who_puts_there_alone(tmp_path: Path, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(4 * MIB - 64 * 1024))
    full: dict[str, Any] = {"memory": "8MiB", "spill": "64MiB", "spill_dir": small_disk}
    with (
        Host(tmp_path / "0") as one,
        Host(tmp_path / "1", one) as two,
        Host(tmp_path / "2", one, **full) as three,
        dp.connect(one.address) as a,
        dp.connect(two.address) as b,
        dp.connect(three.address) as c,
    ):
        together(a, b, c)
        streams = [plane.stream("rollouts", tasks=["actor"]) for plane in (a, b, c)]
        sent = 0
        with pytest.raises(dp.Backpressure) as caught:
            while True:
                streams[2].append({"x": pattern(sent, MIB)[None]}, group=[GROUPS[sent]], timeout=0.5)
                sent += 1
        assert "No space left" in caught.value.spill_error
        for number in range(10, 14):
            streams[0].append({"x": pattern(number, MIB)[None]}, group=[GROUPS[number]], timeout=5)
        with streams[1].consume("actor", rows=2, min_rows=2, columns=["x"], timeout=10):
            pass  # what is freed is room
        ballast.unlink()
        for number in range(sent, 10):
            streams[2].append({"x": pattern(number, MIB)[None]}, group=[GROUPS[number]], timeout=10)
        streams[0].close()
        left = 12
        for _ in range(left):
            with streams[1].consume("actor", rows=1, columns=["x"], timeout=10) as delivery:
                number = GROUPS.index(str(delivery.groups[0]))
                assert np.array_equal(delivery.get()["x"].numpy()[0], pattern(number, MIB))
        assert streams[1].stats()["rows"] == 0

"""Several nodes on this machine's loopback, as if each were a host: references of one are read on the others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane import cli
from dataplane.cluster.membership import Membership
from dataplane.cluster.placement import winner
from dataplane.config import ClusterConfig, NodeConfig
from dataplane.node.node import NodeServer, run
from dataplane.stream.machine import StreamMachine
from dataplane.wire import auth
from tests import etcd
from tests.cases import each_case
from tests.processes import MIB, Worker, eventually, pattern

ANY = "tcp://127.0.0.1:0"
LEASE_S = 4.0  # after which who is silent is away


class Host(Worker):
    """A node among others, in a process of its own. `address` is for clients, `listens` for the other nodes.

    join: a node whose cluster it joins, or what `--join` takes; without one it begins a cluster of its own at the etcd
    that the process's tests share.
    """

    def __init__(
        self,
        directory: Path,
        *join: Host | str,
        listen: str = ANY,
        key: Path | None = None,
        advertise: str = "",
        transports: tuple[str, ...] = (),
        serve: Any = None,
        **settings: Any,
    ) -> None:
        directory.mkdir(exist_ok=True)
        settings = {"memory": "32MiB", "spill": 0, "prewarm": 0, "spill_dir": directory / "spill"} | settings
        self.joins = _joins(join)
        cluster = (listen, self.joins, key, advertise, transports)
        super().__init__(serve or _serve, directory / "node.sock", settings, cluster)
        try:
            self.address, self.listens = self.hear()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def facts(self) -> dict[str, Any]:
        """What no client is told: bytes fetched, copies known, shards offered to others."""
        facts: dict[str, Any] = self.ask()
        return facts

    def __enter__(self) -> Host:
        return self


def _joins(join: tuple[Host | str, ...]) -> str:
    if not join:
        return etcd.cluster()
    return join[0] if isinstance(join[0], str) else join[0].joins


def _serve(pipe: Any, path: Path, settings: dict[str, Any], cluster: tuple[Any, ...]) -> None:
    assert Membership.__init__.__kwdefaults__ is not None
    Membership.__init__.__kwdefaults__["lease_s"] = LEASE_S
    node = NodeServer(NodeConfig(**settings), path, ClusterConfig(*cluster))
    hosts = node.hosts
    assert hosts is not None

    def tell() -> None:
        fetcher = hosts.fetcher
        try:
            pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe._pipe.fileno())
            return
        assert fetcher is not None
        facts = {"fetched": fetcher.fetched_bytes, "copies": len(fetcher._copies), "streams": held(node)}
        pipe.send(facts | {"sent": hosts._offers.sent_bytes, "offers": len(hosts._offers)})

    def ready() -> None:
        asyncio.get_running_loop().add_reader(pipe._pipe.fileno(), tell)
        pipe.send((node.address, hosts.address))

    run(node, ready=ready)


def held(node: NodeServer) -> dict[str, int]:
    """How much a node remembers of rows that somebody has to do with still: nothing, once all are done."""
    assert node.hosts is not None
    partitions = node.hosts.partitions
    assert partitions is not None
    machines = [each.machine for each in partitions.replicas if isinstance(each.machine, StreamMachine)]
    streams = [machine.leased for machine in machines]
    return {
        "rows": sum(leased.partition.rows.count for leased in streams),
        "grants": sum(len(leased.leases) for leased in streams),
        "tickets": sum(len(leased.admission.coming()) for leased in streams),
        "waiting": sum(len(list(machine.waiting())) for machine in machines),
        "retained": len(node.hosts._retained.holders),
        "needed": sum(node._needed._needed.values()),
    }


def leader(planes: list[Any], stream: str) -> int:
    """The number of the plane on whose host a stream of this name will be led, among those hosts."""
    nodes = [plane.stats().node for plane in planes]
    return nodes.index(winner([node.encode() for node in nodes], "stream", stream).decode())


def members(plane: Any) -> set[str]:
    """The numbers of those that a plane's node takes for members."""
    return set(plane.members().get("members", {}))


def together(*planes: Any) -> None:
    """Wait until the nodes of all these planes know each other."""
    everybody = {plane.stats().node for plane in planes}
    eventually(lambda: all(members(plane) == everybody for plane in planes), "all know each other")


@contextmanager
def connected(
    directory: Path, count: int = 2, *join: str, each: Sequence[dict[str, Any]] = (), **settings: Any
) -> Iterator[tuple[list[Host], list[Any]]]:
    """Hosts that know each other, and a plane on each. `each`: what only one of them is told."""
    with ExitStack() as undo:
        hosts: list[Host] = []
        for number, own in enumerate(each or [{}] * count):
            hosts.append(undo.enter_context(Host(directory / str(number), *join, *hosts, **settings, **own)))
        planes = [undo.enter_context(dp.connect(host.address)) for host in hosts]
        together(*planes)
        yield hosts, planes


Planes = list[Any]
Hosts = list[Host]
Connected = tuple[Hosts, Planes]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Connected]:
    with connected(tmp_path) as made:
        yield made


@pytest.fixture
def two(pair: Connected) -> Hosts:
    return pair[0]


@pytest.fixture
def planes(pair: Connected) -> Planes:
    return pair[1]


@pytest.fixture
def spilled(tmp_path: Path) -> Iterator[tuple[Planes, list[dp.BatchRef]]]:
    """Eight batches of 2 MiB on a host with memory for four, and another host."""
    with connected(tmp_path, each=[{"memory": "8MiB", "spill": "64MiB", "compression": "never"}, {}]) as (
        _,
        (one, other),
    ):
        yield (one, other), [one.put({"x": pattern(seed, 2 * MIB, 64)}) for seed in range(8)]


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "0" / "spill").rglob("*.spill"))


def test_an_altered_spill_file_is_corrupt_on_all_hosts(
    tmp_path: Path, spilled: tuple[Planes, list[dp.BatchRef]]
) -> None:
    (one, other), refs = spilled
    eventually(lambda: one.stats().spilled_shards == 4, "four are on disk alone")
    paths = [path for path in files(tmp_path) if path.stat().st_size > MIB]  # one that is being written may be shorter
    for path in paths:  # once: a shard that is still in memory may be written meanwhile
        with path.open("r+b") as file:
            file.seek(MIB)
            byte = file.read(1)
            file.seek(MIB)
            file.write(bytes([byte[0] ^ 1]))
    outcomes: list[str] = []
    for seed, ref in enumerate(refs):
        try:
            got = np.asarray(other.get(ref)["x"].numpy())
        except dp.Corrupt:
            outcomes.append("corrupt")
        else:
            assert np.array_equal(got, pattern(seed, 2 * MIB, 64))
            outcomes.append("right")
    assert outcomes.count("corrupt") >= 4
    for ref in [ref for ref, outcome in zip(refs, outcomes, strict=True) if outcome == "corrupt"]:
        with pytest.raises(dp.Corrupt) as told:  # and so it is here
            one.get(ref)
        assert Path(told.value.path) in paths
    assert set(outcomes) == {"corrupt", "right"}
    assert other.get(one.put({"x": [1]}))["x"].to_list() == [1]


@pytest.mark.long
def test_a_thousand_remote_shards_are_read_in_one_get(tmp_path: Path) -> None:
    """Too large to come with their descriptions, and more than are offered, or asked for, at a time."""
    with connected(tmp_path, 3, memory="192MiB") as ((host, _, _), (one, other, last)):
        refs = [one.put({"x": pattern(seed, 96 << 10)}) for seed in range(1000)]
        expected = np.concatenate([pattern(seed, 96 << 10) for seed in range(1000)])
        got: list[bool] = []

        def read(plane: Any) -> None:
            got.append(np.array_equal(plane.get(dp.concat(refs), timeout=30)["x"].numpy(), expected))

        threads = [threading.Thread(target=read, args=(plane,)) for plane in (other, last)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert got == [True, True]
        eventually(lambda: host.facts()["offers"] == 0, "the owner holds nothing for the readers")
        assert one.stats().pinned_bytes == 0


def sent(host: Host) -> int:
    return int(host.facts()["sent"])


@each_case("how", ["taken for others", "killed"])
def test_a_lost_copy_is_read_from_the_owner_instead(tmp_path: Path, how: str) -> None:
    with connected(tmp_path, 3, memory="8MiB") as (hosts, (one, other, last)):
        ref = one.put({"x": pattern(1, 4 * MIB)})
        other.get(ref)
        eventually(lambda: sent(hosts[0]) == 4 * MIB, "it has come")
        if how == "killed":
            hosts[1].kill()
        else:
            other.put({"x": pattern(2, 6 * MIB)}, timeout=60)
        assert np.array_equal(last.get(ref, timeout=60)["x"].numpy(), pattern(1, 4 * MIB))
        eventually(lambda: sent(hosts[0]) == 8 * MIB, "it has come from the owner")


@pytest.mark.long
def test_copies_beyond_the_budget_are_bounded(tmp_path: Path) -> None:
    with connected(tmp_path, each=[{"memory": "64MiB"}, {"memory": "8MiB"}]) as (_, (one, other)):
        refs = [one.put({"x": pattern(seed, 2 * MIB)}) for seed in range(16)]
        own = other.put({"x": pattern(99, 2 * MIB)})
        for _ in range(2):
            for seed, ref in enumerate(refs):
                assert np.array_equal(other.get(ref)["x"].numpy(), pattern(seed, 2 * MIB))
            stats = other.stats()
            assert stats.memory_peak <= stats.memory_budget == 8 * MIB
            assert stats.disk_used == 0
        assert np.array_equal(other.get(own)["x"].numpy(), pattern(99, 2 * MIB))
        big = other.put({"x": pattern(98, 5 * MIB)}, timeout=60)  # what copies have is there for it
        with pytest.raises(dp.LimitExceeded):
            other.get(dp.concat(refs))
        other.free(big)
        held = [other.get(ref) for ref in refs[:3]]
        with pytest.raises(dp.Backpressure):
            other.get(refs[3], timeout=0.2)
        del held
        assert np.array_equal(other.get(refs[3], timeout=60)["x"].numpy(), pattern(3, 2 * MIB))


@pytest.fixture
def key(tmp_path: Path) -> Path:
    auth.generate(tmp_path / "key")
    return tmp_path / "key"


@pytest.mark.parametrize(
    ("listen", "advertise"),
    [
        ("tcp://0.0.0.0:0", "127.0.0.1"),
        pytest.param("tcp://*:0", "localhost", marks=pytest.mark.long),
        pytest.param("tcp://[::]:0", "::1", marks=pytest.mark.long),
    ],
)
def test_a_node_listening_on_every_address_advertises_the_given_one(
    tmp_path: Path, key: Path, listen: str, advertise: str
) -> None:
    with connected(tmp_path, listen=listen, key=key, advertise=advertise) as (_, (one, other)):
        told = f"[{advertise}]" if ":" in advertise else advertise
        for member in one.members()["members"].values():
            assert member["address"].startswith(f"tcp://{told}:")
            assert member["transports"]["tcp"].startswith(f"{told}:")
        assert np.array_equal(other.get(one.put({"x": pattern(1, MIB)}))["x"].numpy(), pattern(1, MIB))
        assert np.array_equal(one.get(other.put({"x": pattern(2, MIB)}))["x"].numpy(), pattern(2, MIB))


def test_the_members_command_lists_all_members(two: Hosts, planes: Planes, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["members", two[0].address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert [two[0].listens in line for line in lines if "(this one)" in line] == [True]
    assert any(two[1].listens in line and "tcp" in line for line in lines)
    assert cli.main(["members", "--json", two[0].address]) == 0
    assert set(json.loads(capsys.readouterr().out)["members"]) == members(planes[0])

"""Nodes that run the cluster's etcd themselves: real nodes, real servers, on this machine's loopback."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import dataplane as dp
from dataplane.cluster.certificates import certificates
from dataplane.coordinator.etcd import EtcdCoordinator
from dataplane.wire import auth
from tests.etcd import needs_etcd, ports
from tests.integration.test_hosts import ANY, members
from tests.processes import WAIT_S, Command, eventually

pytestmark = [needs_etcd, pytest.mark.timeout(240)]


class Seeded:
    """A node by the command, with seeds."""

    def __init__(self, directory: Path, key: Path, seeds: str, etcd: str = "etcd") -> None:
        directory.mkdir(exist_ok=True)
        where = ["--socket", f"{directory}/s", "--memory", "16MiB", "--spill", "0", "--prewarm", "0", "--listen", ANY]
        which = ["--key", str(key), "--seeds", seeds, "--seed-dir", str(directory.parent / etcd)]
        self.process = Command("node", *where, *which, log=directory / "node.err")
        self.address = self.process.stdout.readline().decode().strip().removeprefix("DATAPLANE_ADDRESS=")
        self.directory = directory

    def server(self) -> psutil.Process | None:
        for child in psutil.Process(self.process.pid).children():
            with suppress(psutil.Error):  # it has just ended
                if "--initial-cluster-state" in " ".join(child.cmdline()):
                    return child
        return None

    def said(self) -> str:
        return (self.directory / "node.err").read_text()

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code. Idempotent."""
        self.process.send_signal(how)
        code = self.process.wait(4 * WAIT_S)
        self.process.stdout.close()
        return code


@pytest.fixture
def key(tmp_path: Path) -> Path:
    auth.generate(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def nodes() -> Iterator[list[Seeded]]:
    nodes: list[Seeded] = []
    yield nodes
    for node in nodes:
        node.process.terminate()
    while nodes:
        nodes.pop().end()


@pytest.mark.long
def test_a_seed_that_loses_its_server_or_directory_rejoins_the_other_two(
    tmp_path: Path, key: Path, nodes: list[Seeded]
) -> None:
    seeds = ",".join(ports(3))
    nodes += [Seeded(tmp_path / str(number), key, seeds) for number in range(3)]
    nodes.append(Seeded(tmp_path / "3", key, seeds))
    with ExitStack() as stack:
        planes = [stack.enter_context(dp.connect(node.address)) for node in nodes]
        together_soon(*planes)
        eventually(lambda: all(node.server() for node in nodes[:3]), "each seed has a server")
        assert nodes[3].server() is None
        ref = planes[0].put({"x": [1, 2]})
        assert planes[3].get(ref)["x"].to_list() == [1, 2]

        server = eventually(nodes[1].server)
        directory = Path(next(each for each in server.cmdline() if "--data-dir=" in each).partition("=")[2]).parent
        seed = next(each for each in server.cmdline() if "--name=" in each).partition("=")[2]
        server.kill()
        again = eventually(lambda: (found := nodes[1].server()) and found.pid != server.pid and found, "it runs again")
        nodes[1].end(signal.SIGKILL)
        assert again
        eventually(lambda: not again.is_running() or again.status() == psutil.STATUS_ZOMBIE, "it ends with its node")
        others = [planes[0], *planes[2:]]
        eventually(lambda: any(len(members(each)) == 3 for each in others), "the next node has seen it end", 40)
        assert others[0].get(ref)["x"].to_list() == [1, 2]

    for lost in (False, True):  # it comes back; then without its directory
        nodes[1].end()
        if lost:
            shutil.rmtree(directory)
        nodes[1] = Seeded(nodes[1].directory, key, seeds)
        with dp.connect(nodes[1].address) as back, dp.connect(nodes[0].address) as other:
            together_soon(back, other)
            eventually(lambda: answers(seed, key), "its server has joined", 40)


def together_soon(*planes: Any) -> None:
    names = {plane.stats().node for plane in planes}
    eventually(lambda: all(names <= members(plane) for plane in planes), "they know each other", 40)


def answers(seed: str, key: Path) -> bool:
    """Whether this one server has a majority with it."""

    async def ask() -> bool:
        client = EtcdCoordinator([seed], "dataplane", tls=certificates(auth.load(key), []).client(), timeout_s=2)
        try:
            return await client.read("seeds") is not None
        except dp.Retryable:
            return False
        finally:
            await client.aclose()

    return asyncio.run(ask())


def test_seed_servers_refuse_clients_without_the_key(tmp_path: Path, key: Path, nodes: list[Seeded]) -> None:
    [seed] = ports(1)
    nodes.append(Seeded(tmp_path / "0", key, seed))
    eventually(lambda: answers(seed, key), "it answers its own", 40)
    auth.generate(tmp_path / "other")
    assert not answers(seed, tmp_path / "other")
    bare = ssl.create_default_context()
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    for port in (0, 1):
        host, _, first = seed.rpartition(":")
        for scheme in ("http", "https"):
            with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
                urllib.request.urlopen(f"{scheme}://{host}:{int(first) + port}/version", timeout=5, context=bare).read()
    command = psutil.Process(nodes[0].process.pid).children()[0].cmdline()
    assert not any("PRIVATE" in each or auth.load(key).secret.decode() in each for each in command)


def test_seeds_that_differ_are_refused_and_nothing_is_overwritten(
    tmp_path: Path, key: Path, nodes: list[Seeded]
) -> None:
    one, two, three = ports(3)
    nodes.append(Seeded(tmp_path / "0", key, one))
    eventually(lambda: answers(one, key), "it answers", 40)
    nodes.append(other := Seeded(tmp_path / "1", key, f"{one},{two},{three}", "elsewhere"))  # a list with others in it
    assert other.process.wait(4 * WAIT_S) == 1
    assert "give every host the same list" in other.said()
    nodes[0].end()
    marked = tmp_path / "etcd" / f"dataplane-seed-{os.getuid()}-{one.replace(':', '-')}" / "seeds.json"
    before = marked.read_bytes()
    auth.generate(tmp_path / "other")
    others = [(key, f"{one},{two},{three}"), (key, f"{one}/another"), (tmp_path / "other", one)]
    for its_key, seeds in others:
        nodes.append(refused := Seeded(tmp_path / "0", its_key, seeds))
        assert refused.process.wait(4 * WAIT_S) == 1
        assert "holds the etcd of another cluster" in refused.said()
        assert "Traceback" not in refused.said()
    assert marked.read_bytes() == before

"""Hosts for tests: network namespaces joined in one network, a node in each, and links that can be cut.

Needs to be root and to have `ip` (Debian's iproute2); `needs_namespaces` skips where that is not so.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from bench.namespaces import enter
from dataplane.config import ClusterConfig, NodeConfig
from dataplane.node.node import NodeServer, run
from dataplane.wire import auth
from tests.processes import Worker

_numbers = itertools.count(1)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@functools.cache
def _why_not() -> str:
    if shutil.which("ip") is None:
        return "`ip` is not installed"
    try:
        ip("netns", "add", f"dptest{os.getpid()}")
        ip("netns", "del", f"dptest{os.getpid()}")
    except subprocess.CalledProcessError as error:
        return f"network namespaces may not be made here: {error.stderr.decode().strip()}"
    return ""


needs_namespaces = pytest.mark.skipif(bool(_why_not()), reason=_why_not())


def mute(namespace: str, address: str, how: str = "add") -> None:
    """Lose what is sent from the namespace to the address, until it is said again to `del` that."""
    ip("-n", namespace, "route", how, "blackhole", f"{address}/32")


class Host(Worker):
    """A namespace with a node in it. `cut` and `heal` are of its link, `mute_to` of one direction."""

    def __init__(self, name: str, address: str, directory: Path, key: Path, seeds: str, memory: str) -> None:
        self.name = name
        self.ip = address
        settings = {"memory": memory, "spill": 0, "prewarm": 0}
        cluster = {
            "listen": f"tcp://{address}:7000",
            "key": key,
            "seeds": seeds,
            "seed_dir": directory / f"{name}.etcd",
        }
        super().__init__(_serve, name, directory / f"{name}.sock", settings, cluster)
        try:
            self.address: str = self.hear()
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def cut(self) -> None:
        ip("-n", self.name, "link", "set", self.name, "down")

    def heal(self) -> None:
        ip("-n", self.name, "link", "set", self.name, "up")

    def mute_to(self, other: Host) -> None:
        """What this host sends to the other is lost; what that sends, comes."""
        mute(self.name, other.ip)

    def speak_to(self, other: Host) -> None:
        mute(self.name, other.ip, how="del")

    def slow_down(self, rate: str) -> None:
        """Send no more than so much, as `tc` writes it: 1gbit."""
        command = ["tc", "qdisc", "replace", "dev", self.name, "root", "tbf", "rate", rate, "burst", "64kb"]
        subprocess.run(["ip", "netns", "exec", self.name, *command, "latency", "50ms"], check=True, capture_output=True)

    def received(self) -> int:
        """Bytes that have come over its link."""
        path = f"/sys/class/net/{self.name}/statistics/rx_bytes"
        found = subprocess.run(["ip", "netns", "exec", self.name, "cat", path], check=True, capture_output=True)
        return int(found.stdout)


def _serve(pipe: Connection, name: str, path: Path, settings: dict[str, Any], cluster: dict[str, Any]) -> None:
    enter(name)
    node = NodeServer(NodeConfig(**settings), path, ClusterConfig(**cluster))

    def tell() -> None:
        try:
            pipe.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe._pipe.fileno())  # type: ignore[attr-defined]
            return
        membership = getattr(node.hosts, "membership", None)
        pipe.send(membership is not None and membership.coordination.answers)

    def ready() -> None:
        asyncio.get_running_loop().add_reader(pipe._pipe.fileno(), tell)  # type: ignore[attr-defined]
        pipe.send(node.address)

    run(node, ready=ready)


@contextmanager
def switched(switch: str, names: Sequence[str], net: str) -> Iterator[None]:
    """Namespaces of these names on one switch; the addresses in them are `net`.1, .2 and so on."""
    with ExitStack() as undo:
        ip("netns", "add", switch)
        undo.callback(ip, "netns", "del", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for i, name in enumerate(names, 1):
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("link", "add", name, "netns", name, "type", "veth", "peer", "name", f"port{i}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{i}", "master", "switch")
            ip("-n", switch, "link", "set", f"port{i}", "up")
            ip("-n", name, "addr", "add", f"{net}.{i}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield


@contextmanager
def hosts(count: int, directory: Path, memory: str = "64MiB") -> Iterator[list[Host]]:
    """So many hosts on one switch; the first one or three run the cluster's etcd, so that of three any may go."""
    key = directory / "key"
    auth.generate(key)
    number = next(_numbers)
    names = [f"dp{os.getpid() % 100000}x{number}{letter}" for letter in "abcdefgh"[:count]]
    bridge = f"{names[0]}s"
    net = f"10.{78 + number % 100}.{os.getpid() % 250}"
    with ExitStack() as undo:
        undo.enter_context(switched(bridge, names, net))
        addresses = [f"{net}.{i}" for i in range(1, count + 1)]
        seeds = ",".join(addresses[: 3 if count >= 3 else 1])
        pairs = zip(names, addresses, strict=True)
        yield [undo.enter_context(Host(name, address, directory, key, seeds, memory)) for name, address in pairs]

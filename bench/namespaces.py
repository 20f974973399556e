"""Hosts made of network namespaces on one machine: links and switches between them, and a node in each.

Needs root and `ip`; `why_not` says what is missing. Invariants: namespaces and nodes are gone when their context ends.
Names contain this process's id, so two runs do not share any.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dataplane as dp

_CLONE_NEWNET = 0x40000000
_STOP_S = 10.0
_numbers = itertools.count(1)

End = tuple[str, str]
"""A host's namespace, whose name its network device has too, and its IP address."""


def why_not(*tools: str) -> str:
    """The reason why namespaces or these tools cannot be used here; empty if they can."""
    missing = [tool for tool in ("ip", *tools) if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} must be installed (Debian: iproute2)"
    name = f"dp{os.getpid()}try"[-15:]
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces may not be made: {error.stderr.decode().strip() or 'root is needed'}"
    return ""


def ip(*arguments: str) -> bytes:
    """Run `ip`. Returns its output. Raises CalledProcessError."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True).stdout


def inside(name: str) -> list[str]:
    """The prefix of a command that runs in this namespace; an empty name is this namespace."""
    return ["ip", "netns", "exec", name] if name else []


def enter(name: str) -> None:
    """Move this thread, and the processes that it starts, to this namespace, if it has a name. Raises OSError."""
    if name:
        with open(f"/run/netns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), namespace.name)


def crossed(name: str) -> dict[str, int]:
    """Bytes received (`rx`) and sent (`tx`) over the host's link."""
    [found] = json.loads(ip("-n", name, "-s", "-j", "link", "show", "dev", name))
    return {way: int(found["stats64"][way]["bytes"]) for way in ("rx", "tx")}


@contextmanager
def link() -> Iterator[list[End]]:
    """Two namespaces with a link between them."""
    ends = _ends(2)
    with ExitStack() as undo:
        for name, _ in ends:
            _made(undo, name)
        (a, _), (b, _) = ends
        ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for end in ends:
            _up(end)
        yield ends


@contextmanager
def switch(count: int, rate: str = "") -> Iterator[list[End]]:
    """`count` namespaces on one switch. rate: the most that each may send, in the notation of `tc`, if given."""
    ends = _ends(count)
    bridge = f"{ends[0][0][:-1]}s"
    with ExitStack() as undo:
        for name in (bridge, *(name for name, _ in ends)):
            _made(undo, name)
        ip("-n", bridge, "link", "add", "switch", "type", "bridge")
        ip("-n", bridge, "link", "set", "switch", "up")
        for i, (name, address) in enumerate(ends):
            ip("link", "add", name, "netns", name, "type", "veth", "peer", "name", f"port{i}", "netns", bridge)
            ip("-n", bridge, "link", "set", f"port{i}", "master", "switch")
            ip("-n", bridge, "link", "set", f"port{i}", "up")
            _up((name, address))
            if rate:
                limit = ["tc", "qdisc", "add", "dev", name, "root", "tbf", "rate", rate, "burst", "64kb"]
                subprocess.run([*inside(name), *limit, "latency", "50ms"], check=True, capture_output=True)
        yield ends


def _ends(count: int) -> list[End]:
    number = next(_numbers)
    return [(f"dp{os.getpid() % 1000000}n{number}{chr(97 + i)}", f"10.77.{number}.{i + 1}") for i in range(count)]


def _made(undo: ExitStack, name: str) -> None:
    ip("netns", "add", name)
    undo.callback(ip, "netns", "del", name)


def _up(end: End) -> None:
    name, address = end
    ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
    ip("-n", name, "link", "set", name, "up")
    ip("-n", name, "link", "set", "lo", "up")


class Host:
    """A node in a namespace, or on loopback if the end has no name. `address` is for clients, `listens` for other
    nodes. It ignores Ctrl-C; its parent stops it."""

    def __init__(
        self,
        end: End,
        key: Path,
        seeds: str,
        memory: str = "2GiB",
        options: Sequence[str] = (),
        command: str = "dataplane.cli",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start the node. command: the module with the command `node`. environment: additional variables. Raises
        RuntimeError with the node's log if it does not start."""
        self.name, self.ip = end
        self.seeds = seeds
        started = [*inside(self.name), sys.executable, "-m", command, "node", "--memory", memory]
        started += ["--listen", f"tcp://{self.ip}:0", "--key", str(key), *(options or ("--spill", "0"))]
        started += ["--seeds", seeds, "--seed-dir", str(key.parent)]
        self.log = key.with_name(f"{self.name or 'node'}-{next(_numbers)}.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                started,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
                env={**os.environ, **(environment or {})},
            )
        assert self.process.stdout is not None, "it was asked for"
        self.address = self.process.stdout.readline().strip().partition("=")[2]
        if not self.address:
            self.process.communicate()
            raise RuntimeError(f"a node did not start: {self.log.read_text()}")
        try:
            with dp.connect(self.address) as plane:
                members = plane.members()["members"].values()
            [self.listens] = [str(member["address"]) for member in members if member["self"]]
        except BaseException:  # no caller can stop it yet
            self.stop()
            raise

    def received(self) -> int:
        """Bytes received over the link."""
        return crossed(self.name)["rx"]

    def sent(self) -> int:
        """Bytes sent over the link."""
        return crossed(self.name)["tx"]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to the node, and wait for its end; kill it after `_STOP_S` seconds. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.communicate(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()


def seeds_at(ends: Sequence[End]) -> str:
    """The value of `--seeds` for an etcd server at each of these ends, with random ports."""
    ports: set[int] = set()
    while len(ports) < len(ends):
        ports |= {random.randrange(10_000, 32_000, 2)}  # below the ephemeral ports
    return ",".join(f"{address}:{port}" for (_, address), port in zip(ends, ports, strict=True))


def keygen(directory: Path) -> Path:
    """The file of the cluster's key in this directory. It is created if it does not exist."""
    key = directory / "cluster.key"
    if not key.exists():
        subprocess.run([sys.executable, "-m", "dataplane.cli", "keygen", str(key)], check=True, capture_output=True)
    return key


@contextmanager
def nodes(ends: Sequence[End], directory: Path, seeds: int = 1, **settings: Any) -> Iterator[list[Host]]:
    """Nodes of one cluster at these ends; the first `seeds` of them run its etcd. settings: other arguments of
    `Host`."""
    key, at = keygen(directory), seeds_at(ends[:seeds])
    with ExitStack() as undo:
        made: list[Host] = []
        for end in ends:
            made.append(Host(end, key, at, **settings))
            undo.callback(made[-1].stop)
        yield made


def together(planes: Sequence[Any], wait_s: float = 20.0) -> None:
    """Wait until the nodes of all planes know each other. Raises TimeoutError after `wait_s` seconds."""
    deadline = time.monotonic() + wait_s
    while min(len(plane.members().get("members", ())) for plane in planes) < len(planes):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the nodes do not know each other after {wait_s:.0f} s")
        time.sleep(0.05)

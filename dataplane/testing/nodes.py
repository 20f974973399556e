"""Nodes for tests: one in this process, with a small memory and no disk; and one in a process that can be killed.

Invariants: a node has ended, and left nothing behind, at the end of its `with` block. Spill files of a killed node
stay, as after any crash, until the next node starts in that directory.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from dataplane.client.embedded import Launched
from dataplane.client.sync import Plane, connect
from dataplane.clock import Clock, monotonic
from dataplane.config import NodeConfig, environment, export_address
from dataplane.errors import PeerUnavailable
from dataplane.node.node import NodeServer
from dataplane.testing.clock import ManualClock
from dataplane.wire.local import parse_address

MEMORY = "16MiB"
"""The default memory budget of a node for tests."""

_SETTINGS: dict[str, Any] = {"memory": MEMORY, "spill": 0, "prewarm": 0}
_WAIT_S = 60.0
_STEPS = 16  # turns of the node's loop, after which timers that a moved clock made due have run


class _Loop(asyncio.SelectorEventLoop):
    """An event loop with a clock that a test advances: timers that become due run at once."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return self._clock()


class LocalNode:
    """A node in a thread of this process. Created by `node`, or as a context manager.

    It has no spill and a small memory, and takes some milliseconds to start and to end. `address`: for `connect`.
    Time passes as usual; `advance` moves it forward, for leases and all other timers. `settings` are those of
    `NodeConfig`.
    """

    def __init__(self, **settings: Any) -> None:
        """Raises as `NodeConfig`, and the error of a node that does not start."""
        self._starter = os.getpid()
        self._directory = Path(tempfile.mkdtemp(prefix="dataplane-test-", dir=environment().runtime_dir))
        self._clock = ManualClock(base=monotonic)
        self._loop = _Loop(self._clock)
        self._stop = asyncio.Event()
        self._started: threading.Event = threading.Event()
        self._failed: list[BaseException] = []
        try:
            config = NodeConfig(**(_SETTINGS | settings))
            self._node = NodeServer(config, self._directory / "node.sock", clock=self._clock)
        except BaseException:
            self._loop.close()
            shutil.rmtree(self._directory)
            raise
        self.address = self._node.address
        self._thread = threading.Thread(target=self._run, name="dataplane-test-node", daemon=True)
        self._thread.start()
        started = self._started.wait(_WAIT_S)
        if self._failed or not started:
            self.stop()
            late = PeerUnavailable(f"the node did not start in {_WAIT_S:g} s", address=self.address)
            raise self._failed[0] if self._failed else late

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._node.serve(self._stop, self._started.set))
        except BaseException as error:
            self._failed.append(error)
        finally:
            self._node.abandon()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
            self._started.set()

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass at once, for the node only. Timers that are due by then have run when this returns:
        leases have run out, and their rows can be consumed again. Deadlines of a client's calls use its own clock."""
        self._clock.advance(seconds)
        asyncio.run_coroutine_threadsafe(self._settle(), self._loop).result(_WAIT_S)

    async def _settle(self) -> None:
        for _ in range(_STEPS):
            await asyncio.sleep(0)

    def stop(self) -> None:
        """End the node in order; its clients are notified. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._starter:
            return
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_WAIT_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> LocalNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextmanager
def node(**settings: Any) -> Iterator[LocalNode]:
    """A context with a node in this process. Within it, `DATAPLANE_ADDRESS` names the node: code under test that calls
    `dp.connect()`, in this process or in a child, attaches to it."""
    before = environment().address
    with LocalNode(**settings) as local:
        export_address(local.address)
        try:
            yield local
        finally:
            export_address(before)


@contextmanager
def plane(**settings: Any) -> Iterator[Plane]:
    """A context with a plane on a node in this process."""
    with node(**settings) as local, connect(local.address) as connected:
        yield connected


class NodeProcess:
    """A node in a process of its own, which a test can kill or stop. A context manager; it ends with this process.

    `address`: for `connect`; `pid`: the process. `settings` are those of `NodeConfig`.
    """

    def __init__(self, **settings: Any) -> None:
        """Start it and wait until it answers, some tenths of a second. Raises as `dataplane.connect`."""
        self._launched = Launched(NodeConfig(**(_SETTINGS | settings)))
        self.address: str = self._launched.address
        self.pid = self._launched.process.pid

    def kill(self) -> None:
        """End it as by a crash (SIGKILL), and wait for its end. Idempotent."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Stop it (SIGSTOP): it answers no request until `thaw`, and its connections stay open."""
        self._launched.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        """Continue it."""
        self._launched.process.send_signal(signal.SIGCONT)

    def _end(self, how: signal.Signals) -> None:
        if not self._launched.ended:
            self._launched.process.send_signal(how)
            self._launched.process.wait()
        shutil.rmtree(parse_address(self.address).parent, ignore_errors=True)  # where it had its socket

    def __enter__(self) -> NodeProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._launched.ended:
            self.thaw()
        self._launched.stop()
        self._end(signal.SIGKILL)

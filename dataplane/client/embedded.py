"""Nodes started by the process that uses them, for itself and its children (`EmbeddedNode`) or in a cluster.

If `connect()` finds no address in the environment, it starts a node and exports the node's address there. Other planes
of the process, and its children, then connect to the same node.

Invariants: the node watches this process, and ends with it, even if the process is killed. If the plane that started
the node is closed first, the node ends once no process is connected. A view of a closed plane counts as a connection. A
forked child never stops its parent's node.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.config import ClusterConfig, NodeConfig, environment, export_address
from dataplane.errors import DataplaneError, PeerUnavailable, Rejected
from dataplane.wire.local import connect, format_address, is_address

if TYPE_CHECKING:
    from dataplane.store.directory_claim import DirectoryClaim

_START_S = 20.0  # seconds to wait for a node's start; imports take long on a busy machine
_STOP_S = 2.0
_LET_GO = "import os, sys; os.fork() or os.execv(sys.argv[1], sys.argv[1:])"
_NODES = "dataplane-{uid}-*/node.sock"  # the sockets in the runtime directory of nodes started without a path


def find(given: str | None) -> str:
    """The given address or, if None, $DATAPLANE_ADDRESS; without either, the address of this user's only node on this
    host. Raises ValueError if this user has no node here, or several."""
    address = given or environment().address
    if address is not None:
        return address
    found = sorted(map(format_address, _nodes(Path(environment().runtime_dir))))
    if len(found) == 1:
        return found[0]
    if not found:
        where = f"no node of yours was found in {environment().runtime_dir}"
        raise ValueError(f"which node? Give its address, or set DATAPLANE_ADDRESS; `dataplane node` prints it; {where}")
    raise ValueError(f"which node? Give the address of one of yours: {', '.join(found)}")


def _nodes(runtime: Path) -> Iterator[Path]:
    """The sockets in the runtime directory of this user's nodes that accept connections."""
    for path in runtime.glob(_NODES.format(uid=os.getuid())):
        with suppress(DataplaneError, OSError), connect(path):
            yield path


class Launched:
    """A running node that is a child of this process. `address`: the address for `connect`."""

    def __init__(self, config: NodeConfig) -> None:
        """Start the node's process and wait until it answers. Raises Rejected, with the reason, if the node cannot meet
        the settings; PeerUnavailable if it does not start."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = node_command(config, theirs)
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
            theirs.close()
            try:
                (self.address,) = first_words(ours, 1)
            except BaseException:
                self.process.kill()
                self.process.wait()
                raise

    @property
    def ended(self) -> bool:
        """Whether the node's process has ended. Reaps it."""
        return self.process.poll() is not None

    def stop(self) -> None:
        """Terminate the node, and wait up to `_STOP_S` for its end. Idempotent."""
        if not self.ended:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_STOP_S)


def node_command(config: NodeConfig, ready: socket.socket, *more: str) -> list[str]:
    """The command line of a node that ends with this process, and reports its address on `ready` when it runs."""
    command = [sys.executable, "-m", "dataplane.node", json.dumps(asdict(config)), str(os.getpid())]
    return [*command, str(ready.fileno()), *more]


def first_words(node: socket.socket, lines: int) -> Sequence[str]:
    """The `lines` lines that a node reports when it has started; the first is its address. Raises as `Launched`."""
    node.settimeout(_START_S)
    words = ""
    with suppress(OSError):  # no report came in time, or the node has ended
        words = node.recv(4096).decode(errors="replace")
    said = words.split("\n")
    if len(said) == lines and is_address(said[0]):
        return said
    if words:
        raise Rejected(f"the node did not start: {words}")
    raise PeerUnavailable("the node did not start; see its output for the reason")


class EmbeddedNode(Launched):
    """A running node that this process started, at `address`."""

    def __init__(self, config: NodeConfig) -> None:
        """Start the node, wait until it answers, and export its address. Raises as `Launched`."""
        super().__init__(config)
        self._starter = os.getpid()
        _running.append(self)
        export_address(self.address)

    async def retire(self, *, wait: bool = True) -> None:
        """Let the node end once no process is connected. `wait`: whether to wait up to `_STOP_S` for its end."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def reaped() -> None:
            with suppress(RuntimeError):  # the loop was closed before
                loop.call_soon_threadsafe(ended.set)

        if self.abandon(reaped) and wait:
            with suppress(TimeoutError):
                async with asyncio.timeout(_STOP_S):
                    await ended.wait()

    def abandon(self, reaped: Callable[[], None] = lambda: None) -> bool:
        """Let the node end once no process is connected, which may be long after. A thread then reaps it and calls
        `reaped`. Returns False, and does nothing, in a forked child. Any thread may call this."""
        self.forget()
        if os.getpid() != self._starter:
            return False
        self.process.send_signal(signal.SIGUSR1)
        _retired.append(self)
        threading.Thread(target=self._reap, args=(reaped,), name="dataplane-reaper", daemon=True).start()
        return True

    def _reap(self, reaped: Callable[[], None]) -> None:
        self.process.wait()
        _retired.remove(self)
        reaped()

    def forget(self) -> None:
        """Remove the node from those that `connect` finds in this process and its children."""
        if self in _running:
            _running.remove(self)
            export_address(_running[-1].address if _running else None)

    def stop(self) -> None:
        """Terminate the node. Does nothing in a forked child."""
        if os.getpid() == self._starter:
            super().stop()

    @property
    def died(self) -> bool:
        """Whether the node has ended. False in a forked child."""
        return os.getpid() == self._starter and self.ended


_running: list[EmbeddedNode] = []
_retired: list[EmbeddedNode] = []
_starting = threading.Lock()
os.register_at_fork(after_in_child=_starting._at_fork_reinit)  # type: ignore[attr-defined]  # it may have been held


def find_or_start(config: NodeConfig | None) -> tuple[str, EmbeddedNode | None]:
    """Find the node's address in the environment, else start a node. Returns the address, and the node if started. With
    settings, a node is also started if the address is of a node that this process or its parent started. One thread at
    a time does this, so that threads that connect at once use one node."""
    with _starting:
        for node in list(_running):
            if node.died:
                node.forget()
        address = environment().address
        ours = any(node.address == address for node in _running)  # `_running` has the nodes of a forking parent too
        if address is not None and not (config and ours):
            return address, None
        started = EmbeddedNode(config or NodeConfig())
        return started.address, started


def _stop_all() -> None:
    for node in (*_running, *_retired):
        node.stop()


atexit.register(_stop_all)


class ClusterNode:
    """A running node of a cluster, started by this process. `address`: the address for clients. `listens`: the address
    for other nodes.

    The node watches this process, ends gracefully with it, and removes its files. An intermediate process starts the
    node, so that it is no child of this process, because Ray ends the children of its workers by SIGKILL. The node
    inherits the cluster's key in memory. The key is in no file, and on no command line.
    """

    def __init__(self, config: NodeConfig, cluster: ClusterConfig, key: bytes) -> None:
        """Start the node and wait until it answers. `key`: the content of a key file, used in place of `cluster.key`.
        Raises as `Launched`."""
        self._open, theirs = socket.socketpair()  # the node ends when this end is closed
        held = _in_memory(key)
        try:
            with theirs:
                cluster = replace(cluster, key=f"/dev/fd/{held}")
                command = node_command(config, theirs, json.dumps(asdict(cluster)))
                subprocess.run(
                    [sys.executable, "-I", "-S", "-c", _LET_GO, *command],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), held],
                    start_new_session=True,
                    check=True,
                )
            self.address, self.listens, pid = first_words(self._open, 3)
            self._process = os.pidfd_open(int(pid))
        except BaseException:
            self._open.close()  # ends the node, if it runs
            raise
        finally:
            os.close(held)

    def wait(self) -> None:
        """Wait until the node has ended."""
        self._ended(None)

    def _ended(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """Terminate the node, and kill it if it has not ended after `_STOP_S`. Idempotent."""
        if self._process < 0:
            return
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGTERM)
            if not self._ended(_STOP_S):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
        self._open.close()
        os.close(self._process)
        self._process = -1


def claimed_directory() -> DirectoryClaim:
    """Create a directory for the etcd of a cluster that ends with this process."""
    from dataplane.store.directory_claim import DirectoryClaim  # for clusters only

    return DirectoryClaim(Path(environment().spill_dir), f"dataplane-etcd-{os.getuid()}")


def new_key() -> bytes:
    """The content of a key file with a new key."""
    from dataplane.wire import auth  # imports ZeroMQ, which only a cluster needs

    return auth.new()


def _in_memory(content: bytes) -> int:
    """A descriptor of an unnamed file, readable by this user only."""
    descriptor = os.memfd_create("key", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, content)
    return descriptor

"""A node's process, started by this one: it ends with it, however that ends, since it watches this process itself.

Over a socket that both share, the node says its address once it can be connected to, or why it does not start.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from dataplane.config import NodeConfig
from dataplane.errors import PeerUnavailable, Rejected
from dataplane.wire.local import is_address

_START_S = 20.0  # on a machine that is busy with other imports
_STOP_S = 2.0


class Launched:
    """A running node, a child of this process. `address` is what to connect to."""

    def __init__(self, config: NodeConfig) -> None:
        """Start it and wait until it answers. Raises Rejected where it can not meet the settings, saying why;
        PeerUnavailable where it does not come up."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = node_command(config, theirs)
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
            theirs.close()
            try:
                (self.address,) = first_words(ours, 1)
            except BaseException:
                self._process.kill()
                self._process.wait()
                raise

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether its process has ended (and is reaped)."""
        return self._process.poll() is not None

    def signal(self, what: int) -> None:
        """Send its process a signal."""
        self._process.send_signal(what)

    def wait(self) -> None:
        """Wait until its process has ended."""
        self._process.wait()

    def stop(self) -> None:
        """End it now. Idempotent."""
        if not self.ended:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_S)


def node_command(config: NodeConfig, ready: socket.socket, *more: str) -> list[str]:
    """What runs a node that ends with this process, and says on `ready` that it runs."""
    command = [sys.executable, "-m", "dataplane.node", json.dumps(asdict(config)), str(os.getpid())]
    return [*command, str(ready.fileno()), *more]


def first_words(node: socket.socket, lines: int) -> Sequence[str]:
    """What a node says that runs, in so many lines, of which the first is its address. Raises as `Launched`."""
    node.settimeout(_START_S)
    words = ""
    with suppress(OSError):  # no word in time, or it has ended
        words = node.recv(4096).decode(errors="replace")
    said = words.split("\n")
    if len(said) == lines and is_address(said[0]):
        return said
    if words:
        raise Rejected(f"the node did not start: {words}")
    raise PeerUnavailable("the node did not start; what it printed says why")

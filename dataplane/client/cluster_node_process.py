"""A node of a cluster, started by this process.

It watches this process, and ends with it gracefully, removing its files. It must not be a child of this process,
because Ray ends the children of its workers by SIGKILL; so an intermediate process starts it, and ends.

It inherits the cluster's key in memory: the key is in no file, and on no command line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from dataplane.client.embedded import first_words, node_command
from dataplane.config import ClusterConfig, NodeConfig, environment
from dataplane.store.directory_claim import DirectoryClaim

_LET_GO = "import os, sys; os.fork() or os.execv(sys.argv[1], sys.argv[1:])"
_STOP_S = 2.0


class ClusterNode:
    """A running node. `address`: for clients; `listens`: for other nodes."""

    def __init__(self, config: NodeConfig, cluster: ClusterConfig, key: bytes) -> None:
        """Start it and wait until it answers. `key` is the content of a key file; `cluster.key` is not used.

        Raises Rejected with the reason if it cannot meet the settings; PeerUnavailable if it does not start.
        """
        self._open, theirs = socket.socketpair()  # it ends when this end is closed
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
            self._open.close()  # which ends it, if it runs
            raise
        finally:
            os.close(held)

    def wait(self) -> None:
        """Wait until it has ended."""
        self._ended(None)

    def _ended(self, timeout_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))

    def close(self) -> None:
        """End it now. Idempotent."""
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
    """A new directory for the etcd of a cluster that ends with this process."""
    return DirectoryClaim(Path(environment().spill_dir), f"dataplane-etcd-{os.getuid()}")


def new_key() -> bytes:
    """The content of a key file with a new key."""
    from dataplane.wire import auth  # with ZeroMQ, which a host alone does not need

    return auth.new()


def _in_memory(content: bytes) -> int:
    """A descriptor of an unnamed file, readable by this user only."""
    descriptor = os.memfd_create("key", os.MFD_CLOEXEC)
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, content)
    return descriptor

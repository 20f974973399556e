"""The process of a node that another process started: `python -m dataplane.node CONFIG STARTER READY [CLUSTER]`, for
`client.launch` and `client.hosted` alone.

CONFIG is a `NodeConfig` as JSON, STARTER the process to end with, READY a socket to say the address on, or why the node
does not start. With CLUSTER, a `ClusterConfig` as JSON, it is one of several: it says in two more lines where others
find it, and its process, and hears on READY where they listen, a JSON list a line. It ends when the other end does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys

from dataplane.config import ClusterConfig, NodeConfig
from dataplane.errors import DataplaneError
from dataplane.node.node import Node, run

_MAX_REASON = 4000  # bytes: a socket takes them at once


def main() -> None:
    """Run a node until its starter ends."""
    config, starter = NodeConfig(**json.loads(sys.argv[1])), int(sys.argv[2])
    ready = socket.socket(fileno=int(sys.argv[3]))
    logging.basicConfig(format="dataplane node: %(message)s", level=logging.WARNING)
    said = False

    def say() -> None:
        nonlocal said
        said = True
        if node.hosts is None:
            ready.send(node.address.encode())
            ready.close()
        else:
            ready.send(f"{node.address}\n{node.hosts.address}\n{os.getpid()}".encode())
            _Heard(node, ready)

    try:
        cluster = ClusterConfig(**json.loads(sys.argv[4])) if len(sys.argv) > 4 else None
        node = Node(config, cluster=cluster)
        run(node, starter=starter, ready=say)
    except (OSError, ValueError, DataplaneError) as error:  # a setting that this host can not meet
        if said:
            raise
        ready.send(str(error).encode(errors="replace")[:_MAX_REASON])
        sys.exit(1)


class _Heard:
    """What the starter says, line by line, until it says no more."""

    def __init__(self, node: Node, starter: socket.socket) -> None:
        self._node = node
        self._starter = starter
        self._unread = b""
        starter.setblocking(False)
        asyncio.get_running_loop().add_reader(starter.fileno(), self._more)

    def _more(self) -> None:
        try:
            part = self._starter.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        *lines, self._unread = (self._unread + part).split(b"\n")
        if lines and self._node.hosts is not None:
            self._node.hosts.seek(json.loads(lines[-1]))  # the newest is what holds
        if not part:
            asyncio.get_running_loop().remove_reader(self._starter.fileno())
            self._starter.close()
            signal.raise_signal(signal.SIGTERM)


main()

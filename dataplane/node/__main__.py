"""The process of a node that another process starts: `python -m dataplane.node CONFIG STARTER READY [CLUSTER]`. Used by
`client.embedded` only.

CONFIG is a `NodeConfig` as JSON. The node ends with the process STARTER. It writes its address, or the reason why it
does not start, to the socket READY. With CLUSTER, a `ClusterConfig` as JSON, the node joins a cluster: it writes two
more lines, the address for other nodes and its process, and ends when the other end of READY is closed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

from dataplane.config import ClusterConfig, NodeConfig
from dataplane.errors import DataplaneError
from dataplane.node.node import NodeServer, run
from dataplane.store.directory_claim import DirectoryClaim

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
            _end_with(ready)

    try:
        cluster = ClusterConfig(**json.loads(sys.argv[4])) if len(sys.argv) > 4 else None
        node = NodeServer(config, cluster=cluster)
        try:
            run(node, starter=starter, ready=say)
        finally:
            if cluster is not None and cluster.seed_dir is not None:
                _sweep(Path(cluster.seed_dir))
    except (OSError, ValueError, DataplaneError) as error:  # a setting that this host can not meet
        if said:
            raise
        ready.send(str(error).encode(errors="replace")[:_MAX_REASON])
        sys.exit(1)


def _sweep(seed_dir: Path) -> None:
    """Remove the directory of the etcd if it was claimed by a process that has ended (`client.embedded`)."""
    if seed_dir.exists():
        with suppress(OSError):
            DirectoryClaim(
                seed_dir.parent, seed_dir.name.rpartition("-")[0]
            ).release()  # a claim removes directories of processes that have ended


def _end_with(starter: socket.socket) -> None:
    """End this process when the other end is closed."""

    def closed() -> None:
        asyncio.get_running_loop().remove_reader(starter.fileno())
        starter.close()
        signal.raise_signal(signal.SIGTERM)

    asyncio.get_running_loop().add_reader(starter.fileno(), closed)


main()

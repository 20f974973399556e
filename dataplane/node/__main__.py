"""The process of an embedded node: `python -m dataplane.node CONFIG STARTER READY`, for `client.embedded` alone.

CONFIG is a `NodeConfig` as JSON, STARTER the process to end with, READY the descriptor to say the address on, or
why the node does not start.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from dataplane.config import NodeConfig
from dataplane.node.node import Node, run

_MAX_REASON = 4000  # bytes: a pipe takes them at once


def main() -> None:
    """Run a node until its starter ends."""
    config, starter, ready = NodeConfig(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(format="dataplane node: %(message)s", level=logging.WARNING)
    try:
        node = Node(config)
    except OSError as error:  # a setting that this host can not meet
        os.write(ready, str(error).encode(errors="replace")[:_MAX_REASON])
        sys.exit(1)

    def say() -> None:
        os.write(ready, node.address.encode())
        os.close(ready)

    run(node, starter=starter, ready=say)


main()

"""The process of an embedded node: `python -m dataplane.node CONFIG STARTER READY`, for `client.embedded` alone.

CONFIG is a `NodeConfig` as JSON, STARTER the process to end with, READY the descriptor to say the address on.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from dataplane.config import NodeConfig
from dataplane.node.node import Node, run


def main() -> None:
    """Run a node until its starter ends."""
    config, starter, ready = NodeConfig(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(format="dataplane node: %(message)s", level=logging.WARNING)
    node = Node(config)

    def say() -> None:
        os.write(ready, node.address.encode())
        os.close(ready)

    run(node, starter=starter, ready=say)


main()

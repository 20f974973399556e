"""The `dataplane` command: `dataplane node` runs a node, `dataplane status` shows what one does.

Exit codes: 0; 1 where the node does not answer or refuses; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dataplane import __version__
from dataplane.config import NodeConfig, environment, format_size
from dataplane.errors import DataplaneError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` (else the command line) give; its exit code."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
    except ValueError as error:
        parser.error(str(error))
    except (DataplaneError, OSError) as error:
        print(f"dataplane {chosen.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dataplane", description="A data plane for RL post-training.")
    parser.add_argument("--version", action="version", version=f"dataplane {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    node = commands.add_parser("node", help="run this host's node until it is stopped")
    node.add_argument("--socket", type=Path, metavar="PATH", help="where to listen (default: a directory of its own)")
    node.add_argument("--memory", metavar="SIZE", help="shared memory, e.g. 8GiB (default: 30 %% of the memory)")
    node.add_argument("--spill", metavar="SIZE", help="disk, 0 for none (default: 4 x memory, half of what is free)")
    node.add_argument("--spill-dir", metavar="PATH", help="where on disk (default: $DATAPLANE_SPILL_DIR, /var/tmp)")
    node.add_argument("--prewarm", metavar="SIZE", help="memory made ready for the first client (default: 512MiB)")
    node.add_argument("--verbose", action="store_true", help="log more than warnings")
    node.set_defaults(run=_node)

    status = commands.add_parser("status", help="show a node's memory, disk, pins and waiters")
    status.add_argument("address", nargs="?", help="its address (default: $DATAPLANE_ADDRESS)")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(run=_status)
    return parser


def _node(chosen: argparse.Namespace) -> int:
    from dataplane.node.node import Node, run

    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO if chosen.verbose else logging.WARNING
    )
    config = NodeConfig(memory=chosen.memory, spill=chosen.spill, spill_dir=chosen.spill_dir, prewarm=chosen.prewarm)
    node = Node(config, chosen.socket.absolute() if chosen.socket else None)

    def ready() -> None:
        print(f"DATAPLANE_ADDRESS={node.address}", flush=True)
        sizes = f"memory {format_size(config.memory_bytes)}, spill {format_size(config.spill_bytes)}"
        print(f"{sizes} in {config.spill_dir}; stop with Ctrl-C", file=sys.stderr)

    run(node, ready=ready)
    return 0


def _status(chosen: argparse.Namespace) -> int:
    from dataplane.client.plane import Connecting
    from dataplane.observe.stats import Stats
    from dataplane.observe.status import status_text

    address = chosen.address or environment().address
    if address is None:
        raise ValueError("which node? Give its address, or set DATAPLANE_ADDRESS; `dataplane node` prints it")

    async def ask() -> Stats:
        async with Connecting(address, None, writes=False) as plane:
            return await plane.stats()

    stats = asyncio.run(ask())
    print(json.dumps(asdict(stats)) if chosen.json else status_text(stats))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The `dataplane` command: `dataplane node` runs a node, `dataplane status` shows its figures once, `dataplane top`
shows them live in the terminal, and `dataplane web` in a browser. `dataplane diagnose` explains the duration of a step,
and `dataplane plan` plans a pipeline. `dataplane record` writes a stream's rows to a directory, and `dataplane replay`
appends them to a new stream.

Exit codes: 0; 1 if the node does not answer or refuses; 2 for a wrong command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataplane import __version__
from dataplane.client import command as recording
from dataplane.config import ClusterConfig, NodeConfig, format_size
from dataplane.diagnosis import command as diagnosis
from dataplane.errors import DataplaneError, Misuse
from dataplane.pipeline import command as planning
from dataplane.web import command as web

if TYPE_CHECKING:
    from dataplane.client.connecting import Connecting
    from dataplane.client.plane import AsyncPlane
    from dataplane.node.node import NodeServer


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of `arguments` (else of the command line). Returns its exit code."""
    parser = _parser()
    chosen, rest = parser.parse_known_args(arguments)
    if len(rest) == 1 and not rest[0].startswith("-") and getattr(chosen, "address", "") is None:
        chosen.address = rest.pop()  # after DIR and an option: argparse took it as left out when it met DIR
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        code: int = chosen.run(chosen)
        print(end="", flush=True)
    except ValueError as error:
        parser.error(str(error))
    except BrokenPipeError:  # the reader of a pipe has ended, such as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
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
    _add_node_options(node)
    web.add_node_options(node)
    node.add_argument("--verbose", action="store_true", help="also log at level INFO")
    node.set_defaults(run=_node)

    keygen = commands.add_parser("keygen", help="generate the key of a cluster")
    keygen.add_argument("file", type=Path, help="the file to write; it must not exist")
    keygen.set_defaults(run=_keygen)

    listed = "the nodes of a cluster, the partitions that they lead and follow as far as this node knows"
    members = commands.add_parser(
        "members", help=f"list {listed}, and the coordinator", description=f"List {listed}, and the coordinator."
    )
    members.add_argument("address", nargs="?", help="a node's address (default: $DATAPLANE_ADDRESS)")
    members.add_argument("--json", action="store_true", help="as JSON")
    members.set_defaults(run=_members)

    status = commands.add_parser("status", help="show a node's memory, disk, pins, waiting requests and streams")
    status.add_argument("address", nargs="?", help="a node's address (default: $DATAPLANE_ADDRESS)")
    status.add_argument("--json", action="store_true", help="as JSON")
    status.set_defaults(run=_status)

    top = commands.add_parser("top", help="as status, live, with rates; q or Ctrl-C ends it")
    top.add_argument("address", nargs="?", help="a node's address (default: $DATAPLANE_ADDRESS)")
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between updates (default: 1)")
    top.set_defaults(run=_top)

    diagnosis.add_parser(commands, _connecting)
    web.add_parser(commands)

    planning.add_parser(commands)
    recording.add_parsers(commands)
    return parser


def _add_node_options(node: argparse.ArgumentParser) -> None:
    node.add_argument(
        "--socket", type=Path, metavar="PATH", help="the socket to listen on (default: in a new directory)"
    )
    node.add_argument("--memory", metavar="SIZE", help="shared memory, e.g. 8GiB (default: 30 %% of the host's memory)")
    node.add_argument(
        "--spill",
        metavar="SIZE",
        help="disk to spill to, 0 for none (default: 4 x memory, at most half of the free space)",
    )
    node.add_argument(
        "--spill-dir", metavar="PATH", help="directory to spill to (default: $DATAPLANE_SPILL_DIR, /var/tmp)"
    )
    node.add_argument(
        "--data-dir", metavar="PATH", help="directory of durable data; a node started again with it is the same member"
    )
    node.add_argument(
        "--prewarm", metavar="SIZE", help="memory to prepare in the background for the first client (default: 512MiB)"
    )
    node.add_argument(
        "--listen", metavar="tcp://HOST:PORT", help="join a cluster; the address to listen on for other nodes"
    )
    node.add_argument("--join", metavar="HOW", default="", help="the cluster's etcd: etcd://HOST:PORT,.../NAME")
    node.add_argument(
        "--seeds",
        metavar="HOST,...",
        default="",
        help="1, 3 or 5 hosts whose nodes run etcd; the same list on all nodes",
    )
    node.add_argument(
        "--seed-dir", metavar="PATH", help="directory of a seed's etcd (default: --data-dir, else as --spill-dir)"
    )
    node.add_argument("--key", type=Path, metavar="FILE", help="the cluster's key, made by `dataplane keygen`")
    node.add_argument(
        "--advertise",
        metavar="HOST",
        default="",
        help="the host name that other nodes connect to (default: that of --listen)",
    )
    node.add_argument(
        "--transports", metavar="NAME,...", help="transports of tcp, ucx and nixl, in order of preference"
    )
    node.add_argument("--etcd-ca", metavar="FILE", help="CA certificate of etcd's server certificate; enables TLS")
    node.add_argument("--etcd-cert", metavar="FILE", help="client certificate, if etcd requires one")
    node.add_argument("--etcd-cert-key", metavar="FILE", help="key of the client certificate, if it is in another file")
    node.add_argument(
        "--etcd-login", metavar="FILE", help="a file with one line, USER:PASSWORD, if etcd requires a login"
    )
    node.add_argument("--metrics", metavar="HOST:PORT", help="address to serve /metrics on, for Prometheus")


def _node(chosen: argparse.Namespace) -> int:
    from dataplane.node.node import NodeServer

    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO if chosen.verbose else logging.WARNING
    )
    named = {name: getattr(chosen, name) for name in ("memory", "spill", "spill_dir", "prewarm", "data_dir", "metrics")}
    config = NodeConfig(**named)
    cluster = None
    names = ("etcd_ca", "etcd_cert", "etcd_cert_key", "etcd_login", "seeds", "seed_dir")
    etcd = {name: getattr(chosen, name) for name in names}
    if chosen.listen:
        transports = tuple(filter(None, (chosen.transports or "").split(",")))
        cluster = ClusterConfig(chosen.listen, chosen.join, chosen.key, chosen.advertise, transports, **etcd)
    elif chosen.join or chosen.key or chosen.advertise or chosen.transports or any(etcd.values()):
        raise ValueError("--join, --seeds, --key, --advertise, --transports and --etcd-... go with --listen")
    with web.beside(chosen) as page:
        node = NodeServer(config, chosen.socket.absolute() if chosen.socket else None, cluster)
        _run(node, config, page)
    return 0


def _run(node: NodeServer, config: NodeConfig, page: Callable[[str], None]) -> None:
    from dataplane.node.node import run

    def ready() -> None:
        print(f"DATAPLANE_ADDRESS={node.address}", flush=True)
        if node.hosts is not None:
            print(f"address for other nodes: {node.hosts.address}", file=sys.stderr)
        if config.data_dir is not None:
            print(f"node {node.id.hex()}, durable in {config.data_dir}", file=sys.stderr)
        if node.metrics_address is not None:
            print(f"metrics at http://{node.metrics_address}/metrics", file=sys.stderr)
        sizes = f"memory {format_size(config.memory_bytes)}, spill {format_size(config.spill_bytes)}"
        print(f"{sizes} in {config.spill_dir}; stop with Ctrl-C", file=sys.stderr)
        page(node.address)

    run(node, ready=ready)


def _keygen(chosen: argparse.Namespace) -> int:
    from dataplane.wire import auth

    try:
        auth.generate(chosen.file)
    except FileExistsError:
        raise Misuse(f"{chosen.file} exists: use it as the key, or name another file") from None
    print(f"{chosen.file}: copy this key to every host; a node with it can join the cluster", file=sys.stderr)
    return 0


def _connecting(chosen: argparse.Namespace) -> Connecting:
    """A plane at the node that a command names."""
    from dataplane.client.connecting import Connecting

    return Connecting(_address(chosen), None, writes=False)


def _members(chosen: argparse.Namespace) -> int:
    from dataplane.client.connecting import Connecting
    from dataplane.observe.status import members_text

    address = _address(chosen)

    async def ask() -> dict[str, Any]:
        async with Connecting(address, None, writes=False) as plane:
            return await plane.members()

    found = asyncio.run(ask())
    if chosen.json:
        print(json.dumps(found))
        return 0
    print(members_text(found))
    return 0


def _address(chosen: argparse.Namespace) -> str:
    from dataplane.client.embedded import find

    return find(chosen.address)


def _status(chosen: argparse.Namespace) -> int:
    from dataplane.client.connecting import Connecting
    from dataplane.observe.stats import Stats
    from dataplane.observe.status import status_text

    address = _address(chosen)

    async def ask() -> Stats:
        async with Connecting(address, None, writes=False) as plane:
            return await plane.stats()

    stats = asyncio.run(ask())
    print(json.dumps(asdict(stats)) if chosen.json else status_text(stats))
    return 0


def _top(chosen: argparse.Namespace) -> int:
    from dataplane.client.connecting import Connecting
    from dataplane.observe.top import frame

    if not 0.1 <= chosen.interval <= 3600:
        raise ValueError(f"an interval is 0.1 to 3600 seconds, not {chosen.interval}")
    address = _address(chosen)

    async def show() -> None:
        async with Connecting(address, None, writes=False) as plane:
            if sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM") != "dumb":
                with _screen():
                    await _redraw(plane, chosen.interval)
            else:
                print(frame(await plane.stats(), None, 0.0, 1 << 16, 1 << 16))

    with suppress(KeyboardInterrupt):
        asyncio.run(show())
    return 0


async def _redraw(plane: AsyncPlane, interval_s: float) -> None:
    """Draw the node's figures until q, SIGINT or SIGTERM, even if the parent ignores SIGINT. A change of the terminal's
    size redraws at once."""
    from dataplane.observe.top import frame

    loop = asyncio.get_running_loop()
    over, wake = asyncio.Event(), asyncio.Event()

    def end() -> None:
        over.set()
        wake.set()

    def key() -> None:
        typed = os.read(sys.stdin.fileno(), 64)
        if not typed:
            loop.remove_reader(sys.stdin.fileno())
        if b"q" in typed.lower():
            end()

    for ending in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(ending, end)
    loop.add_signal_handler(signal.SIGWINCH, wake.set)
    if sys.stdin.isatty():
        loop.add_reader(sys.stdin.fileno(), key)
    previous = None
    while not over.is_set():
        stats = await plane.stats()
        passed_s = stats.uptime_s - previous.uptime_s if previous is not None else 0.0
        width, height = shutil.get_terminal_size()
        # One column less: at the end of a full line a terminal would clear its last character.
        drawn = frame(stats, previous, passed_s, width - 1, height).replace("\n", "\x1b[K\r\n")
        print(f"\x1b[H{drawn}\x1b[K\x1b[J", end="", flush=True)
        previous = stats
        wake.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await wake.wait()


@contextmanager
def _screen() -> Iterator[None]:
    """A context with the terminal's alternate screen, without a cursor, and with unbuffered keys; restored
    afterwards."""
    typed = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = termios.tcgetattr(typed) if typed is not None else None
    try:
        if typed is not None:
            tty.setcbreak(typed)
        print("\x1b[?1049h\x1b[?25l\x1b[2J", end="", flush=True)
        yield
    finally:
        print("\x1b[?25h\x1b[?1049l", end="", flush=True)
        if typed is not None and before is not None:
            termios.tcsetattr(typed, termios.TCSADRAIN, before)


if __name__ == "__main__":
    sys.exit(main())

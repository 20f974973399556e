"""The command `dataplane web`, which `dataplane node --web` runs in a process beside the node."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dataplane.web.access import PageAccess, host_and_port, is_loopback, read_token

LISTEN = "127.0.0.1:8642"
_NICE = 10
_END_S = 5.0


def add_parser(commands: Any) -> None:
    """Add `web` to the commands."""
    web = commands.add_parser("web", help="serve a live web page about a node and its cluster")
    web.add_argument("address", nargs="?", help="a node's address (default: $DATAPLANE_ADDRESS)")
    web.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=LISTEN,
        help=f"address to serve on (default: {LISTEN}); port 0: any free port",
    )
    web.add_argument(
        "--token", type=Path, metavar="FILE", help="file with the token that viewers need; created if missing"
    )
    web.add_argument("--until-eof", action="store_true", help=argparse.SUPPRESS)
    web.set_defaults(run=_web)


def add_node_options(node: argparse.ArgumentParser) -> None:
    """Add the options of a page beside a node."""
    node.add_argument("--web", metavar="HOST:PORT", help="also serve a live web page, from a process of its own")
    node.add_argument(
        "--web-token", type=Path, metavar="FILE", help="file with the token that viewers need; created if missing"
    )


def _web(chosen: argparse.Namespace) -> int:
    from dataplane.client.embedded import find

    address = find(chosen.address)
    host, port = host_and_port(chosen.listen)
    _check(host, chosen.token)
    token, made = (None, False) if chosen.token is None else read_token(chosen.token)

    def ready(url: str) -> None:
        print(url, flush=True)
        if made:
            print(f"the token was made, in {chosen.token}; this opens the page with it: {url}#{token}", file=sys.stderr)

    if chosen.until_eof:
        os.nice(_NICE)
    asyncio.run(_serve(address, host, port, PageAccess(token), ready, until_eof=chosen.until_eof))
    return 0


def _check(host: str, token: Path | None) -> None:
    if token is None and not is_loopback(host):
        raise ValueError(
            f"beyond loopback, as at {host!r}, viewers need a token: give a file, which is made if need be"
        )


async def _serve(
    address: str, host: str, port: int, access: PageAccess, ready: Callable[[str], None], *, until_eof: bool
) -> None:
    """Serve until SIGINT or SIGTERM or, if requested, until standard input ends."""
    from dataplane.web.feed import Feed
    from dataplane.web.server import PageServer

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if until_eof:
        loop.add_reader(sys.stdin.fileno(), stop.set)
    feed = Feed(address)
    async with PageServer(feed, host, port, access) as server:
        looking = loop.create_task(feed.run())
        ready(server.url)
        stopped = loop.create_task(stop.wait())
        await asyncio.wait((looking, stopped), return_when=asyncio.FIRST_COMPLETED)
        for task in (looking, stopped):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await looking


@contextmanager
def beside(chosen: argparse.Namespace) -> Iterator[Callable[[str], None]]:
    """A context that yields a function. Called with the node's address, it starts the page, if one is requested. The
    page ends with the context, and with this process, even a killed one. Raises ValueError for contradictory
    options."""
    if chosen.web is None:
        if chosen.web_token is not None:
            raise ValueError("--web-token goes with --web")
        yield lambda address: None
        return
    _check(host_and_port(chosen.web)[0], chosen.web_token)
    started: list[subprocess.Popen[bytes]] = []

    def start(address: str) -> None:
        command = [sys.executable, "-m", "dataplane.cli", "web", address, "--listen", chosen.web, "--until-eof"]
        command += [] if chosen.web_token is None else ["--token", str(chosen.web_token)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=sys.stderr.fileno()))

    try:
        yield start
    finally:
        for page in started:
            assert page.stdin is not None
            page.stdin.close()
            try:
                page.wait(_END_S)
            except subprocess.TimeoutExpired:
                page.kill()
                page.wait()

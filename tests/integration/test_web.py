"""The page's server: real nodes, real HTTP, and what strangers send."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

import dataplane as dp
from dataplane.web.access import PageAccess
from dataplane.web.feed import Feed
from dataplane.web.server import IDLE_S, MAX_CONNECTIONS, PageServer
from tests import processes
from tests.cases import each_case
from tests.processes import StandingNode

TOKEN = "correct-horse-battery"


@asynccontextmanager
async def page(address: str, token: str | None = None) -> AsyncIterator[tuple[PageServer, Feed]]:
    feed = Feed(address)
    async with PageServer(feed, "127.0.0.1", 0, PageAccess(token)) as server:
        looking = asyncio.ensure_future(feed.run())
        try:
            yield server, feed
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)


async def ticks(session: aiohttp.ClientSession, url: str) -> AsyncIterator[dict[str, Any]]:
    async with session.get(f"{url}events") as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        answer.content._high_water = 1 << 24  # type: ignore[attr-defined]
        async for line in answer.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def until(session: aiohttp.ClientSession, url: str, condition: Any) -> dict[str, Any]:
    """The first tick for which this is so."""
    async with asyncio.timeout(60):
        async for tick in ticks(session, url):
            if condition(tick):
                return tick
    raise AssertionError("the events have ended")


async def test_events_of_a_node_are_streamed_to_the_page(node: StandingNode) -> None:
    async with (
        page(node.address) as (server, _),
        aiohttp.ClientSession() as session,
        dp.aio.connect(node.address) as plane,
    ):
        stream = await plane.stream("rollouts", tasks=["actor"])
        await until(session, server.url, lambda tick: tick["sample"] and tick["sample"]["streams"])
        await stream.append({"id": [1, 2, 3]}, version=4)
        tick = await until(session, server.url, lambda tick: tick["sample"]["streams"][0]["rows"] == 3)
        [host], [told] = tick["sample"]["hosts"], tick["sample"]["streams"]
        assert host["own"]
        assert host["memory_used"] > 0
        assert (told["name"], told["version"], told["tasks"][0]["pending"]) == ("rollouts", 4, 3)
        async with session.get(f"{server.url}snapshot") as answer:
            snapshot = await answer.json()
        assert snapshot["history"]["stream"]["rollouts"]["rows"][-1] is not None
        async with session.get(f"{server.url}stream", params={"name": "rollouts"}) as answer:
            assert (await answer.json())["version"][-1] == 4
        async with session.get(f"{server.url}stream", params={"name": "other"}) as answer:
            assert answer.status == 404


async def test_an_ended_node_raises_an_alert_until_it_is_replaced(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node:
        address = node.address
        async with page(address) as (server, _), aiohttp.ClientSession() as session:
            await until(session, server.url, lambda tick: tick["sample"])
            await asyncio.to_thread(node.kill)
            tick = await until(session, server.url, lambda tick: tick["down"])
            assert [alert["tag"] for alert in tick["alerts"]] == ["no answer"]
            again = await asyncio.to_thread(StandingNode, tmp_path)
            with again:
                tick = await until(session, server.url, lambda tick: not tick["down"])
                assert tick["alerts"] == []


async def test_requests_without_the_configured_token_are_refused(
    node: StandingNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dataplane.web.server._WRONG_S", 0.0)
    caplog.set_level("DEBUG")
    jar = aiohttp.CookieJar(unsafe=True)  # of an address
    async with page(node.address, TOKEN) as (server, _), aiohttp.ClientSession(cookie_jar=jar) as session:
        for path in ("snapshot", "events", "stream?name=x", "partitions", "app.js", "style.css"):
            async with session.get(server.url + path) as answer:
                assert answer.status == 401, path
        async with session.get(server.url) as answer:
            assert answer.status == 401
            assert 'id="token"' in await answer.text()
        async with session.get(f"{server.url}snapshot", headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
            assert answer.status == 200
        async with session.post(f"{server.url}login", data="wrong-horse-battery") as answer:
            assert answer.status == 401
        async with session.post(f"{server.url}login", data=TOKEN, headers={"Sec-Fetch-Site": "cross-site"}) as answer:
            assert answer.status == 403
        async with session.post(f"{server.url}login", data=TOKEN) as answer:
            assert answer.status == 204
            cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert TOKEN not in cookie
        async with session.get(f"{server.url}snapshot") as answer:
            assert answer.status == 200
    assert TOKEN not in caplog.text


async def test_page_connections_are_bounded_and_idle_ones_are_closed(
    node: StandingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with page(node.address) as (server, _), aiohttp.ClientSession() as session:
        host, port = "127.0.0.1", int(server.url.rstrip("/").rpartition(":")[2])
        assert server._limits is not None
        open_files = psutil.Process().num_fds()
        strangers = [await asyncio.open_connection(host, port) for _ in range(MAX_CONNECTIONS + 40)]
        for i, (_, writer) in enumerate(strangers):
            writer.write(b"GET / HT" if i % 2 else b"G")
        ended = 0
        for reader, _ in strangers[MAX_CONNECTIONS:]:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            ended += 1
        assert ended == 40
        assert len(server._limits._server.connections) <= MAX_CONNECTIONS
        server._limits.sweep(0.0)
        server._limits.sweep(IDLE_S + 1)
        await processes.until(lambda: not len(server._limits._server.connections))
        async with session.get(server.url) as answer:
            assert answer.status == 200
        for _, writer in strangers:
            writer.close()
        assert open_files > 0


@each_case(
    "sent",
    [
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X-A: " + b"b" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" * 50,
        bytes(range(256)) * 40,
        b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 100_000,
        b"GET /stream?name=%ff%00%1b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    ],
    ids=["line", "header", "headers", "tls", "bytes", "body", "query"],
)
async def test_invalid_page_requests_do_not_affect_the_server(
    sent: bytes, node: StandingNode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR")
    async with page(node.address, TOKEN) as (server, _), aiohttp.ClientSession() as session:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(sent)
            async with asyncio.timeout(30):
                answer = await reader.read(400)
            assert b" 200 " not in answer
        except ConnectionError:
            pass
        finally:
            writer.close()
        async with session.get(server.url) as healthy:
            assert healthy.status == 401
    assert caplog.text == "", "nor can anybody fill a disk with log"


async def test_a_viewer_that_does_not_read_is_disconnected(node: StandingNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.web.server.SLOW_S", 0.2)
    async with page(node.address) as (server, feed), aiohttp.ClientSession() as session:
        port = int(server.url.rstrip("/").rpartition(":")[2])
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", port))
            lazy.sendall(b"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            await until(session, server.url, lambda tick: tick["viewers"] >= 1)
            big = b"x" * (8 << 20)
            monkeypatch.setattr(type(feed), "encoded", property(lambda self: big))
            await processes.until(lambda: not feed._viewers)


def listening() -> set[int]:
    return {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


@pytest.mark.skipif(not processes.has_ipv6(), reason="there is no IPv6 here")
@each_case("addresses", [["::1"], ["::1", "127.0.0.1"]])
async def test_a_name_is_served_at_one_of_its_addresses(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    found = [socket.getaddrinfo(each, 0, type=socket.SOCK_STREAM)[0] for each in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    before = listening()
    async with PageServer(Feed("unix:///nowhere"), "localhost", 0, PageAccess(None)) as server:
        (port,) = listening() - before
        assert server.url == f"http://localhost:{port}/"


def opened(url: str, path: str = "", **headers: str) -> bytes:
    request = urllib.request.Request(url + path, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
        return body


@pytest.mark.long
def test_the_page_process_starts_and_ends_with_its_node(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dataplane.cli", "node", "--memory", "1MiB", "--spill", "0", "--prewarm", "0"]
    command += ["--socket", str(tmp_path / "node.sock"), "--web", "127.0.0.1:0"]
    for end in (signal.SIGTERM, signal.SIGKILL):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            assert running.stderr is not None
            assert running.stdout.readline().startswith("DATAPLANE_ADDRESS=")
            url = next(line for line in running.stderr if line.startswith("http://")).strip()
            [beside] = psutil.Process(running.pid).children()
            assert b"dataplane" in opened(url)
            assert beside.nice() > psutil.Process(running.pid).nice() or os.nice(0) >= 10
            running.send_signal(end)
            running.wait(60)
            beside.wait(60)
            running.communicate(timeout=60)

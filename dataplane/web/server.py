"""The page over HTTP: files, a snapshot, and ticks as server-sent events.

Invariants: a request reads from the feed and changes nothing; the only POST sends a token and sets a cookie. No answer
waits for a node. A slow viewer misses ticks, and is disconnected after `SLOW_S` without reading. An invalid request
gets an HTTP error, and is not logged. Beyond loopback nothing is shown without the token (`access`). The number of
connections is limited (`Limits`).
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import importlib.resources
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from dataplane.clock import monotonic
from dataplane.errors import Misuse
from dataplane.web.access import PageAccess, is_loopback
from dataplane.web.feed import Feed

if TYPE_CHECKING:
    from aiohttp import web

    _Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger(__name__)

SLOW_S = 15.0
_BODY_S, _MAX_BODY = 5.0, 2048
_WRONG_S = 0.5  # delay before the answer to a wrong token

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_OPEN = ("/login.css", "/login.js", "/icon.svg")
"""The files of the form that asks for a token."""


class PageServer:
    """Serves the page of a feed within its context. `url`: its address."""

    def __init__(self, feed: Feed, host: str, port: int, access: PageAccess) -> None:
        """Raises ValueError for a host beyond loopback without a token."""
        if not access.asks and not is_loopback(host):
            raise ValueError(f"beyond loopback, as at {host!r}, the page needs a token: give a file (--token)")
        self._feed = feed
        self._host, self._port = host, port
        self._access = access
        self._files = _files()
        self._packed: dict[tuple[str, int], bytes] = {}
        self._limits: Limits | None = None
        self._ending = asyncio.Event()
        self._stack = AsyncExitStack()
        self.url = ""

    async def __aenter__(self) -> PageServer:
        """Listen. Raises OSError if that fails, Misuse if aiohttp is not installed."""
        try:
            from aiohttp import web
        except ImportError as error:
            raise Misuse(f"the page needs aiohttp: install rollout-dataplane[web] ({error})") from error

        @web.middleware
        async def answered(request: web.Request, handler: _Handler) -> web.StreamResponse:
            return await self._answered(request, handler)

        application = web.Application(middlewares=[answered], client_max_size=_MAX_BODY)
        application.add_routes(
            [
                web.get("/", self._page),
                web.post("/login", self._login),
                web.get("/snapshot", self._snapshot),
                web.get("/events", self._events),
                web.get("/stream", self._stream),
                web.get("/partitions", self._partitions),
                *[web.get(f"/{name}", self._file) for name in self._files],
            ]
        )
        runner = web.AppRunner(
            application, access_log=None, logger=_silent(), handle_signals=False, shutdown_timeout=0.5
        )
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        assert runner.server is not None
        self._limits = Limits(runner.server)
        loop = asyncio.get_running_loop()
        try:
            listener = await loop.create_server(self._limits.protocol, sock=await self._bound(), backlog=64)
        except BaseException:
            await self._stack.aclose()
            raise
        self._stack.callback(listener.close)
        sweeping = loop.create_task(self._limits.run())
        self._stack.push_async_callback(_cancelled, sweeping)
        port = listener.sockets[0].getsockname()[1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"http://{host}:{port}/"
        self._cookie = f"dataplane-{port}"
        return self

    async def _bound(self) -> socket.socket:
        """A socket at one address of the host, of IPv4 if there is one. With port 0, sockets at two addresses would
        have different ports."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        family, _, _, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            why = f"cannot listen at {self._host}:{self._port} (choose another address): {error.strerror}"
            raise OSError(error.errno, why) from None

    async def __aexit__(self, *_: object) -> None:
        self._ending.set()
        await self._stack.aclose()

    # requests

    async def _answered(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """The middleware of every request."""
        from aiohttp import web

        assert self._limits is not None
        with self._limits.answering(request.protocol):
            try:
                allowed = self._allowed(request)
                if not allowed and request.path not in (*_OPEN, "/login"):
                    return self._refused(request)
                response = await handler(request)
            except web.HTTPException as error:
                return web.Response(status=error.status, text=error.reason, headers=_HEADERS)
            except ConnectionError:
                raise
            except Exception:  # the boundary: a bug fails one request, and is logged
                log.exception("answering %s failed", request.path[:100])
                raise web.HTTPInternalServerError(text="This could not be answered.") from None
        if not response.prepared:
            response.headers.update(_HEADERS)
        return response

    def _allowed(self, request: web.Request) -> bool:
        return self._access.allows(
            host=request.headers.get("Host", ""),
            authorization=request.headers.get("Authorization", ""),
            cookie=request.cookies.get(self._cookie, ""),
        )

    def _refused(self, request: web.Request) -> web.Response:
        from aiohttp import web

        if not self._access.asks:
            text = "This page is for this host: open it as localhost or 127.0.0.1."
            return web.Response(status=403, text=text, headers=_HEADERS)
        headers = _HEADERS | {"WWW-Authenticate": "Bearer"}
        if request.path == "/":
            body, _ = self._files["login.html"]
            return web.Response(status=401, body=body, content_type="text/html", charset="utf-8", headers=headers)
        return web.Response(status=401, text="The token is missing, or is another.", headers=headers)

    async def _login(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        if not self._access.asks or request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise web.HTTPForbidden
        try:
            async with asyncio.timeout(_BODY_S):
                token = (await request.text()).strip()
        except (TimeoutError, ValueError, LookupError):
            raise web.HTTPBadRequest from None
        if not self._access.knows(token):
            await asyncio.sleep(_WRONG_S)
            raise web.HTTPUnauthorized
        response = web.Response(status=204)
        response.set_cookie(
            self._cookie, self._access.cookie, path="/", httponly=True, samesite="Strict", secure=request.secure
        )
        return response

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return self._sent(request, "index.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return self._sent(request, request.path.removeprefix("/"))

    def _sent(self, request: web.Request, name: str) -> web.StreamResponse:
        from aiohttp import web

        body, tag = self._files[name]
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("If-None-Match") == tag:
            return web.Response(status=304, headers=headers)
        kind = _TYPES[name.rpartition(".")[2]]
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)

    async def _snapshot(self, request: web.Request) -> web.StreamResponse:
        return await self._json(request, "snapshot", self._feed.tick.number, self._feed.snapshot)

    async def _partitions(self, request: web.Request) -> web.StreamResponse:
        return await self._json(request, "partitions", self._feed.placement.version, self._feed.partitions)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        found = self._feed.stream(request.query.get("name", ""))
        if found is None:
            raise web.HTTPNotFound
        return web.Response(body=found, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def _json(self, request: web.Request, what: str, version: int, made: Callable[[], bytes]) -> web.Response:
        """The answer with a possibly large document, compressed once for all requests of a version."""
        from aiohttp import web

        headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
        if "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=made(), content_type="application/json", headers=headers)
        packed = self._packed.get((what, version))
        if packed is None:
            packed = await asyncio.to_thread(gzip.compress, made(), 1)
            self._packed = {key: body for key, body in self._packed.items() if key[0] != what}
            self._packed[what, version] = packed
        headers["Content-Encoding"] = "gzip"
        return web.Response(body=packed, content_type="application/json", headers=headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        from aiohttp import web

        with self._feed.viewer() as admitted:
            if not admitted:
                raise web.HTTPServiceUnavailable(reason="As many look at this page as it serves")
            headers = _HEADERS | {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            response = web.StreamResponse(headers=headers)
            response.content_type = "text/event-stream"
            with suppress(ConnectionError, TimeoutError):
                await response.prepare(request)
                await self._send_ticks(request, response)
            return response

    async def _send_ticks(self, request: web.Request, response: web.StreamResponse) -> None:
        """Send ticks until the server ends. Raises ConnectionError if the viewer disconnects, TimeoutError if it reads
        too slowly."""
        ending = asyncio.ensure_future(self._ending.wait())
        number = -1
        try:
            while not self._ending.is_set():
                newer = asyncio.ensure_future(self._feed.after(number))
                try:
                    await asyncio.wait((newer, ending), return_when=asyncio.FIRST_COMPLETED)
                    if not newer.done():
                        return
                    number = newer.result().number
                finally:
                    newer.cancel()
                async with asyncio.timeout(SLOW_S):
                    await response.write(b"data: " + self._feed.encoded + b"\n\n")
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # otherwise unread bytes would stay in memory
            raise
        finally:
            ending.cancel()


def _silent() -> logging.Logger:
    """A disabled logger for aiohttp. Its logs of invalid requests would let any client fill a disk."""
    silent = logging.getLogger(f"{__name__}.strangers")
    silent.disabled = True
    return silent


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _files() -> dict[str, tuple[bytes, str]]:
    """The files of the page by name, each with a tag of its content."""
    found = {}
    for file in importlib.resources.files("dataplane.web").joinpath("static").iterdir():
        if file.name.rpartition(".")[2] in _TYPES:
            body = file.read_bytes()
            found[file.name] = body, f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return found


MAX_CONNECTIONS = 256
IDLE_S = 10.0
_SWEEP_S = 1.0


class Limits:
    """Limits the number of connections of one aiohttp server, and the time for which a connection may be idle.

    Invariants: at most `MAX_CONNECTIONS` are open. A connection without a request in progress, or with an incomplete
    request, is closed after `IDLE_S`.
    """

    def __init__(self, server: web.Server, max_connections: int = MAX_CONNECTIONS, idle_s: float = IDLE_S) -> None:
        self._server = server
        self._max = max_connections
        self._idle_s = idle_s
        self._answering: dict[Any, int] = {}
        self._idle_since_s: dict[Any, float] = {}

    def protocol(self) -> asyncio.BaseProtocol:
        """The protocol of an accepted connection, which is aborted if there are too many."""
        return self._server() if len(self._server.connections) < self._max else _Refused()

    @contextmanager
    def answering(self, protocol: Any) -> Iterator[None]:
        """A context in which a request of this connection is being answered."""
        self._answering[protocol] = self._answering.get(protocol, 0) + 1
        try:
            yield
        finally:
            self._answering[protocol] -= 1
            if not self._answering[protocol]:
                del self._answering[protocol]
            self._idle_since_s.pop(protocol, None)

    async def run(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Close idle connections, until cancelled."""
        while True:
            await sleep(_SWEEP_S)
            self.sweep(monotonic())

    def sweep(self, now_s: float) -> None:
        """Close connections that have been idle for too long."""
        connections = self._server.connections
        idle = [each for each in connections if each not in self._answering]
        self._idle_since_s = {each: self._idle_since_s.get(each, now_s) for each in idle}
        for each, since_s in self._idle_since_s.items():
            if now_s - since_s > self._idle_s:
                each.force_close()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()

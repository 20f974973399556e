"""Requests to etcd over its JSON gateway (https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/), at one of several
endpoints.

gRPC would bring grpcio and protobuf, for which the other libraries of a training job pin conflicting versions; the
gateway needs only an HTTP client that streams. In its JSON, keys and values are base64, 64-bit integers are text, and
empty fields are omitted.

Invariants: a request ends by its deadline with etcd's answer, Unavailable or OutcomeUnknown. If an endpoint fails,
the next is tried within that deadline, so requests must be repeatable. OutcomeUnknown is raised if an attempt may
have reached etcd and none was answered; Unavailable if none can have had an effect: no connection was made, or etcd
refused. The login is repeated when etcd does not know its token any more.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from dataplane.coordinator.base import OutcomeUnknown, Unavailable

if TYPE_CHECKING:
    import aiohttp

TRY_S = 0.5
"""Timeout of the first attempts: a request to an etcd leader that dies is never answered, and must be sent again."""

_MAX_ANSWER = 64 << 20  # bytes of an answer, or of a line of a watch; etcd itself refuses requests over 1.5 MiB
_REFUSED = {3, 5, 7, 8, 9, 11, 12, 16}
"""Codes of gRPC (https://grpc.io/docs/guides/status-codes/) with which etcd refuses a request before it takes effect.
With others, such as UNAVAILABLE ("request timed out", "leader changed"), it may take effect."""
_LOGIN = ("invalid auth token", "user name is empty", "revision in header is old")


class ResponseHeader(msgspec.Struct, frozen=True):
    revision: int = 0


class Pair(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""
    mod_revision: int = 0
    lease: int = 0


class WatchEvent(msgspec.Struct, frozen=True):
    kv: Pair = Pair()
    type: str = "PUT"


class Range(msgspec.Struct, frozen=True):
    kvs: list[Pair] = []


class TxnResponse(msgspec.Struct, frozen=True):
    response_range: Range | None = None


class EtcdMember(msgspec.Struct, frozen=True):
    """A server of etcd, as its servers list it."""

    ID: int = 0
    name: str = ""
    peerURLs: list[str] = []
    clientURLs: list[str] = []


class GatewayAnswer(msgspec.Struct, frozen=True):
    """The fields that are read here, of all kinds of answers. A streamed answer is in `result`."""

    result: GatewayAnswer | None = None
    header: ResponseHeader = ResponseHeader()
    ID: int = 0
    TTL: int = 0
    token: str = ""
    succeeded: bool = False
    responses: list[TxnResponse] = []
    kvs: list[Pair] = []
    events: list[WatchEvent] = []
    members: list[EtcdMember] = []
    created: bool = False
    canceled: bool = False
    cancel_reason: str = ""
    error: Any = None
    message: str = ""
    code: int = 0


class EtcdRefused(Unavailable):
    """etcd refuses a request; nothing was changed."""


class _Unanswered(Exception):
    """An attempt failed. `sent`: etcd may have received it."""

    def __init__(self, why: str, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


_decoder = msgspec.json.Decoder(GatewayAnswer, strict=False)  # integers as text


def check_installed() -> None:
    """Raises ValueError if there is no HTTP client."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ValueError("etcd needs aiohttp: pip install 'rollout-dataplane[etcd]'") from error


class Gateway:
    """One client of an etcd. Used from one event loop."""

    def __init__(
        self,
        endpoints: Sequence[str],
        timeout_s: float,
        tls: ssl.SSLContext | None = None,
        login: tuple[str, str] | None = None,
        try_s: float = TRY_S,
    ) -> None:
        """`endpoints`: HOST:PORT of each server; `login`: user and password; `try_s`: seconds to wait for an
        endpoint in the first round. Raises ValueError if no HTTP client is installed."""
        check_installed()
        self.timeout_s = timeout_s
        self._try_s = try_s
        self._tls = tls
        self._urls: list[str] = []  # in the order of attempts
        self.use(endpoints)
        self._login = login
        self._token = ""
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    @property
    def endpoints(self) -> list[str]:
        """The HOST:PORT of each server, in the order of attempts."""
        return [_endpoint(url) for url in self._urls]

    def use(self, endpoints: Sequence[str]) -> None:
        """Use these servers from now on; known ones keep their order."""
        urls = [f"{'https' if self._tls else 'http'}://{endpoint}/v3/" for endpoint in endpoints]
        kept = [url for url in self._urls if url in urls]
        self._urls = kept + [url for url in urls if url not in kept]

    async def ask(self, path: str, question: dict[str, Any], *, writes: bool = False) -> GatewayAnswer:
        """Ask each endpoint in turn, with a longer timeout in each round, until one answers. Raises Unavailable
        (Refused, if etcd refuses) and, if `writes`, OutcomeUnknown."""
        deadline, each_s = time.monotonic() + self.timeout_s, self._try_s
        sent, why, first = False, "", self._urls[0]
        while True:
            began = time.monotonic()
            for url in [*self._urls]:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                try:
                    answer = await self._ask_as_user(url, path, question, min(each_s, left_s))
                except _Unanswered as error:
                    sent, why = sent or error.sent, f"etcd at {_endpoint(url)}: {error}"
                except EtcdRefused as error:
                    if sent and writes:
                        raise OutcomeUnknown(f"an earlier attempt was not answered; then {error}") from error
                    raise
                else:
                    while url != first and url in self._urls and self._urls[0] != url:
                        self._leave(self._urls[0])
                    return answer
            if time.monotonic() - began < each_s or time.monotonic() >= deadline:
                break  # no endpoint timed out, so another round would not help; the caller may ask again later
            each_s *= 2
        if sent and writes:
            raise OutcomeUnknown(why)
        raise Unavailable(why)

    async def _ask_as_user(self, url: str, path: str, question: dict[str, Any], timeout_s: float) -> GatewayAnswer:
        for again in (False, True):
            await self._authenticate(url, timeout_s)
            try:
                return await self._ask_once(url, path, question, timeout_s)
            except EtcdRefused as error:
                if again or not self._login or not any(said in str(error) for said in _LOGIN):
                    raise
                self._token = ""
        raise AssertionError("the second turn returns or raises")

    async def _authenticate(self, url: str, timeout_s: float) -> None:
        if self._login is None or self._token:
            return
        user, password = self._login
        try:
            asked = {"name": user, "password": password}
            self._token = (await self._ask_once(url, "auth/authenticate", asked, timeout_s)).token
        except _Unanswered as error:
            raise _Unanswered(str(error), sent=False) from error  # the request itself was not sent

    async def _ask_once(self, url: str, path: str, question: dict[str, Any], timeout_s: float) -> GatewayAnswer:
        import aiohttp

        said = bytearray()
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._post(url, path, question, timeout) as response:
                async for part in response.content.iter_any():
                    said += part
                    if len(said) > _MAX_ANSWER:
                        raise _Unanswered(f"it answers with more than {_MAX_ANSWER} bytes", sent=True)
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise _Unanswered(str(error), sent=False) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _Unanswered(str(error) or type(error).__name__, sent=True) from error
        return _understood(said)

    async def stream(self, question: dict[str, Any]) -> AsyncGenerator[GatewayAnswer, None]:
        """The answers to a watch, from the endpoint that answered last, until it breaks. Meanwhile that endpoint gets
        regular requests that need a majority of the servers: without a majority, the watch would be silent. Raises
        Unavailable."""
        url = self._urls[0]
        reading: asyncio.Queue[GatewayAnswer | Unavailable] = asyncio.Queue(1)
        tasks = [
            asyncio.ensure_future(work)
            for work in (self._read_stream(url, question, reading), self._ping(url, reading))
        ]
        try:
            while True:
                read = await reading.get()
                if isinstance(read, Unavailable):
                    raise read
                yield read
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_stream(
        self, url: str, question: dict[str, Any], read: asyncio.Queue[GatewayAnswer | Unavailable]
    ) -> None:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.timeout_s)
        try:
            await self._authenticate(url, self.timeout_s)
            async with self._post(url, "watch", question, timeout) as response:
                async for line in response.content:
                    answer = _understood(line)
                    if answer.canceled:  # its revision was compacted, say
                        raise Unavailable(f"etcd ends the watch: {answer.cancel_reason}")
                    await read.put(answer)
            raise Unavailable("etcd ends the watch")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, _Unanswered, Unavailable) as error:
            self._token = ""
            self._leave(url)
            await read.put(Unavailable(f"the watch has broken: {str(error) or type(error).__name__}"))

    async def _ping(self, url: str, read: asyncio.Queue[GatewayAnswer | Unavailable]) -> None:
        while True:
            await asyncio.sleep(self.timeout_s)
            try:
                question = {"key": encoded("\0"), "count_only": True}
                await self._ask_as_user(url, "kv/range", question, self.timeout_s)
            except EtcdRefused:  # a refusal is an answer too
                continue
            except (_Unanswered, Unavailable) as error:
                self._leave(url)
                await read.put(Unavailable(f"etcd at {_endpoint(url)} does not answer: {error}"))

    def _leave(self, url: str) -> None:
        """Ask another endpoint first from now on."""
        if url == self._urls[0]:
            self._urls.append(self._urls.pop(0))

    def _post(self, url: str, path: str, question: dict[str, Any], timeout: aiohttp.ClientTimeout) -> Any:
        import aiohttp

        if self._closed:
            raise Unavailable("this coordinator was closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._tls if self._tls is not None else True)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=_MAX_ANSWER // 2)
        return self._session.post(
            url + path,
            data=msgspec.json.encode(question),
            headers={"Authorization": self._token} if self._token else {},
            timeout=timeout,
            allow_redirects=False,
        )

    async def aclose(self) -> None:
        """Close the HTTP client. Idempotent."""
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            with suppress(asyncio.CancelledError):
                await session.close()


def _understood(said: bytes | bytearray) -> GatewayAnswer:
    """The decoded answer. Raises _Unanswered if it is invalid or leaves the outcome open, Refused if etcd refuses."""
    try:
        answer = _decoder.decode(said)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _Unanswered(f"it answers what is none of etcd's answers: {error}", sent=True) from error
    if answer.error is not None or answer.code:
        why = f"it says: {answer.message or answer.error}"
        if answer.code in _REFUSED:
            raise EtcdRefused(f"etcd refuses: {answer.message or answer.error}")
        raise _Unanswered(why, sent=True)
    return answer.result or answer


def _endpoint(url: str) -> str:
    return url.split("/")[2]


def encoded(text: str | bytes) -> str:
    """The base64 encoding of a key or value, as the gateway requires."""
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def below(prefix: str) -> dict[str, Any]:
    """The range of the keys with a prefix: up to the first key that is greater than all of them."""
    name = prefix.encode()
    return {"key": encoded(name), "range_end": encoded(name[:-1] + bytes([name[-1] + 1]))}

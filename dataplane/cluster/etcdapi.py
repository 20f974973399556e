"""What is asked of etcd, over its JSON gateway (https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/).

gRPC would bring grpcio and protobuf, whose versions the other libraries of a training job pin against each other; the
gateway needs an HTTP client that streams. There keys and values are base64, 64-bit integers are text, and what is empty
or 0 is left out.

What always holds: a call ends with what etcd says, or with EtcdError by its deadline; a watch has none, and is to be
ended by who asks meanwhile whether the same etcd answers.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import aiohttp

_MAX_ANSWER = 16 << 20  # bytes, or of a line of a watch; etcd itself refuses requests over 1.5 MiB
_NOT_FOUND = 5  # https://grpc.io/docs/guides/status-codes/


class _Header(msgspec.Struct, frozen=True):
    revision: int = 0


class _Pair(msgspec.Struct, frozen=True):
    key: bytes = b""
    value: bytes = b""


class _Event(msgspec.Struct, frozen=True):
    kv: _Pair = _Pair()
    type: str = "PUT"


class _Answer(msgspec.Struct, frozen=True):
    """All that an answer to one of the questions below may hold. What is streamed comes in `result`."""

    result: _Answer | None = None
    header: _Header = _Header()
    ID: int = 0
    TTL: int = 0
    kvs: list[_Pair] = []
    events: list[_Event] = []
    canceled: bool = False
    cancel_reason: str = ""
    error: Any = None
    code: int = 0


_decoder = msgspec.json.Decoder(_Answer, strict=False)  # integers as text


class EtcdError(Exception):
    """etcd has not answered, refuses, or says what this module does not understand."""


class Gone(EtcdError):
    """A lease or a key that was there is no more."""


def available() -> None:
    """Raises ValueError where what this needs is not installed."""
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise ValueError("to join by etcd, install aiohttp: pip install 'rollout-dataplane[etcd]'") from error


class Etcd:
    """One etcd. To be entered with `async with`, in the loop that it is used from."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """`address`: HOST:PORT."""
        self._url = f"http://{address}/v3"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Etcd:
        import aiohttp

        self._session = aiohttp.ClientSession(read_bufsize=_MAX_ANSWER // 2)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def grant(self, ttl_s: float) -> int:
        """A new lease that lives for about so long: etcd has a least, and extends leases when its leader changes."""
        return (await self._ask("lease/grant", {"TTL": math.ceil(ttl_s)})).ID

    async def keep_alive(self, lease: int) -> bool:
        """Whether the lease lives; if so, it does for as long again."""
        return (await self._ask("lease/keepalive", {"ID": lease})).TTL > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, with its keys."""
        await self._ask("lease/revoke", {"ID": lease})

    async def put(self, key: str, value: bytes, lease: int) -> None:
        """Write a key, which goes with the lease. Raises Gone where the lease has."""
        await self._ask("kv/put", {"key": _base64(key), "value": _base64(value), "lease": lease})

    async def listing(self, prefix: str) -> tuple[dict[bytes, bytes], int]:
        """The keys below a prefix with their values, and the revision that this is of."""
        answer = await self._ask("kv/range", _below(prefix))
        return {pair.key: pair.value for pair in answer.kvs}, answer.header.revision

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[tuple[dict[bytes, bytes | None], int], None]:
        """What changes below a prefix from a revision on: keys with their values, None for those that go, and the
        revision."""
        import aiohttp

        asked = msgspec.json.encode({"create_request": _below(prefix) | {"start_revision": revision}})
        timeout = aiohttp.ClientTimeout(total=None, connect=self._timeout_s)
        try:
            async with self._open.post(f"{self._url}/watch", data=asked, timeout=timeout) as response:
                async for line in response.content:
                    answer = _understood(line)
                    if answer.canceled:  # what is asked for was compacted, say
                        raise EtcdError(f"it ends the watch: {answer.cancel_reason}")
                    if answer.events:
                        changed = {e.kv.key: None if e.type == "DELETE" else e.kv.value for e in answer.events}
                        yield changed, answer.header.revision
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise _failed(error) from error
        raise EtcdError("it ends the watch")

    async def _ask(self, what: str, question: dict[str, Any]) -> _Answer:
        import aiohttp

        said = bytearray()
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        asked = msgspec.json.encode(question)
        try:
            async with self._open.post(f"{self._url}/{what}", data=asked, timeout=timeout) as response:
                async for part in response.content.iter_any():
                    said += part
                    if len(said) > _MAX_ANSWER:
                        raise EtcdError(f"it answers with more than {_MAX_ANSWER} bytes")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _failed(error) from error
        return _understood(said)

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "it was entered"
        return self._session


def _understood(said: bytes | bytearray) -> _Answer:
    """Raises EtcdError where it says that it failed, or what is no answer; Gone for what is not there."""
    try:
        answer = _decoder.decode(said)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise EtcdError(f"it answers what is none of etcd's answers: {error}") from error
    if answer.error is not None:
        raise (Gone if answer.code == _NOT_FOUND else EtcdError)(f"it says: {answer.error}")
    return answer.result or answer


def _failed(error: Exception) -> EtcdError:
    return EtcdError(str(error) or type(error).__name__)


def _base64(text: str | bytes) -> str:
    return b64encode(text.encode() if isinstance(text, str) else text).decode()


def _below(prefix: str) -> dict[str, Any]:
    """The range of the keys that begin so: up to the first that is greater than all of them."""
    encoded = prefix.encode()
    return {"key": _base64(encoded), "range_end": _base64(encoded[:-1] + bytes([encoded[-1] + 1]))}

"""A coordinator for several processes of a test: the in-process one, behind a unix socket, which crosses network
namespaces. It goes away when it is told to: nothing is answered then, and watches say nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dataplane.coordinator.base import Coordinator, OutcomeUnknown, Registration, Unavailable
from dataplane.coordinator.process import ProcessCoordinator

_PACE_S = 0.02  # between looks of a watch
_ANSWER_S = 1.0


class Server:
    """Serves in a thread of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.away = False
        self.cut: set[str] = set()
        """Nodes that do not reach it."""
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._ready.wait()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._coordinator = ProcessCoordinator()
        self._registrations: dict[str, Registration] = {}
        self._stop = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_unix_server(self._client, self.path)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.05)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                size = int.from_bytes(await reader.readexactly(4), "big")
                who, what, arguments = msgspec.msgpack.decode(await reader.readexactly(size))
                while self.away or who in self.cut:
                    await asyncio.sleep(_PACE_S)
                answer = msgspec.msgpack.encode(await self._answer(what, arguments))
                writer.write(len(answer).to_bytes(4, "big") + answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, what: str, arguments: list[Any]) -> Any:
        if what == "register":
            self._registrations[arguments[0]] = await self._coordinator.register(*arguments)
            return True
        if what in ("renew", "leave"):
            found = self._registrations.get(arguments[0])
            return found is not None and await getattr(found, what)()
        return await getattr(self._coordinator, what)(*arguments)

    def value(self, key: str) -> bytes | None:
        """A value, as it is now."""
        return asyncio.run_coroutine_threadsafe(self._coordinator.read(key), self._loop).result(60)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


class _Place(Registration):
    def __init__(self, client: Client, member: str) -> None:
        self._client, self._member = client, member

    @property
    def member(self) -> str:
        return self._member

    async def renew(self) -> bool:
        return bool(await self._client.ask("renew", self._member))

    async def leave(self) -> None:
        await self._client.ask("leave", self._member)


class Client(Coordinator):
    """One process's view. Watches ask again and again, which a test may."""

    def __init__(self, path: Path, node: str) -> None:
        self._path = path
        self._node = node

    @property
    def address(self) -> str:
        return str(self._path)

    async def evict(self, member: str, value: bytes) -> None:
        """Nobody is evicted here: leases run out."""

    async def ask(self, what: str, *arguments: Any) -> Any:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path)
        except OSError as error:
            raise Unavailable(f"no coordinator: {error}") from None
        try:
            async with asyncio.timeout(_ANSWER_S):
                request = msgspec.msgpack.encode((self._node, what, arguments))
                writer.write(len(request).to_bytes(4, "big") + request)
                size = int.from_bytes(await reader.readexactly(4), "big")
                return msgspec.msgpack.decode(await reader.readexactly(size))
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            kind = OutcomeUnknown if what in ("swap", "register") else Unavailable
            raise kind("the coordinator has not answered") from None
        finally:
            writer.transport.abort()

    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        await self.ask("register", member, value, lease_s)
        return _Place(self, member)

    async def members(self) -> Mapping[str, bytes]:
        found: dict[str, bytes] = await self.ask("members")
        return found

    async def _watched(self, what: str, *arguments: str) -> AsyncGenerator[Any, None]:
        first, last = True, None
        while True:
            value = await self.ask(what, *arguments)
            if first or value != last:
                first, last = False, value
                yield value
            await asyncio.sleep(_PACE_S * 5)

    def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        return self._watched("members")

    async def read(self, key: str) -> bytes | None:
        value: bytes | None = await self.ask("read", key)
        return value

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        found: bytes | None = await self.ask("swap", key, expected, value)
        return found

    def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        return self._watched("read", key)

    async def aclose(self) -> None:
        return

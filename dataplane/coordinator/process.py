"""A coordinator within one process: for one host, and for tests. It ends with the process, as its members do; its
creator may save the values for the next one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from weakref import WeakValueDictionary

from dataplane.coordinator.base import Coordinator, Registration, Unavailable
from dataplane.coordinator.registry import Registry


class _ProcessRegistration(Registration):
    def __init__(self, now: Callable[[], tuple[Registry, float]], member: str, number: int) -> None:
        self._now, self._member, self._number = now, member, number

    @property
    def member(self) -> str:
        return self._member

    async def renew(self) -> bool:
        registry, now = self._now()
        return registry.renew(self._member, self._number, now)

    async def leave(self) -> None:
        registry, now = self._now()
        registry.leave(self._member, self._number, now)


class ProcessCoordinator(Coordinator):
    """A coordinator that all clients in the process share; closing it closes it for all.

    `values`: saved values of an earlier one. `keep(key, value)` is awaited before a value changes, for each key one at
    a time. If it raises, the caller of the change gets the error, and the value is unchanged.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        values: Mapping[str, bytes] | None = None,
        keep: Callable[[str, bytes | None], Awaitable[None]] | None = None,
    ) -> None:
        self._registry = Registry()
        for key, value in (values or {}).items():
            self._registry.swap(key, None, value)
        self._keep = keep
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._registry.members_changed = lambda: self._wake("")
        self._registry.value_changed = self._wake
        self._clock = clock
        self._watches: dict[str, dict[asyncio.Event, None]] = {}  # by key, or "" for the members
        self._closed = False

    @property
    def address(self) -> str:
        return "this process"

    def _wake(self, key: str) -> None:
        for event in self._watches.get(key, ()):
            event.set()

    def _now(self) -> tuple[Registry, float]:
        """The registry and the time. Raises Unavailable once closed."""
        if self._closed:
            raise Unavailable("this coordinator was closed")
        return self._registry, self._clock()

    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        registry, now = self._now()
        return _ProcessRegistration(self._now, member, registry.register(member, value, lease_s, now))

    async def members(self) -> Mapping[str, bytes]:
        registry, now = self._now()
        return registry.members(now)

    async def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        with self._watched("") as event:
            last: Mapping[str, bytes] | None = None
            while True:
                event.clear()
                members = await self.members()
                if members != last:
                    last = members
                    yield members
                    continue
                expiry = self._registry.next_expiry()
                try:
                    async with asyncio.timeout(None if expiry is None else max(0.0, expiry - self._clock())):
                        await event.wait()
                except TimeoutError:
                    continue

    async def evict(self, member: str, value: bytes) -> None:
        registry, now = self._now()
        registry.evict(member, value, now)

    async def read(self, key: str) -> bytes | None:
        return self._now()[0].read(_checked(key))

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        registry, _ = self._now()
        if self._keep is None:
            return registry.swap(_checked(key), expected, value)
        lock = self._changing.setdefault(_checked(key), asyncio.Lock())
        async with lock:
            if registry.read(key) == expected != value:
                await self._keep(key, value)
            return registry.swap(key, expected, value)

    async def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        with self._watched(_checked(key)) as event:
            last: bytes | None = None
            first = True
            while True:
                event.clear()
                value = await self.read(key)
                if first or value != last:
                    first, last = False, value
                    yield value
                    continue
                await event.wait()

    def values(self) -> Mapping[str, bytes]:
        """All values, for another coordinator that replaces this one."""
        return self._registry.values()

    @contextmanager
    def _watched(self, key: str) -> Iterator[asyncio.Event]:
        event, same = asyncio.Event(), self._watches.setdefault(key, {})
        same[event] = None
        try:
            yield event
        finally:
            del same[event]
            if not same:
                del self._watches[key]

    async def aclose(self) -> None:
        self._closed = True
        for event in chain.from_iterable(self._watches.values()):
            event.set()


def _checked(key: str) -> str:
    if not key:
        raise ValueError("a key has at least one character")
    return key

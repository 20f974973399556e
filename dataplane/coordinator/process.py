"""The coordinator of a node alone, in its process: values only, since there are no other members. Its creator saves the
values for the next process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from dataplane.coordinator.base import Coordinator, Unavailable


def _alone(*_: object) -> NoReturn:
    raise AssertionError("a node alone is not registered anywhere")


class ProcessCoordinator(Coordinator):
    """A coordinator that all clients in the process share; closing it closes it for all.

    `values`: saved values of an earlier one. `keep(key, value)` is awaited before a value changes, for each key one at
    a time. If it raises, the caller of the change gets the error, and the value is unchanged.
    """

    def __init__(self, values: Mapping[str, bytes], keep: Callable[[str, bytes | None], Awaitable[None]]) -> None:
        self._values = dict(values)
        self._keep = keep
        self._changing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._watches: dict[str, dict[asyncio.Event, None]] = {}
        self._closed = False

    @property
    def address(self) -> str:
        return "this process"

    _unused: Any = _alone
    register = members = watch_members = evict = _unused

    async def read(self, key: str) -> bytes | None:
        if self._closed:
            raise Unavailable("this coordinator was closed")
        return self._values.get(key)

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        async with self._changing.setdefault(key, asyncio.Lock()):
            if await self.read(key) == expected != value:
                await self._keep(key, value)
                self._set(key, value)
            return self._values.get(key)

    def _set(self, key: str, value: bytes | None) -> None:
        if value is None:
            del self._values[key]
        else:
            self._values[key] = value
        self._wake(key)

    def _wake(self, key: str) -> None:
        for event in self._watches.get(key, ()):
            event.set()

    async def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        with self._watched(key) as event:
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
        return dict(self._values)

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

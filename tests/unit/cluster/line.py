"""A line to a coordinator that can be cut: what goes over it raises Unavailable then, watches too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import TypeVar

from dataplane.coordinator.base import Coordinator, Registration, Unavailable

T = TypeVar("T")


class Line(Coordinator):
    """See the module. Closing it leaves the coordinator open."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._cut = asyncio.Event()

    @property
    def address(self) -> str:
        return self._coordinator.address

    def cut(self) -> None:
        """Nothing goes over it from now on."""
        self._cut.set()

    def mend(self) -> None:
        """It does again."""
        self._cut.clear()

    def check(self) -> None:
        """Raises Unavailable where it is cut."""
        if self._cut.is_set():
            raise Unavailable("the line is cut")

    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        self.check()
        return _LineRegistration(self, await self._coordinator.register(member, value, lease_s))

    async def members(self) -> Mapping[str, bytes]:
        self.check()
        return await self._coordinator.members()

    def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        return self._over(self._coordinator.watch_members())

    async def evict(self, member: str, value: bytes) -> None:
        self.check()
        await self._coordinator.evict(member, value)

    async def read(self, key: str) -> bytes | None:
        self.check()
        return await self._coordinator.read(key)

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        self.check()
        return await self._coordinator.swap(key, expected, value)

    def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        return self._over(self._coordinator.watch(key))

    async def _over(self, watch: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
        async with aclosing(watch):
            while True:
                waits = asyncio.ensure_future(anext(watch)), asyncio.ensure_future(self._cut.wait())
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    self.check()
                    given = waits[0].result()
                finally:
                    for each in waits:
                        each.cancel()
                    await asyncio.gather(*waits, return_exceptions=True)
                yield given

    async def aclose(self) -> None:
        self.cut()


class _LineRegistration(Registration):
    def __init__(self, line: Line, registration: Registration) -> None:
        self._line, self._registration = line, registration

    @property
    def member(self) -> str:
        return self._registration.member

    async def renew(self) -> bool:
        self._line.check()
        return await self._registration.renew()

    async def leave(self) -> None:
        self._line.check()
        await self._registration.leave()

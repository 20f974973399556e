"""The coordinator that the cluster uses now: another may take its place, and those who ask it need not know.

What always holds: a call is made of one coordinator; while there is none a call waits for one, at most `wait_s`, and
raises Unavailable then. When another takes its place, watches of the one before raise Replaced, and its
registrations renew nothing: who watches or is registered begins anew at the next.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager

from dataplane.coordinator.base import Coordinator, Registration, Unavailable

WAIT_S = 5.0


class Replaced(Unavailable):
    """Another coordinator takes the place of the one that was asked."""


class CurrentCoordinator(Coordinator):
    """See the module. It owns the coordinator that it is given."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._now: Coordinator | None = None
        self._there = asyncio.Event()
        self._closed = False
        self._over_s = math.inf
        self.why = "no coordinator is known yet"
        """Why there is none, while there is none."""

    async def use(self, coordinator: Coordinator | None, *, over_s: float = math.inf) -> None:
        """Ask this one from now on; None: nobody, until there is another. `over_s`: by when the one before had ended
        for sure."""
        if self._now is not None:
            self._over_s = over_s
        before, self._now = self._now, coordinator
        if coordinator is None:
            self._there.clear()
        else:
            self._there.set()
        if before is not None:
            await before.aclose()

    def asks(self, coordinator: Coordinator) -> bool:
        """Whether it is this one that is asked now. Raises Unavailable once closed."""
        if self._closed:
            raise Unavailable("this coordinator was closed")
        return self._now is coordinator

    @property
    def over_s(self) -> float:
        return self._over_s

    @property
    def address(self) -> str:
        return f"none: {self.why}" if self._now is None else self._now.address

    async def _get(self) -> Coordinator:
        if self._closed:
            raise Unavailable("this coordinator was closed")
        if self._now is None:
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._there.wait()
            except TimeoutError:
                raise Unavailable(self.why) from None
        if self._now is None:
            raise Unavailable(self.why)
        return self._now

    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        coordinator = await self._get()
        with self._asking(coordinator):
            return _Registration(self, coordinator, await coordinator.register(member, value, lease_s))

    async def members(self) -> Mapping[str, bytes]:
        coordinator = await self._get()
        with self._asking(coordinator):
            return await coordinator.members()

    async def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        coordinator = await self._get()
        async with aclosing(coordinator.watch_members()) as watch:
            with self._asking(coordinator):
                async for members in watch:
                    yield members

    async def evict(self, member: str, value: bytes) -> None:
        coordinator = await self._get()
        with self._asking(coordinator):
            await coordinator.evict(member, value)

    async def read(self, key: str) -> bytes | None:
        coordinator = await self._get()
        with self._asking(coordinator):
            return await coordinator.read(key)

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        coordinator = await self._get()
        with self._asking(coordinator):
            return await coordinator.swap(key, expected, value)

    async def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        coordinator = await self._get()
        async with aclosing(coordinator.watch(key)) as watch:
            with self._asking(coordinator):
                async for value in watch:
                    yield value

    @contextmanager
    def _asking(self, coordinator: Coordinator) -> Iterator[None]:
        """What is asked of a coordinator that another takes the place of meanwhile raises Replaced."""
        try:
            yield
        except Unavailable as error:
            if self._now is coordinator or self._closed:
                raise
            raise Replaced("another coordinator takes this one's place") from error

    async def aclose(self) -> None:
        self._closed = True
        self._there.set()
        await self.use(None)


class _Registration(Registration):
    def __init__(self, current: CurrentCoordinator, coordinator: Coordinator, registration: Registration) -> None:
        self._current, self._coordinator, self._registration = current, coordinator, registration

    @property
    def member(self) -> str:
        return self._registration.member

    async def renew(self) -> bool:
        if not self._current.asks(self._coordinator):
            return False
        with self._current._asking(self._coordinator):
            return await self._registration.renew()

    async def leave(self) -> None:
        if self._current.asks(self._coordinator):
            await self._registration.leave()

"""A coordinator for tests: that of a node alone (`coordinator.process`), and members beside its values."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping

import msgspec

from dataplane.coordinator import process
from dataplane.coordinator.base import Registration, Unavailable


class _Member(msgspec.Struct):
    value: bytes
    lease_s: float
    until_s: float
    registration: int


class Registry:
    """The coordinator's state, without I/O or a clock: each call is atomic. The simulator puts a network before it.

    The time is passed in and never goes back; each call about members first removes those whose leases have expired by
    then. A call that changes members or values calls `members_changed()` or `value_changed(key)`.
    """

    __slots__ = ("_members", "_registration", "_values", "members_changed", "value_changed")

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._values: dict[str, bytes] = {}
        self._registration = 0
        self.members_changed: Callable[[], None] = lambda: None
        self.value_changed: Callable[[str], None] = lambda key: None

    def register(self, member: str, value: bytes, lease_s: float, now: float) -> int:
        """Register a member. Returns the number of the registration, for `renew`."""
        self.expire(now)
        self._registration += 1
        self._members[member] = _Member(value, lease_s, now + lease_s, self._registration)
        self.members_changed()
        return self._registration

    def renew(self, member: str, registration: int, now: float) -> bool:
        """Renew the lease of a registration. Returns False if it does not exist any more."""
        self.expire(now)
        found = self._members.get(member)
        if found is None or found.registration != registration:
            return False
        found.until_s = now + found.lease_s
        return True

    def leave(self, member: str, registration: int, now: float) -> None:
        if self.renew(member, registration, now):
            del self._members[member]
            self.members_changed()

    def evict(self, member: str, value: bytes, now: float) -> None:
        """See `Coordinator.evict`."""
        self.expire(now)
        found = self._members.get(member)
        if found is not None and found.value == value:
            del self._members[member]
            self.members_changed()

    def expire(self, now: float) -> None:
        """Remove members whose leases have expired."""
        gone = [name for name, member in self._members.items() if member.until_s <= now]
        for name in gone:
            del self._members[name]
        if gone:
            self.members_changed()

    def next_expiry(self) -> float | None:
        """The time at which the next lease expires; None without members."""
        return min((member.until_s for member in self._members.values()), default=None)

    def members(self, now: float) -> Mapping[str, bytes]:
        self.expire(now)
        return {name: member.value for name, member in self._members.items()}

    def values(self) -> Mapping[str, bytes]:
        return dict(self._values)

    def read(self, key: str) -> bytes | None:
        return self._values.get(key)

    def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        """See `Coordinator.swap`."""
        if self._values.get(key) == expected and expected != value:
            if value is None:
                del self._values[key]
            else:
                self._values[key] = value
            self.value_changed(key)
        return self._values.get(key)


class _ProcessRegistration(Registration):
    def __init__(self, now: Callable[[], tuple[Registry, float]], member: str, number: int) -> None:
        self._now, self._member, self._number = now, member, number

    async def renew(self) -> bool:
        registry, now = self._now()
        return registry.renew(self._member, self._number, now)

    async def leave(self) -> None:
        registry, now = self._now()
        registry.leave(self._member, self._number, now)


async def _unkept(key: str, value: bytes | None) -> None:
    """Keep nothing."""


class ProcessCoordinator(process.ProcessCoordinator):
    """A coordinator of nodes in one process."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        values: Mapping[str, bytes] | None = None,
        keep: Callable[[str, bytes | None], Awaitable[None]] = _unkept,
    ) -> None:
        super().__init__(values or {}, keep)
        self._registry = Registry()
        self._registry.members_changed = lambda: self._wake("")  # no value has this key
        self._clock = clock

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

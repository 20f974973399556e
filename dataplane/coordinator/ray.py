"""The coordinator that is an actor of a Ray job: its one event loop takes each call at one moment, which makes it
linearizable. It ends with the job, as its members do; what it knew is gone when it dies.

What always holds: a call is made once (Ray repeats none of them); one that changes something, and whose answer does not
come, raises OutcomeUnknown. A watch is one call that the actor answers when there is something new, and at the latest
after `_POLL_S`, so nothing is asked for while nothing changes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, Any

from dataplane.coordinator.base import Coordinator, OutcomeUnknown, Registration, Unavailable
from dataplane.coordinator.registry import Registry

if TYPE_CHECKING:
    from ray.actor import ActorHandle

TIMEOUT_S = 5.0
"""Seconds until a call is given up."""

_POLL_S = 20.0
_AT_ONCE = 10_000  # calls that the actor has open: a watch is one
_MEMBERS = ""  # watched as if it were a key


class _CoordinatorActor:
    """The state, as an actor. Each method but `wait` runs without a pause, so between two others'."""

    def __init__(self) -> None:
        self._registry = Registry()
        self._registry.members_changed = lambda: self._wake(_MEMBERS)
        self._registry.value_changed = self._wake
        self._waiting: dict[asyncio.Event, str] = {}

    def _wake(self, key: str) -> None:
        for event, watched in self._waiting.items():
            if watched == key:
                event.set()

    async def register(self, member: str, value: bytes, lease_s: float) -> int:
        return self._registry.register(member, value, lease_s, time.monotonic())

    async def renew(self, member: str, registration: int) -> bool:
        return self._registry.renew(member, registration, time.monotonic())

    async def leave(self, member: str, registration: int) -> None:
        self._registry.leave(member, registration, time.monotonic())

    async def evict(self, member: str, value: bytes) -> None:
        self._registry.evict(member, value, time.monotonic())

    async def members(self) -> dict[str, bytes]:
        return dict(self._registry.members(time.monotonic()))

    async def read(self, key: str) -> bytes | None:
        return self._registry.read(key)

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        return self._registry.swap(key, expected, value)

    async def wait(self, key: str, known: Any, most_s: float) -> Any:
        """The value of a key (of `_MEMBERS`: the members), once it is not what is known, or after so many seconds."""
        event = asyncio.Event()
        self._waiting[event] = key
        until = time.monotonic() + most_s
        try:
            while True:
                event.clear()
                now = time.monotonic()
                value = dict(self._registry.members(now)) if key == _MEMBERS else self._registry.read(key)
                if value != known or now >= until:
                    return value
                expiry = self._registry.next_expiry() if key == _MEMBERS else None
                try:
                    async with asyncio.timeout(max(0.0, min(until, until if expiry is None else expiry) - now)):
                        await event.wait()
                except TimeoutError:
                    continue
        finally:
            del self._waiting[event]


def start(name: str, **options: Any) -> ActorHandle:
    """The actor of that name in this Ray job, made if there is none; it lives as long as a handle of it does, in the
    process that made it. `options` are Ray's, for where it is to be."""
    import ray

    remote = ray.remote(_CoordinatorActor)
    made: ActorHandle = remote.options(
        name=name,
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=_AT_ONCE,
        **options,
    ).remote()
    return made


class _RayRegistration(Registration):
    def __init__(self, coordinator: RayCoordinator, member: str, number: int) -> None:
        self._coordinator, self._member, self._number = coordinator, member, number

    @property
    def member(self) -> str:
        return self._member

    async def renew(self) -> bool:
        return bool(await self._coordinator._ask("renew", self._member, self._number))

    async def leave(self) -> None:
        await self._coordinator._ask("leave", self._member, self._number)


class RayCoordinator(Coordinator):
    """See the module. The actor outlives it."""

    def __init__(self, actor: ActorHandle, timeout_s: float = TIMEOUT_S) -> None:
        self._actor = actor
        self._timeout_s = timeout_s
        self._closed = asyncio.Event()

    @property
    def address(self) -> str:
        return f"the Ray actor {self._actor._actor_id.hex()}"

    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        return _RayRegistration(self, member, await self._change("register", member, value, lease_s))

    async def members(self) -> Mapping[str, bytes]:
        members: Mapping[str, bytes] = await self._ask("members")
        return members

    async def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        async for members in self._watch(_MEMBERS):
            yield members

    async def evict(self, member: str, value: bytes) -> None:
        await self._change("evict", member, value)

    async def read(self, key: str) -> bytes | None:
        value: bytes | None = await self._ask("read", _checked(key))
        return value

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        after: bytes | None = await self._change("swap", _checked(key), expected, value)
        return after

    async def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        async for value in self._watch(_checked(key)):
            yield value

    async def _watch(self, key: str) -> AsyncGenerator[Any, None]:
        known = await self._ask("members") if key == _MEMBERS else await self._ask("read", key)
        while True:
            yield known
            before = known
            while known == before:
                known = await self._ask("wait", key, before, _POLL_S, within_s=_POLL_S + self._timeout_s)

    async def _change(self, method: str, *arguments: Any) -> Any:
        """As `_ask`, of what changes something. Raises Unavailable, OutcomeUnknown."""
        if self._closed.is_set():
            raise Unavailable("this coordinator was closed")
        try:
            return await self._ask(method, *arguments)
        except Unavailable as error:
            raise OutcomeUnknown(str(error)) from error

    async def _ask(self, method: str, *arguments: Any, within_s: float | None = None) -> Any:
        """What the actor answers. Raises Unavailable."""
        from ray.exceptions import RayError

        if self._closed.is_set():
            raise Unavailable("this coordinator was closed")
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            answer = asyncio.wrap_future(getattr(self._actor, method).remote(*arguments).future())
            timeout_s = self._timeout_s if within_s is None else within_s
            await asyncio.wait((answer, closed), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                raise Unavailable(
                    "this coordinator was closed"
                    if closed.done()
                    else f"the coordinator's actor has not answered for {timeout_s:.1f} s"
                )
            return answer.result()
        except RayError as error:
            raise Unavailable(f"the coordinator's actor can not be reached: {error}") from error
        finally:
            closed.cancel()

    async def aclose(self) -> None:
        self._closed.set()


def _checked(key: str) -> str:
    if not key:
        raise ValueError("a key has at least one character")
    return key

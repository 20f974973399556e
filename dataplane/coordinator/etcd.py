"""The coordinator on etcd (v3), external or run by the nodes themselves (`cluster.seeds`).

Keys are below `/dataplane/NAME/`: `members/MEMBER`, each with its own lease, and `values/KEY`. A compare-and-set is one
transaction that compares `VALUE`, or `VERSION` with 0 for a missing key.

Invariants: all watches of a client share one stream of etcd. A watch reads its first value after that stream has
begun, and uses only later revisions from the stream, so it misses nothing and never goes back. If the stream breaks,
every watch raises Unavailable: none resumes from a revision that etcd may have compacted, or that means something else
in another etcd. A swap may be repeated, so an unanswered attempt is repeated at the next endpoint, and only a swap that
no endpoint answered raises OutcomeUnknown.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any

from dataplane.coordinator.base import Coordinator, Registration, Unavailable
from dataplane.coordinator.gateway import EtcdRefused, Gateway, GatewayAnswer, Pair, WatchEvent, below, encoded

TIMEOUT_S = 5.0
"""Seconds until a request to etcd is given up."""


class _EtcdRegistration(Registration):
    def __init__(self, gateway: Gateway, key: str, lease: int) -> None:
        self._gateway, self._key, self._lease = gateway, key, lease

    async def renew(self) -> bool:
        try:
            kept = await self._gateway.ask("lease/keepalive", {"ID": self._lease})
        except EtcdRefused:
            return False
        if kept.TTL <= 0:
            return False
        found = await self._gateway.ask("kv/range", {"key": encoded(self._key)})
        return any(pair.lease == self._lease for pair in found.kvs)  # else it was replaced, removed or has expired

    async def leave(self) -> None:
        with suppress(EtcdRefused):  # the lease has expired
            await self._gateway.ask("lease/revoke", {"ID": self._lease})


class _Subscription:
    """The latest change of each key that a watch has not read yet. `watched`: the key, or the prefix of the members.
    `broken`: the stream has ended."""

    __slots__ = ("broken", "changed", "changes", "watched")

    def __init__(self, watched: bytes) -> None:
        self.watched = watched
        self.changes: dict[bytes, WatchEvent] = {}
        self.changed = asyncio.Event()
        self.broken: Unavailable | None = None

    async def next(self) -> Mapping[bytes, WatchEvent]:
        """Wait for changes, and return them. Raises Unavailable."""
        while not self.changes:
            if self.broken is not None:
                raise Unavailable(str(self.broken))
            self.changed.clear()
            await self.changed.wait()
        changes, self.changes = self.changes, {}
        return changes


class _Stream:
    """The stream of changes below a prefix, shared by all watches. It runs while there are any. `members`: the prefix
    of the members."""

    def __init__(self, gateway: Gateway, prefix: str, members: str) -> None:
        self._gateway = gateway
        self._prefix = prefix
        self._members = members.encode()
        self._subscriptions: dict[bytes, dict[_Subscription, None]] = {}  # by what they watch
        self._began: asyncio.Future[None] | None = None
        self._running: asyncio.Task[None] | None = None

    async def subscribe(self, watched: str) -> _Subscription:
        """Begin to receive changes of this key, or of all members for their prefix, before this returns. Raises
        Unavailable."""
        subscription = _Subscription(watched.encode())
        self._subscriptions.setdefault(subscription.watched, {})[subscription] = None
        if self._began is None:
            self._began = asyncio.get_running_loop().create_future()
            self._began.add_done_callback(lambda began: began.cancelled() or began.exception())
            self._running = asyncio.get_running_loop().create_task(self._run(self._began))
        try:
            async with asyncio.timeout(2 * self._gateway.timeout_s):
                await asyncio.shield(self._began)
        except TimeoutError:
            self._break(Unavailable("etcd does not begin a watch"))
            await self._end()
            raise Unavailable("etcd does not begin a watch") from None
        except BaseException:
            await self.unsubscribe(subscription)
            raise
        return subscription

    async def unsubscribe(self, subscription: _Subscription) -> None:
        """End a subscription."""
        same = self._subscriptions.get(subscription.watched, {})
        same.pop(subscription, None)
        if not same:
            self._subscriptions.pop(subscription.watched, None)
        if not self._subscriptions:
            await self._end()

    async def _run(self, began: asyncio.Future[None]) -> None:
        try:
            # This request finds an endpoint that answers, which the stream then uses.
            revision = (await self._gateway.ask("kv/range", {"key": encoded("\0")})).header.revision
            question = {"create_request": below(self._prefix) | {"start_revision": revision + 1}}
            async with aclosing(self._gateway.stream(question)) as answers:
                async for answer in answers:
                    if answer.created and not began.done():
                        began.set_result(None)
                    for event in answer.events:
                        self._give(event)
        except Unavailable as error:
            if not began.done():
                began.set_exception(error)
            self._break(error)
        finally:
            if not began.done():
                began.set_exception(Unavailable("this coordinator was closed"))

    def _give(self, event: WatchEvent) -> None:
        key = event.kv.key
        for subscription in self._subscriptions.get(self._members if key.startswith(self._members) else key, ()):
            subscription.changes[key] = event
            subscription.changed.set()

    def _break(self, error: Unavailable) -> None:
        """End every watch with this error. The next watch begins another stream."""
        for subscription in chain.from_iterable(self._subscriptions.values()):
            subscription.broken = error
            subscription.changed.set()
        self._subscriptions.clear()
        self._began = None

    async def _end(self) -> None:
        running, self._running, self._began = self._running, None, None
        if running is not None and running is not asyncio.current_task():
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def aclose(self) -> None:
        """End it. Idempotent."""
        self._break(Unavailable("this coordinator was closed"))
        await self._end()


class EtcdCoordinator(Coordinator):
    """A coordinator on one etcd."""

    def __init__(
        self,
        endpoints: Sequence[str],
        name: str,
        *,
        tls: ssl.SSLContext | None = None,
        login: tuple[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`endpoints`: HOST:PORT of each server; `name`: of the cluster; `login`: user and password. Raises
        ValueError if no HTTP client is installed."""
        self._gateway = Gateway(endpoints, timeout_s, tls, login)
        self._members = f"/dataplane/{name}/members/"
        self._values = f"/dataplane/{name}/values/"
        self._stream = _Stream(self._gateway, f"/dataplane/{name}/", self._members)

    @property
    def address(self) -> str:
        return f"etcd at {', '.join(self._gateway.endpoints)}"

    def use(self, endpoints: Sequence[str]) -> None:
        """Use these servers from now on."""
        self._gateway.use(endpoints)

    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        lease = (await self._gateway.ask("lease/grant", {"TTL": math.ceil(lease_s)})).ID
        key = self._members + member
        put = {"key": encoded(key), "value": encoded(value), "lease": lease}
        await self._gateway.ask("kv/put", put, writes=True)
        return _EtcdRegistration(self._gateway, key, lease)

    async def members(self) -> Mapping[str, bytes]:
        return self._named(await self._gateway.ask("kv/range", below(self._members)))

    def _named(self, found: GatewayAnswer) -> dict[str, bytes]:
        return {self._name(pair.key): pair.value for pair in found.kvs}

    def _name(self, key: bytes) -> str:
        return key.decode(errors="replace").removeprefix(self._members)

    async def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        changes = await self._stream.subscribe(self._members)
        try:
            found = await self._gateway.ask("kv/range", below(self._members))
            members, revision = self._named(found), found.header.revision
            yield dict(members)
            while True:
                before = dict(members)
                for key, event in (await changes.next()).items():
                    if event.kv.mod_revision <= revision:
                        continue
                    if event.type == "DELETE":
                        members.pop(self._name(key), None)
                    else:
                        members[self._name(key)] = event.kv.value
                if members != before:
                    yield dict(members)
        finally:
            await self._stream.unsubscribe(changes)

    async def evict(self, member: str, value: bytes) -> None:
        key = encoded(self._members + member)
        question = {
            "compare": [_equals(key, value)],
            "success": [{"request_delete_range": {"key": key}}],
        }
        await self._gateway.ask("kv/txn", question, writes=True)

    async def read(self, key: str) -> bytes | None:
        return _value((await self._gateway.ask("kv/range", {"key": self._key(key)})).kvs)

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        name = self._key(key)
        if expected == value:
            return await self.read(key)
        put: dict[str, Any] = {"request_put": {"key": name, "value": encoded(value or b"")}}
        question = {
            "compare": [_equals(name, expected)],
            "success": [{"request_delete_range": {"key": name}} if value is None else put],
            "failure": [{"request_range": {"key": name}}],
        }
        answer = await self._gateway.ask("kv/txn", question, writes=True)
        if answer.succeeded:
            return value
        found = answer.responses[0].response_range if answer.responses else None
        return None if found is None else _value(found.kvs)

    async def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        name = self._values + key
        changes = await self._stream.subscribe(name)
        try:
            found = await self._gateway.ask("kv/range", {"key": encoded(name)})
            last, revision = _value(found.kvs), found.header.revision
            yield last
            while True:
                event = (await changes.next())[changes.watched]
                if event.kv.mod_revision <= revision:
                    continue
                value = None if event.type == "DELETE" else event.kv.value
                if value != last:
                    last = value
                    yield value
        finally:
            await self._stream.unsubscribe(changes)

    def _key(self, key: str) -> str:
        return encoded(self._values + key)

    async def aclose(self) -> None:
        await self._stream.aclose()
        await self._gateway.aclose()


def _equals(key: str, value: bytes | None) -> dict[str, Any]:
    """The comparison of a key's value; for None, of its version with 0."""
    if value is None:
        return {"key": key, "target": "VERSION", "result": "EQUAL", "version": "0"}
    return {"key": key, "target": "VALUE", "result": "EQUAL", "value": encoded(value)}


def _value(pairs: Sequence[Pair]) -> bytes | None:
    return pairs[0].value if pairs else None

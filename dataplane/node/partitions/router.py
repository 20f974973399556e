"""Sends requests to the leader of a partition, and repeats them until there is an answer.

Invariants: a request may be sent several times and to several leaders, so each has a producer sequence number
(`replication.sessions`) or no lasting effect. By its deadline a request ends with the answer or the error of the
partition. Without either, it ends with `OutcomeUnknown` if it may have been executed, else with the reason why it was
not.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Any

from dataplane.clock import Deadline
from dataplane.cluster.membership import Membership
from dataplane.coordinator.base import Coordinator, Unavailable
from dataplane.errors import Backpressure, DataplaneError, DirectoryUnusable, Lost, OutcomeUnknown, PeerUnavailable
from dataplane.node.partitions.channel import Late, PartitionChannel
from dataplane.node.partitions.record import called, is_durable, kind_of
from dataplane.node.partitions.replicas import Replicas
from dataplane.replication.configuration import Configuration, decode
from dataplane.replication.replica import NotLeader
from dataplane.wire import partition_messages as m

Needing = Callable[[str], AbstractAsyncContextManager[object]]
"""Returns a context for a wait for a node. It raises TimeoutError as soon as the node is no member or does not
answer."""

TRY_S = 1.0
"""Seconds to wait for the answer of one leader, in addition to the time that the request may wait at the leader."""

_SHORT_S, _LONG_S = 0.01, 0.5  # the first and the longest pause between attempts


class Router:
    """Sends the requests of one node to partitions."""

    def __init__(
        self,
        replicas: Replicas,
        members: Membership,
        channel: PartitionChannel,
        coordinator: Coordinator,
        needing: Needing,
    ) -> None:
        self._needing = needing
        self._replicas = replicas
        self._members = members
        self._channel = channel
        self._coordinator = coordinator
        self._leaders: dict[str, str] = {}
        self.configurations: dict[str, Configuration] = {}
        """The configurations as last read, by partition."""

    def named(self, partition: str) -> bool:
        """Whether a record known here names the partition."""
        directory = self._replicas.directories.get(kind_of(partition))
        return directory is not None and directory.names(partition)

    async def ask(
        self,
        partition: str,
        request: bytes,
        deadline: Deadline,
        *,
        queue: str = "",
        wait_s: float = 0.0,
        late: Late | None = None,
        patient: bool = True,
    ) -> bytes:
        """Return the answer of the partition's leader. `queue`, `wait_s`: the queue in which the request may wait at
        the leader, and for how long. After a failover it waits at the next leader. `late` is called with each answer
        that arrives too late to be returned. `patient`: repeat a request without a queue until the deadline while a
        limit of the partition refuses it. Raises the error with which the partition refuses; Lost if certainly no
        replica is left, DirectoryUnusable if the disk of the only one has failed; without an answer PeerUnavailable
        or, if the request may have been executed, OutcomeUnknown."""
        unknown: DataplaneError | None = None
        kept: DataplaneError = PeerUnavailable("no leader was found")
        pause_s = _SHORT_S
        silent: set[str] = set()
        how: dict[str, Any] = {"partition": partition, "request": request, "queue": queue, "gives": late is not None}
        while True:
            node = ""
            try:
                node = await self._leader(partition, silent)
                wait = min(wait_s, deadline.remaining_s)
                most = min(TRY_S if unknown is None else TRY_S / 2, deadline.remaining_s) + wait
                if node == self._replicas.me:
                    return await self._replicas.request(partition, request, most, queue, wait, late)
                asked = partial(m.Ask, **how, wait_s=wait)
                async with self._needing(node) if wait else nullcontext():
                    answer: bytes = await self._channel.ask(node, asked, most, late)
                return answer
            except NotLeader as error:
                kept = error
                self._leaders.pop(partition, None)
                if error.leader != node and error.leader not in silent:
                    self._leaders[partition] = error.leader
                silent.discard(error.leader)  # it leads and may only be slow: ask it again after this pause
            except (PeerUnavailable, OutcomeUnknown, TimeoutError) as error:
                self._leaders.pop(partition, None)
                silent.add(node)
                unknown = (
                    error if isinstance(error, DataplaneError) else PeerUnavailable(f"node {node} does not answer")
                )
                kept = unknown
            except DirectoryUnusable as error:  # an earlier attempt may be on the disk that has failed
                raise error if unknown is None else OutcomeUnknown(str(error)) from error
            except (Unavailable, Backpressure) as error:
                if isinstance(error, Backpressure) and (queue or not (patient or error.spill_error)):
                    raise
                kept = error
            if deadline.remaining_s <= pause_s:
                if unknown is None and isinstance(kept, Backpressure):
                    raise kept
                raise self.unanswered(partition, unknown, kept) from kept
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONG_S)

    def unanswered(
        self, partition: str, unknown: DataplaneError | None, kept: DataplaneError | None = None
    ) -> DataplaneError:
        """The error of a request without an answer by its deadline. `unknown`: the error of the last attempt that may
        have been executed, if any. `kept`: the error of the last attempt."""
        coordination = self._members.coordination
        text = f"the leader of {called(partition)} has not answered in time: {unknown or kept}"
        if not coordination.answers:
            text += (
                f"; the coordinator ({coordination.coordinator}) does not answer either, and without it no other node"
                " takes over: start it again, or the hosts of `--seeds` that run it"
            )
        return PeerUnavailable(text) if unknown is None else OutcomeUnknown(text)

    async def _leader(self, partition: str, silent: set[str]) -> str:
        """Choose the node to ask: the known leader, unless it is in `silent` or no member. Otherwise choose another
        replica, which may know the leader or lead by now. If no replica is left, empty `silent` and return the leader
        of the configuration. Raises Unavailable, Lost."""
        hosted = self._replicas.find(partition)
        if hosted is not None and hosted.replica.leads:
            return self._replicas.me
        known = [self._leaders.get(partition, "")]
        if hosted is not None and hosted.configuration.epoch:
            known.insert(0, hosted.configuration.leader[0])
        for node in known:
            if node != self._replicas.me and node not in silent and self._there(node):
                return node
        configuration = await self._read(partition)
        leader = configuration.leader[0]
        for node in (leader, *(follower[0] for follower in configuration.followers)):
            if node not in silent and self._there(node):
                self._leaders[partition] = node
                return node
        silent.clear()
        return leader

    async def _read(self, partition: str) -> Configuration:
        """Return the configuration at the coordinator. If the coordinator does not answer or has lost it, return the
        last known one, or raise Unavailable. Raises Lost if the partition does not exist or every replica has died;
        Corrupt."""
        try:
            value = await self._coordinator.read(self._replicas.key(partition))
        except Unavailable:
            last = self._last(partition)
            if last is None:
                raise
            return last
        if value is None and (self.named(partition) or partition in self.configurations):
            last = self._last(partition)  # the coordinator was wiped: a replica will write it again
            if last is None:
                raise Unavailable(
                    f"the coordinator has no record of {called(partition)}, and no replica has written it again yet"
                )
            configuration = last
        elif not value:
            self.forget(partition)
            raise Lost(f"there is no partition {partition}")
        else:
            configuration = self.configurations[partition] = decode(value)
        replicas = (configuration.leader, *configuration.followers)
        if all(self._members.gone(node, durable=is_durable(partition)) for node, _ in replicas):
            raise Lost(f"every replica of {called(partition)} has died")
        return configuration

    def _last(self, partition: str) -> Configuration | None:
        hosted = self._replicas.find(partition)
        if hosted is not None and hosted.configuration.epoch:
            return hosted.configuration
        return self.configurations.get(partition)

    def _there(self, node: str) -> bool:
        return node in self._members.current

    def forget(self, partition: str) -> None:
        self._leaders.pop(partition, None)
        self.configurations.pop(partition, None)

"""The grants that leaders on this node have sent to other nodes, until the answers are known to have arrived. A grant
is a lease, a permit or a snapshot in the answer to a request.

An answer may be lost with its connection, and its rows would stay leased until the lease expires. Therefore this node
asks the node of the requester which answers have arrived, and gives back the grants of the missing ones. It repeats the
question every `CONFIRM_S` until the node has answered or is gone.

Invariant: while this node leads, a grant has arrived at its requester, was given back, or is listed here. Grants to a
process that has ended, or to a node that is gone, are not listed: their leases end anyway.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from dataplane.cluster.membership import Membership
from dataplane.node.partitions.channel import PartitionChannel
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.wire import partition_messages as m

CONFIRM_S = 1.0
"""Seconds between two questions to a node about the answers that have arrived."""

_AT_ONCE = 1024  # the most answers that one message asks about


class _Delivery(NamedTuple):
    """An answer that was sent: its replica, and the request that gives the grant back. `undoing` is empty if nothing
    has to be given back, since the requester asks for the grant again."""

    hosted: HostedReplica
    undoing: bytes


class UnconfirmedGrants:
    def __init__(self, channel: PartitionChannel, members: Membership) -> None:
        self._channel = channel
        self._members = members
        self._given: dict[str, dict[int, _Delivery]] = {}  # by node and number of the request
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """Number of answers that are not known to have arrived."""
        return sum(map(len, self._given.values()))

    def gave(self, node: str, number: int, hosted: HostedReplica, undoing: bytes) -> None:
        """Note a grant that answers the node's request with this number. `undoing`: the request that gives the grant
        back."""
        self._given.setdefault(node, {})[number] = _Delivery(hosted, undoing)
        if node not in self._timers:
            self._schedule(node)

    def _schedule(self, node: str) -> None:
        self._timers[node] = asyncio.get_running_loop().call_later(CONFIRM_S, self._ask, node)

    def _ask(self, node: str) -> None:
        given = self._given.get(node, {})
        for number in [number for number, each in given.items() if each.hosted.closed]:
            del given[number]
        if not given or self._members.gone(node):
            self.gone(node)
            return
        self._channel.say(node, m.Given(tuple(given)[:_AT_ONCE]))
        self._schedule(node)  # again, since this message may be lost too

    def received(self, node: str, said: m.Received) -> None:
        """Handle a node's reply: forget the grants that have arrived, and give back those that are missing."""
        given = self._given.get(node, {})
        for number in said.numbers:
            given.pop(number, None)
        for number in said.missing:
            lost = given.pop(number, None)
            if lost is not None and lost.undoing and not lost.hosted.closed:
                lost.hosted.request(lost.undoing, lambda outcome: None)

    def gone(self, node: str) -> None:
        """Forget the grants to a node whose process has ended, or that has no unconfirmed grants."""
        self._given.pop(node, None)
        timer = self._timers.pop(node, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        for node in [*self._timers]:
            self.gone(node)

"""Grants of leaders here to requesters on other nodes, until the answers are known to have arrived.

An answer may be lost with its connection; its rows would stay leased until the lease expires. So the node of the
requester is asked which answers have arrived, those of a second in one message, and missing grants are given back. A
node behind a cut link is asked once it is heard again.

Invariant: while this node leads, a grant is known to its requester, given back, or listed here. Grants to a process
that has ended are not listed: its leases end with it.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from dataplane.node.partitions.channel import Channel
from dataplane.node.partitions.hosted import Hosted
from dataplane.wire import partition_messages as m

CONFIRM_S = 1.0
"""The delay after which a node is asked which answers have arrived."""

_AT_ONCE = 1024  # answers that one message asks for


class _Delivery(NamedTuple):
    """An answer under way: its replica, and the request that returns the grant; empty if the requester asks again."""

    hosted: Hosted
    undoing: bytes


class UnconfirmedGrants:
    """See the module."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._given: dict[str, dict[int, _Delivery]] = {}  # -> by the number of the question
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """Number of answers that are not known to have arrived."""
        return sum(map(len, self._given.values()))

    def gave(self, node: str, number: int, hosted: Hosted, undoing: bytes) -> None:
        """Note a grant that answers the node's request with this number. `undoing`: the request that gives it back."""
        self._given.setdefault(node, {})[number] = _Delivery(hosted, undoing)
        if node not in self._timers:
            self._schedule(node)

    def _schedule(self, node: str) -> None:
        self._timers[node] = asyncio.get_running_loop().call_later(CONFIRM_S, self._ask, node)

    def _ask(self, node: str) -> None:
        given = self._given.get(node, {})
        for number in [number for number, each in given.items() if each.hosted.closed]:
            del given[number]
        if not given:
            self.gone(node)
            return
        self._channel.say(node, m.Given(tuple(given)[:_AT_ONCE]))
        self._schedule(node)  # the question may be lost too

    def received(self, node: str, said: m.Received) -> None:
        """Handle the node's reply: give back grants that did not arrive."""
        given = self._given.get(node, {})
        for number in said.numbers:
            given.pop(number, None)
        for number in said.missing:
            lost = given.pop(number, None)
            if lost is not None and lost.undoing and not lost.hosted.closed:
                lost.hosted.request(lost.undoing, lambda outcome: None)

    def gone(self, node: str) -> None:
        """Forget the grants to a node: its process has ended, or no grant is open."""
        self._given.pop(node, None)
        timer = self._timers.pop(node, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop asking. Idempotent."""
        for node in [*self._timers]:
            self.gone(node)

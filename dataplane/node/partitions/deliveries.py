"""What leaders here have given to askers on other nodes, until those are known to have it.

An answer may be lost with its connection, and then nobody knows of the rows that it gave: they would stay leased until
their lease ends. So the asker's node is asked now and then which answers have come, all of a second in one message;
what has not come is given back. A node that is cut off is asked when it is heard again.

What always holds: what an answer gave is known to its asker, is given back, or waits here to be one of both, as long
as this node leads. Of a node whose process has ended nothing waits: its leases end with it.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from dataplane.node.partitions.channel import Channel
from dataplane.node.partitions.hosted import Hosted
from dataplane.wire import partition_messages as m

CONFIRM_S = 1.0
"""After which a node is asked what has come."""

_AT_ONCE = 1024  # answers that one message asks for


class _Delivery(NamedTuple):
    """An answer under way: who gave it, and the request that gives it back; none where the asker asks for it again."""

    hosted: Hosted
    undoing: bytes


class Deliveries:
    """See the module."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._given: dict[str, dict[int, _Delivery]] = {}  # -> by the number of the question
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        """How many answers are not known to have come."""
        return sum(map(len, self._given.values()))

    def gave(self, node: str, number: int, hosted: Hosted, undoing: bytes) -> None:
        """The node's question of this number is answered now."""
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
        """What the node says of what it was asked."""
        given = self._given.get(node, {})
        for number in said.numbers:
            given.pop(number, None)
        for number in said.missing:
            lost = given.pop(number, None)
            if lost is not None and lost.undoing and not lost.hosted.closed:
                lost.hosted.request(lost.undoing, lambda outcome: None)

    def gone(self, node: str) -> None:
        """The process has ended, or nothing that it was given is open."""
        self._given.pop(node, None)
        timer = self._timers.pop(node, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Ask nobody any more. Idempotent."""
        for node in [*self._timers]:
            self.gone(node)

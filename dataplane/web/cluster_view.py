"""A query of a cluster through one of its nodes: the members, and the statistics of each.

Invariants: a query ends after twice `LOOK_S`, however many hosts are silent: once for the own node, once for all
others. A host that has not answered is named with the reason, and the values of others are complete.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dataplane.client.plane import AsyncPlane
from dataplane.clock import monotonic
from dataplane.errors import DataplaneError, PeerUnavailable
from dataplane.observe.stats import Stats

LOOK_S = 1.2
"""The time after which a host counts as silent. With a query a second, silence is visible within 2.5 s, and a host that
refuses connections at once."""

_PAGE = 50  # streams in one answer


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The result of `look`. `at_s`: of the monotonic clock; `wall_s`: seconds since 1970; `took_s`: of the query.
    `own`: the plane's node. `members`: of `plane.members()`, empty outside a cluster. `stats`, `answer_s`: by node that
    answered, its statistics and the seconds of its answer. `silent`: by node that did not answer, the reason."""

    at_s: float
    wall_s: float
    own: str
    took_s: float = 0.0
    members: Mapping[str, Any] = field(default_factory=dict)
    stats: Mapping[str, Stats] = field(default_factory=dict)
    answer_s: Mapping[str, float] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)


async def look(plane: AsyncPlane) -> ClusterView:
    """Query all nodes. Raises PeerUnavailable if the plane's own node does not answer within `LOOK_S`, and the plane's
    errors."""
    began_s = monotonic()
    try:
        async with asyncio.timeout(LOOK_S):
            own = await _ask(plane, None)
            found = await plane.members()
    except TimeoutError:
        raise PeerUnavailable(
            f"the node at {plane.address} has not answered for {LOOK_S} s", address=plane.address
        ) from None
    others = [node for node in found.get("members", {}) if node != own[0].node]
    answers = dict(zip(others, await asyncio.gather(*(_asked(plane, node) for node in others)), strict=True))
    answers[own[0].node] = own
    told = {node: answer for node, answer in answers.items() if not isinstance(answer, str)}
    return ClusterView(
        at_s=monotonic(),
        wall_s=time.time(),
        own=own[0].node,
        took_s=monotonic() - began_s,
        members=found,
        stats={node: stats for node, (stats, _) in told.items()},
        answer_s={node: answer_s for node, (_, answer_s) in told.items()},
        silent={node: answer for node, answer in answers.items() if isinstance(answer, str)},
    )


async def _ask(plane: AsyncPlane, node: str | None) -> tuple[Stats, float]:
    """A node's statistics with those of all streams that it leads, and the time of its answer."""
    began_s = monotonic()
    stats = await plane.stats(node)
    answer_s = monotonic() - began_s
    if len(stats.streams) >= _PAGE:
        stats = replace(stats, streams=await plane.streams(node))
    return stats, answer_s


async def _asked(plane: AsyncPlane, node: str) -> tuple[Stats, float] | str:
    """The result of `_ask` for another node; the reason, as a text, if it does not answer. Raises if the plane is
    disconnected."""
    try:
        async with asyncio.timeout(LOOK_S):
            return await _ask(plane, node)
    except TimeoutError:
        return f"no answer within {LOOK_S} s"
    except DataplaneError as error:
        plane.check()  # if the plane is disconnected, the error is not the other node's
        return str(error)

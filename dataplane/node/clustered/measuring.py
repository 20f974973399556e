"""The figures of a clustered stream: of the partitions that answer in time, and of those that were drained.

What always holds: asking takes `MEASURE_S` at most, whatever hosts are silent; a partition that did not answer is
named, and what it has is in no figure.
"""

from __future__ import annotations

import asyncio
from typing import Any

from dataplane.clock import Deadline
from dataplane.errors import Backpressure, DataplaneError, Lost, OutcomeUnknown, PeerUnavailable
from dataplane.node.clustered.merge import summed
from dataplane.node.clustered.session import Session
from dataplane.node.clustered.streams import Stream
from dataplane.stream import requests as r
from dataplane.stream.totals import with_totals

MEASURE_S = 3.0
"""As long as a leader that has just died may be waited for, and no longer."""


async def measured(session: Session, stream: Stream) -> dict[str, Any]:
    """The figures now; `silent`: the partitions that have not answered. Raises Closed, and what kept them where none
    has."""
    table, partitions, deadline = stream.table, session.partitions(stream), Deadline.after(MEASURE_S)
    asked = (session.ask(partition, r.Measure(), r.Figures, deadline) for partition in partitions)
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    found, silent, kept = list[dict[str, Any]](), list[str](), DataplaneError()
    for partition, outcome in zip(partitions, outcomes, strict=True):
        match outcome:
            case r.Figures():
                found.append(outcome.values)
            case PeerUnavailable() | OutcomeUnknown() | Backpressure() | Lost():
                silent.append(partition.key)
                kept = outcome
            case _:
                raise outcome
    if not found:
        raise kept
    return with_totals(summed(found), table.totals) | {"silent": silent}

"""The causes of slow steps for the page, from `dataplane.diagnosis`, updated continuously.

Steps are watched only while the page has viewers, for `WATCH_S` at a time, and diagnosed in a thread. If the diagnosis
is not installed, or the plane has no graphs, the page shows no causes.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from dataclasses import dataclass
from typing import Any

from dataplane.errors import DataplaneError
from dataplane.web.samples import clipped

log = logging.getLogger(__name__)

WATCH_S = 10.0
MAX_CAUSES = 5
_LEAST = 0.02  # the smallest share of a step that is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseText:
    """A cause of `dataplane.diagnosis.causes` as text: its name, its cost, its place, the waits that lead to it, and
    advice."""

    what: str
    cost: str
    where: str
    chain: str
    change: str


class Causes:
    """The newest causes, in `found`."""

    def __init__(self) -> None:
        self.found: tuple[CauseText, ...] = ()

    async def watch(self, plane: Any, seen: asyncio.Event) -> None:
        """Diagnose while `seen` is set (there are viewers), until cancelled. Returns at once without diagnosis or
        graphs."""
        graphs = getattr(plane, "graphs", None)
        try:
            diagnosis = importlib.import_module("dataplane.diagnosis.diagnosis")
        except ModuleNotFoundError:
            return
        while graphs is not None:
            if not seen.is_set():
                self.found = ()  # otherwise the next viewer would see old causes
                await seen.wait()
            try:
                run = await diagnosis.watched(graphs, asyncio.sleep, WATCH_S)
                self.found = said(await asyncio.to_thread(diagnosis.diagnosed, run))
            except Exception as error:
                if isinstance(error, DataplaneError):  # too little was seen, or a node does not answer
                    log.debug("no diagnosis: %s", error)
                else:
                    log.exception("no diagnosis")
                self.found = ()
                await asyncio.sleep(WATCH_S)


def said(diagnosis: Any) -> tuple[CauseText, ...]:
    """The causes of a `dataplane.diagnosis.causes.Diagnosis`, the most costly first, followed by hosts whose processors
    other jobs use."""
    causes = [cause for cause in diagnosis.causes if cause.share >= _LEAST]
    crowded = [each for each in diagnosis.crowded if each.share >= _LEAST]
    return *map(_cause, causes[:MAX_CAUSES]), *map(_crowded, crowded[:MAX_CAUSES])


def _crowded(crowded: Any) -> CauseText:
    return CauseText(
        what=clipped(f"Not a cause: other processes use the processors of {crowded.host}"),
        cost=f"{crowded.seconds:.2f} s of a step, {100 * crowded.share:.0f} %",
        where=f"of its {crowded.processors} processors this job uses {crowded.job:.1f}, others {crowded.others:.1f}",
        chain="",
        change="no change of this job shortens this wait",
    )


def _cause(cause: Any) -> CauseText:
    processes = f"{len(cause.processes)} processes" if len(cause.processes) != 1 else "one process"
    chain = [f"{link.role} waits for {link.kind} ({link.seconds:.2f} s)" for link in cause.chain]
    return CauseText(
        what=clipped(
            f"{cause.role}: {cause.kind} in {cause.function}" if cause.function else f"{cause.role}: {cause.kind}"
        ),
        cost=f"{cause.seconds:.2f} s of a step, {100 * cause.share:.0f} %",
        where=clipped(f"{cause.file}:{cause.line}, {processes} on {cause.host or 'all hosts'}"),
        chain=" → ".join(clipped(link) for link in chain),
        change=clipped(": ".join(filter(None, (cause.setting, cause.advice)))),
    )

"""Limits of a stream over its partitions: who waits to append borrows from the stream's first partition, which has what
others do not use given back when there is none left.

Quotas are in the partitions' logs (`stream.quota`); here is who asks whom. A partition that is led here borrows when
appends wait there for more than it has. Where the first partition has nothing to lend, that waits at its leader, and
the leader has the others yield what they do not use, again and again while anybody is in need.

`max_lag` needs no quotas: what others have to do is asked for when rows of a policy version come that was not let in
yet. A version that was let in once stays so, though rows of older ones may come later.

What always holds: nothing here may pass a limit, or lose a part of one, whatever is asked twice or fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from dataplane.clock import Deadline, monotonic
from dataplane.errors import DataplaneError, Lost
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.directory import Directory
from dataplane.node.partitions.hosted import Hosted
from dataplane.node.partitions.replicas import Replicas
from dataplane.node.partitions.router import Router
from dataplane.node.partitions.table import Table
from dataplane.node.partitions.waiters import NOTHING
from dataplane.stream import requests as r
from dataplane.stream.quota import Loan
from dataplane.stream.settings import Settings

log = logging.getLogger(__name__)

QUEUE = "quota"
_OLDEST = r.encode_request(r.Oldest())
_WAIT_S = 5.0  # for which a request to borrow waits
_SHORT_S, _LONG_S = 0.02, 0.25  # between rounds in which the others yield what they do not use
_ASK_S = 2.0
_AT_ONCE = 16
_LOOK_S = 1.0


@runtime_checkable
class Limited(Protocol):
    """A state machine that has a part of a stream's limits."""

    partition: int

    @property
    def settings(self) -> Settings:
        """Of the stream."""

    def lacking(self) -> Loan | None:
        """What the partition would have to have in all for those that wait to append; None if nobody waits for that."""

    def lagging(self) -> int | None:
        """The oldest policy version that waits to be let in by other partitions; None if nothing does."""

    def lending(self) -> Mapping[int, Loan]:
        """Of a first partition: what others have, where one of them, or this one, is in need."""


class Quotas:
    """The quotas of the partitions that are led here. `run` looks until it is cancelled."""

    def __init__(self, replicas: Replicas, router: Router, directory: Directory) -> None:
        self._replicas = replicas
        self._router = router
        self._directory = directory
        self._busy: set[str] = set()
        self._background = Background()
        replicas.waited = self._look_at

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for hosted in self._replicas:
                self._look_at(hosted)

    def _look_at(self, hosted: Hosted) -> None:
        """Begin what is due at one partition."""
        machine = hosted.machine
        if hosted.partition in self._busy or not isinstance(machine, Limited):
            return
        if not hosted.replica.serves(monotonic()) or not machine.settings.limited:
            return
        lacks = machine.partition and machine.lacking() is not None
        if lacks or machine.lending() or machine.lagging() is not None:
            self._busy.add(hosted.partition)
            self._background.spawn(self._see_to(hosted, machine))

    async def _see_to(self, hosted: Hosted, machine: Limited) -> None:
        try:
            stream, generation, _ = hosted.partition.rsplit("/", 2)
            pause_s = _SHORT_S
            while not hosted.closed and hosted.replica.serves(monotonic()):
                table = self._directory.find(stream)
                if table is None or table.generation != generation:
                    return
                if (version := machine.lagging()) is not None and not await self._let_in(machine, table, version):
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONG_S)
                elif machine.partition == 0 and (lent := machine.lending()):
                    await self._collect(table, lent)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONG_S)
                elif machine.partition and (lacking := machine.lacking()) is not None:
                    await self._borrow(machine, table, lacking)
                elif version is None:
                    return
        except DataplaneError as error:
            log.debug("the quota of %s is looked after later: %s", hosted.partition, error)
        finally:
            self._busy.discard(hosted.partition)

    async def _ask(self, table: Table, number: int, request: r.Request, wait_s: float = 0.0) -> Loan | None:
        """A loan; None where there is nothing to lend for so long."""
        queue = QUEUE if wait_s else ""
        deadline = Deadline.after(_ASK_S + wait_s)
        result = await self._router.ask(
            table.key(number), r.encode_request(request), deadline, queue=queue, wait_s=wait_s
        )
        if result == NOTHING:
            return None
        answer = r.decode_result(result)
        if isinstance(answer, r.Refused):
            raise answer.error
        assert isinstance(answer, r.Lent)
        return answer.loan

    async def _let_in(self, machine: Limited, table: Table, version: int) -> bool:
        """Ask the other partitions whether `max_lag` lets this policy version in."""
        others = [each.number for each in table.partitions if each.number != machine.partition]
        oldest: list[int] = []
        for at in range(0, len(others), _AT_ONCE):
            found = await asyncio.gather(*(self._oldest(table, number) for number in others[at : at + _AT_ONCE]))
            oldest += [each for each in found if each is not None]
        allowed = min(oldest) + machine.settings.max_lag if oldest else version
        await self._router.ask(
            table.key(machine.partition), r.encode_request(r.Allow(version=allowed)), Deadline.after(_ASK_S)
        )
        return allowed >= version

    async def _oldest(self, table: Table, number: int) -> int | None:
        try:
            result = await self._router.ask(table.key(number), _OLDEST, Deadline.after(_ASK_S))
        except Lost:
            return None
        answer = r.decode_result(result)
        assert isinstance(answer, r.Version)
        return answer.version

    async def _borrow(self, machine: Limited, table: Table, lacking: Loan) -> None:
        """Have more, and somewhat more than is wanted now, if there is something to be had."""
        limits, share = machine.settings, 2 * len(table.partitions)
        wanted = r.Borrow(
            partition=machine.partition,
            version=lacking.version,
            rows=lacking.rows + limits.max_rows // share,
            nbytes=lacking.nbytes + limits.max_bytes // share,
        )
        loan = await self._ask(table, 0, wanted, _WAIT_S)
        if loan is not None:
            await self._ask(table, machine.partition, r.TakeQuota(loan=loan))

    async def _collect(self, table: Table, lent: Mapping[int, Loan]) -> None:
        """Have others yield what they do not use."""
        gone = tuple(number for number in lent if number < table.next and table.find(number) is None)
        if gone:
            await self._ask(table, 0, r.Reclaim(partitions=gone))
        left = [number for number in lent if table.find(number) is not None]
        while left:
            some, left = left[:_AT_ONCE], left[_AT_ONCE:]
            for error in await asyncio.gather(
                *(self._yield(table, number, lent[number]) for number in some), return_exceptions=True
            ):
                if isinstance(error, BaseException) and not isinstance(error, DataplaneError):
                    raise error

    async def _yield(self, table: Table, number: int, lent: Loan) -> None:
        kept = await self._ask(table, number, r.YieldQuota(rows=0, nbytes=0))
        if kept is None or kept == lent:
            return
        lower = r.Borrow(partition=number, version=kept.version, rows=kept.rows, nbytes=kept.nbytes)
        loan = await self._ask(table, 0, lower)
        if loan is not None and loan != kept:
            await self._ask(table, number, r.TakeQuota(loan=loan))

    async def aclose(self) -> None:
        """Look no more. Idempotent."""
        await self._background.aclose()

"""The commits of a data directory: writes that arrive during one go into the next.

A sync of the disk costs the same for one write as for a thousand, so a node has one transaction at a time, for all of
its partitions and its index of shards. Writes are committed in the order in which they were given.

Invariants: an answered write is on disk, with all writes before it. While the disk is full, no write is answered, the
commit is repeated, and `refusal` has the reason. After any other failure all writes fail.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from dataplane.errors import Backpressure
from dataplane.store.durable.database import Database, Work
from dataplane.threads import Pool

Args = ParamSpec("Args")
T = TypeVar("T")

CLOSE_S = 1.5
RETRY_S = 0.5
LAZY_S = 0.2


class Journal:
    """Commits in a thread of its own. Used from one event loop, that of the first write."""

    def __init__(self, database: Database) -> None:
        """Raises OSError if the system starts no thread."""
        self._database = database
        self._thread = Pool(1, "dataplane-commit", storage=True)
        self._waiting: list[tuple[Work, asyncio.Future[None]]] = []
        self._under_way: list[tuple[Work, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.refusal: Backpressure | None = None
        """The reason why nothing is committed now, if the disk is full; else None."""
        self.commits = 0

    def write(self, work: Work, *, lazily: bool = False) -> asyncio.Future[None]:
        """Run `work` in the next transaction, in another thread; the future is done once that is on disk. It may run
        again if a transaction was rolled back. `lazily`: with the next other write.

        Raises, by the future, DirectoryUnusable or Corrupt. Cancelling the future undoes nothing.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((work, future))
        if not lazily:
            self._begin()
        elif self._timer is None and not self._under_way:
            self._timer = loop.call_later(LAZY_S, self._begin)
        return future

    def run(self, work: Callable[Args, T], *args: Args.args, **kwargs: Args.kwargs) -> asyncio.Future[T]:
        """Run `work`, which uses the database, in the thread of the commits: after the one in progress, and before
        those that wait. The future has its result or error."""
        return asyncio.wrap_future(self._thread.submit(work, *args, **kwargs))

    def _begin(self) -> None:
        if self._under_way or self._closed or not self._waiting:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._under_way, self._waiting = self._waiting, []
        self.run(self._commit, [work for work, _ in self._under_way]).add_done_callback(self._ended)

    def _commit(self, works: Sequence[Work]) -> None:
        def all_of_them(sql: sqlite3.Connection) -> None:
            for work in works:
                work(sql)

        self._database.commit(all_of_them)

    def _ended(self, done: asyncio.Future[None]) -> None:
        under_way, self._under_way = self._under_way, []
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if isinstance(error, Backpressure) and not self._closed:
            self.refusal = error
            self._waiting[:0] = under_way
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._begin)
            return
        self.refusal = None
        self.commits += error is None
        for _, future in under_way:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            elif isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
        self._begin()

    def close(self) -> None:
        """Stop. Cancels writes that have not begun, and waits at most `CLOSE_S` for those in progress. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        self._thread.shutdown(cancel_futures=True, patience_s=CLOSE_S)

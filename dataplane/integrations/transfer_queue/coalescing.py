"""Puts that are awaited at the same time, made together: hundreds of trajectories that are put singly take the time of
a few puts, since what a put costs is a message, not its rows.

A put that nobody else's runs beside begins at once; those that are asked for meanwhile are the next one. Puts are made
together where they are into one partition, have fields of the same names, dtypes and dimensions, and no key in common.

What always holds: each put is answered as if it had been made alone, with its own error: where those of several fail,
each is made again by itself. Of two puts of one key, the first that was asked for is made first.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from dataplane.batch import tensordicts, tensors, variants
from dataplane.batch.values import Values
from dataplane.integrations.sharing import TENSOR
from dataplane.integrations.transfer_queue import values
from dataplane.integrations.transfer_queue.kvmeta import KVBatchMeta

_FEW = 16
"""Rows of a put up to which it is made together with others."""

_MOST = 1024
"""Rows of what is made together."""

_OTHER = ""  # the kind of values that are no tensors

Kinds = tuple[tuple[str, str], ...]
"""By field, what its rows are: how tensors were put, their dtype and dimensions."""


@dataclass(slots=True)
class Asked:
    """A put that was asked for. rows: by field, a value a row; None where it has tags alone. alone: what makes it by
    itself."""

    partition: str
    keys: list[str]
    kinds: Kinds | None
    rows: dict[str, list[Any]]
    tags: Sequence[Mapping[str, Any]] | None
    alone: Callable[[], KVBatchMeta]
    answer: Future[KVBatchMeta]


def asked(
    keys: Sequence[str],
    partition: str,
    fields: Any,
    tags: Sequence[Mapping[str, Any]] | None,
    alone: Callable[[], KVBatchMeta],
) -> Asked | None:
    """A put that can be made together with others; None for one that can not, or has a value so large that it may be
    stored already: where values of several puts are one column, that is stored as a whole (`sharing`)."""
    if not 0 < len(keys) <= _FEW or len(set(keys)) < len(keys) or (tags is not None and len(tags) != len(keys)):
        return None
    rows: dict[str, list[Any]] = {}
    kinds: list[tuple[str, str]] = []
    if fields is not None:
        for name, entry in _entries(fields):
            kind, of_field = _rows(entry, whole=tensordicts.is_tensordict(fields))
            if len(of_field) != len(keys) or not isinstance(name, str):
                return None
            if any(_size(value) >= TENSOR for value in of_field):
                return None
            rows[name] = of_field
            kinds.append((name, kind))
        if not rows:
            return None
    found = None if fields is None else tuple(sorted(kinds))
    return Asked(partition, list(keys), found, rows, tags, alone, Future())


def _size(value: Any) -> int:
    """Bytes of the tensors that a value is, or has by key."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    return int(value.numel() * value.element_size()) if tensors.is_tensor(value) else 0


def _entries(fields: Any) -> list[tuple[Any, Any]]:
    if tensordicts.is_tensordict(fields):
        return [(name, fields.get(name)) for name in fields.keys()]  # noqa: SIM118  # iteration is over rows
    return list(fields.items()) if isinstance(fields, Mapping) else []


def _rows(entry: Any, *, whole: bool) -> tuple[str, list[Any]]:
    """What a field's rows are, and each: of a TensorDict's entry, or of one row's value. No rows for what is put
    alone."""
    if tensors.is_tensor(entry):
        nested = bool(entry.is_nested)
        if nested and not whole:
            return _OTHER, []
        rows = list(entry.unbind()) if whole else [entry]
        dimensions = entry.ndim - 1 if whole else entry.ndim
        return f"={'ragged' if nested else 'even'}/{str(entry.dtype)[6:]}/{dimensions}", rows
    if not whole:
        return _OTHER, [entry]
    return _OTHER, list(entry.tolist()) if type(entry).__name__ == "NonTensorStack" else []


class Coalescing:
    """The puts of one process. `together` makes those of a partition; `pool` has the thread that does."""

    def __init__(self, pool: Callable[[], Executor]) -> None:
        self._pool = pool
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[Asked] = deque()
        self._running = False

    async def put(
        self, one: Asked, together: Callable[[str, list[str], Any, list[Mapping[str, Any]] | None], list[KVBatchMeta]]
    ) -> KVBatchMeta:
        """Make it, beside what else is asked for. Raises as it would alone. Cancelled, it is made all the same."""
        if self._pid != os.getpid():  # a forked child has neither the thread nor what waited for it
            self._pid, self._lock, self._running = os.getpid(), threading.Lock(), False
            self._waiting.clear()
        with self._lock:
            self._waiting.append(one)
            begin, self._running = not self._running, True
        if begin:
            self._pool().submit(self._make, together)
        return await asyncio.wrap_future(one.answer)

    def _make(self, together: Callable[..., list[KVBatchMeta]]) -> None:
        """Make all that wait, until none does."""
        while True:
            with self._lock:
                several = self._next()
                if not several:
                    self._running = False
                    return
            _answer(several, together)

    def _next(self) -> list[Asked]:
        """The first that waits, and those that go with it."""
        taken: list[Asked] = []
        left: deque[Asked] = deque()
        keys: set[tuple[str, str]] = set()
        rows = 0
        for each in self._waiting:
            own = {(each.partition, key) for key in each.keys}
            alike = not taken or (
                (each.partition, each.kinds, each.tags is None)
                == (taken[0].partition, taken[0].kinds, taken[0].tags is None)
            )
            fits = alike and rows + len(each.keys) <= _MOST and not own & keys
            (taken if fits else left).append(each)
            rows += len(each.keys) if fits else 0
            keys |= own
        self._waiting = left
        return taken


def _answer(several: list[Asked], together: Callable[..., list[KVBatchMeta]]) -> None:
    if len(several) > 1:
        try:
            keys = [key for each in several for key in each.keys]
            tags = None if several[0].tags is None else [tag for each in several for tag in each.tags or ()]
            answers = iter(together(several[0].partition, keys, _columns(several), tags))
        except Exception:  # whatever it is, one of them can not be made, or none: made alone, each raises its own
            pass
        else:
            for each in several:
                _settle(each, partial(_joined, [next(answers) for _ in each.keys]))
            return
    for each in several:
        _settle(each, each.alone)


def _settle(one: Asked, answer: Callable[[], KVBatchMeta]) -> None:
    """Answer a put, whose caller may have been cancelled, by what this gives or raises."""
    try:
        found = answer()
    except BaseException as error:
        if one.answer.set_running_or_notify_cancel():
            one.answer.set_exception(error)
    else:
        if one.answer.set_running_or_notify_cancel():
            one.answer.set_result(found)


def _joined(rows: Sequence[KVBatchMeta]) -> KVBatchMeta:
    """The meta of several rows of a partition, of the fields that all of them have."""
    if len(rows) == 1:
        return rows[0]
    fields = set.intersection(*(set(row.fields or ()) for row in rows))
    keys, tags = [key for row in rows for key in row.keys], [tags for row in rows for tags in row.tags]
    return KVBatchMeta(keys, tags, rows[0].partition_id, sorted(fields))


def _columns(several: Sequence[Asked]) -> dict[str, Values] | None:
    """The fields of all, as columns. Raises SchemaMismatch."""
    kinds = several[0].kinds
    if kinds is None:
        return None
    found: dict[str, Values] = {}
    for name, kind in kinds:
        rows = [row for each in several for row in each.rows[name]]
        if kind == _OTHER:
            found[name] = values.column(name, rows, len(rows))
        else:
            found[name] = variants.join([(kind, None, tensors.values_of_rows(name, rows))], len(rows))
    return found

"""Merges puts that are awaited at the same time. A put takes the time of a message, almost independent of its number of
rows; so hundreds of trajectories that are put one by one take the time of a few puts.

A put begins at once if no other is running; puts that are requested meanwhile form the next one. Puts are merged if
they go into one partition, have fields of the same names, dtypes and dimensions, and have no key in common.

A single row with nothing else waiting, as verl's agent loops put when a trajectory is done, is laid out directly
(`batch.small_columns`), without a column for each small field. This requires that its large values were written before,
with another response of the same prompt; otherwise the row takes the normal path. Both paths produce the same layout
(`values.columns`).

Invariants: each put has the result that it would have alone, and its own error: if a merged put fails, each of its
puts is made again by itself. Of the puts that can be merged, those of one key are made in the order of the requests.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.batch import images, tensordicts, tensors
from dataplane.batch.small_columns import Single, laid_out_row, single
from dataplane.batch.values import Values
from dataplane.client.table_rows import TableSlice
from dataplane.errors import SchemaMismatch
from dataplane.integrations.transfer_queue import row_access, sharing, values
from dataplane.integrations.transfer_queue.partition import JobPartition, shown
from dataplane.integrations.transfer_queue.session import executor, session
from dataplane.integrations.transfer_queue.sharing import LEAST, TENSOR

if TYPE_CHECKING:
    from transfer_queue.metadata import KVBatchMeta

_FEW = 16
"""The largest number of rows of a put that is merged with others."""

_MOST, _MOST_LARGE = 1024, 16
"""The largest number of rows of a merged put: of small values, of large ones."""

_DEPTH = 8  # of containers in which large values are looked for

OTHER = ""
"""The kind of values that are not tensors."""

Kinds = tuple[tuple[str, str], ...]
"""For each field how its tensors were put, their dtype and their dimensions."""


@dataclass(slots=True)
class Contents:
    """The fields of one row that have a large value, and their keys (`sharing.keys`)."""

    columns: dict[str, Values]
    keys: dict[str, list[bytes | None]]

    def repeated(self, rows: int) -> tuple[dict[str, Values], dict[str, list[bytes | None]]]:
        """The contents of `rows` rows, each equal to this one. Fields that share one object in this row share one in
        the result."""
        seen: dict[int, Values] = {}
        for values_ in self.columns.values():
            if id(values_) not in seen:
                seen[id(values_)] = values_.take(np.zeros(rows, np.int64))
        return (
            {name: seen[id(values_)] for name, values_ in self.columns.items()},
            {name: several * rows for name, several in self.keys.items()},
        )


@dataclass(slots=True)
class Asked:
    """A requested put. rows: for each field one value a row; None if the put has only tags. large: the fields with a
    large value. alone: a function that makes only this put. contents: those of the large fields, once they were looked
    up."""

    partition: str
    keys: list[str]
    kinds: Kinds | None
    rows: dict[str, list[Any]]
    large: tuple[str, ...]
    tags: Sequence[Mapping[str, Any]] | None
    alone: Callable[[], KVBatchMeta]
    answer: Future[KVBatchMeta] = field(default_factory=Future)
    contents: Contents | None = None


def asked(
    keys: Sequence[str],
    partition: str,
    fields: Any,
    tags: Sequence[Mapping[str, Any]] | None,
    alone: Callable[[], KVBatchMeta],
) -> Asked | None:
    """A put that can be merged with others; None for one that cannot."""
    if not isinstance(partition, str):  # users need not check
        return None
    if not 0 < len(keys) <= _FEW or len(set(keys)) < len(keys) or (tags is not None and len(tags) != len(keys)):
        return None
    rows: dict[str, list[Any]] = {}
    kinds: list[tuple[str, str]] = []
    large: list[str] = []
    if fields is not None:
        for name, entry in _entries(fields):
            kind, of_field = _rows(entry, whole=tensordicts.is_tensordict(fields))
            if len(of_field) != len(keys) or not isinstance(name, str):
                return None
            if any(map(_is_large, of_field)):
                large.append(name)
            rows[name] = of_field
            kinds.append((name, kind))
        if not rows or (large and len(keys) > 1):
            return None
    found = None if fields is None else tuple(sorted(kinds))
    return Asked(partition, list(keys), found, rows, tuple(large), tags, alone)


def _is_large(value: Any, depth: int = _DEPTH) -> bool:
    """Whether a value is, or contains, something that is looked up by its content (`sharing`)."""
    if isinstance(value, dict):
        return depth > 0 and any(_is_large(each, depth - 1) for each in value.values())
    if isinstance(value, list | tuple):
        return depth > 0 and any(_is_large(each, depth - 1) for each in value)
    if isinstance(value, bytes | bytearray | str):
        return len(value) >= LEAST
    if tensors.is_tensor(value):
        return int(value.numel() * value.element_size()) >= TENSOR
    return images.is_image(value) or (isinstance(value, np.ndarray) and value.nbytes >= LEAST)


def _entries(fields: Any) -> list[tuple[Any, Any]]:
    if tensordicts.is_tensordict(fields):
        return [(name, fields.get(name)) for name in fields.keys()]  # noqa: SIM118  # iteration is over rows
    return list(fields.items()) if isinstance(fields, Mapping) else []


def _rows(entry: Any, *, whole: bool) -> tuple[str, list[Any]]:
    """The kind of a field's rows and the rows, from a TensorDict's entry or from the value of one row. No rows if
    the field cannot be merged."""
    if tensors.is_tensor(entry):
        nested = bool(entry.is_nested)
        if nested and not whole:
            return OTHER, []
        rows = list(entry.unbind()) if whole else [entry]
        dimensions = entry.ndim - 1 if whole else entry.ndim
        return f"={'ragged' if nested else 'even'}/{str(entry.dtype)[6:]}/{dimensions}", rows
    if not whole:
        return OTHER, [entry]
    return OTHER, list(entry.tolist()) if type(entry).__name__ == "NonTensorStack" else []


class Coalescing:
    """Some of the puts of one process, made in a thread of the pool for puts."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiting: deque[Asked] = deque()
        self._running = False

    async def put(self, one: Asked) -> KVBatchMeta:
        """Make the put, possibly merged with others. Raises as the put alone would. A cancelled put is made anyway."""
        if self._pid != os.getpid():  # a forked child has neither the thread nor the waiting puts
            self._pid, self._lock, self._running = os.getpid(), threading.Lock(), False
            self._waiting.clear()
        with self._lock:
            self._waiting.append(one)
            begin, self._running = not self._running, True
        if begin:
            try:
                self._begin()
            except BaseException as error:
                self._fail([], error)
        return await asyncio.wrap_future(one.answer)

    def _begin(self) -> None:
        try:
            executor("puts").submit(self._make)
        except RuntimeError:  # the pool was ended just now; there is another
            executor("puts").submit(self._make)

    def _make(self) -> None:
        """Make all waiting puts, until none waits."""
        several: list[Asked] = []
        try:
            while True:
                with self._lock:
                    several = self._next()
                    if not several:
                        self._running = False
                        return
                for each in _by_content(several):
                    _answer(each)
        except BaseException as error:
            self._fail(several, error)
            raise

    def _fail(self, several: list[Asked], error: BaseException) -> None:
        """Answer these puts, and those that wait, with the error: else all later puts would wait for ever."""
        with self._lock:
            self._running = False
            failed, self._waiting = [*several, *self._waiting], deque()
        for each in failed:
            if not each.answer.done() and each.answer.set_running_or_notify_cancel():
                each.answer.set_exception(error)

    def _next(self) -> list[Asked]:
        """The first waiting put, and those that can be merged with it."""
        taken: list[Asked] = []
        left: deque[Asked] = deque()
        keys: set[tuple[str, str]] = set()
        rows = 0
        for each in self._waiting:
            own = {(each.partition, key) for key in each.keys}
            alike = not taken or (
                (each.partition, each.kinds, each.large, each.tags is None)
                == (taken[0].partition, taken[0].kinds, taken[0].large, taken[0].tags is None)
            )
            most = _MOST_LARGE if each.large else _MOST
            fits = alike and rows + len(each.keys) <= most and not own & keys
            (taken if fits else left).append(each)
            rows += len(each.keys) if fits else 0
            keys |= own
        self._waiting = left
        return taken


def _by_content(several: list[Asked]) -> list[list[Asked]]:
    """Groups of puts whose large values are equal. A put with unsupported values is a group of its own."""
    if not several[0].large or len(several) == 1:
        return [several]
    found: dict[object, list[Asked]] = {}
    for each in several:
        try:
            columns = columns_of([each], each.large)
            each.contents = Contents(columns, sharing.keys(columns))
            content: object = tuple(sorted((name, key) for name, (key,) in each.contents.keys.items()))
        except Exception:  # made alone, it raises its own
            content = object()
        if each.contents is None or len(each.contents.keys) < len(each.large):
            content = object()  # a value without a key is taken as unique
        found.setdefault(content, []).append(each)
    return list(found.values())


def _answer(several: list[Asked]) -> None:
    if len(several) > 1:
        try:
            keys = [key for each in several for key in each.keys]
            tags = None if several[0].tags is None else [tag for each in several for tag in each.tags or ()]
            columns, known = _all_columns(several)
            answers = iter(_together(several[0].partition, keys, columns, tags, known))
        except Exception:  # at least one put is invalid: made alone, each raises its own error
            pass
        else:
            for each in several:
                _settle(each, partial(_joined, [next(answers) for _ in each.keys]))
            return
    for each in several:
        _settle(each, partial(_alone, each))


def _together(
    partition: str, keys: list[str], columns: Any, tags: list[Mapping[str, Any]] | None, known: sharing.Keys | None
) -> list[KVBatchMeta]:
    """Put these rows. Returns the metadata of each."""
    found, names = row_access.put(session().partition(partition), keys, columns, tags, known)
    return [
        metadata(partition, [key], [own], sorted(compress(names, have)))
        for key, own, have in zip(keys, found.tags, found.have, strict=True)
    ]


def _alone(one: Asked) -> KVBatchMeta:
    """Make a put by itself, by the direct path if that applies. The normal path reports unsupported values."""
    try:
        made = put_row(session().partition(one.partition), one)
    except SchemaMismatch:
        made = None
    if made is None:
        return one.alone()
    found, names = made
    return metadata(one.partition, one.keys, found.tags[:1], sorted(compress(names, found.have[0])))


def metadata(partition: str, keys: list[str], tags: Sequence[Mapping[str, Any]], fields: list[str]) -> KVBatchMeta:
    """The metadata of these rows."""
    from transfer_queue.metadata import KVBatchMeta

    made = KVBatchMeta(partition_id=partition, fields=fields)
    made.keys, made.tags, made._size = keys, list(map(shown, tags)), len(keys)  # its copies of 1,024 tags take 5 ms
    return made


def _settle(one: Asked, answer: Callable[[], KVBatchMeta]) -> None:
    """Answer a put with the result or the error of `answer`. Its caller may have been cancelled."""
    try:
        found = answer()
    except BaseException as error:
        if one.answer.set_running_or_notify_cancel():
            one.answer.set_exception(error)
    else:
        if one.answer.set_running_or_notify_cancel():
            one.answer.set_result(found)


def _joined(rows: Sequence[KVBatchMeta]) -> KVBatchMeta:
    """The metadata of several rows of a partition, with the fields that all of them have."""
    from transfer_queue.metadata import KVBatchMeta

    if len(rows) == 1:
        return rows[0]
    fields = set.intersection(*(set(row.fields or ()) for row in rows))
    keys, tags = [key for row in rows for key in row.keys], [tags for row in rows for tags in row.tags]
    return KVBatchMeta(keys, tags, rows[0].partition_id, sorted(fields))


def _all_columns(several: Sequence[Asked]) -> tuple[dict[str, Values] | None, sharing.Keys | None]:
    """The fields of all puts as columns, and the keys of large values. Raises SchemaMismatch."""
    first = several[0]
    if first.kinds is None:
        return None, None
    if first.contents is None:
        return columns_of(several, list(first.rows)), None
    large, keys = first.contents.repeated(len(several))
    small = columns_of(several, [name for name in first.rows if name not in large])
    return {**small, **large}, keys


def columns_of(several: Sequence[Asked], names: Sequence[str]) -> dict[str, Values]:
    """These fields of all puts as columns. Fields that share the objects of all rows share a column. Raises
    SchemaMismatch."""
    kinds = dict(several[0].kinds or ())
    found: dict[str, Values] = {}
    seen: dict[tuple[int, ...], Values] = {}
    for name in names:
        rows = [row for each in several for row in each.rows[name]]
        if kinds[name] != OTHER:
            found[name] = values.variants_of([(kinds[name], None, tensors.values_of_rows(name, rows))], len(rows))
            continue
        identity = tuple(map(id, rows))
        if identity not in seen:
            seen[identity] = values.column(name, rows, len(rows))
        found[name] = seen[identity]
    return found


def put_row(partition: JobPartition, one: Asked) -> tuple[TableSlice, list[str]] | None:
    """Put a single row by the direct path. Returns its metadata and the fields of the partition, or None, with
    nothing put, if the path does not apply. Raises SchemaMismatch, and as `Table.upsert_and_look`."""
    if one.kinds is None or len(one.keys) != 1:
        return None
    small: list[tuple[str, Single]] = []
    large = list(one.large)
    kinds = dict(one.kinds)
    for name, (value,) in one.rows.items():  # in the order of the others, so that their shards have the same layout
        if name in one.large:
            continue
        found = _single(name, kinds[name], value)
        if found is None:
            return None  # neither small nor looked up
        small.append((name, found))
    row = laid_out_row(small) if small else None
    if row is None:
        return None
    keys = sharing.keys(columns_of([one], large)) if large else {}
    if keys.keys() != set(large):
        return None
    return sharing.with_known(lambda refs: partition.table._put_row(one.keys[0], row, refs, one.tags), keys)


def _single(name: str, kind: str, value: Any) -> Single | None:
    """A field of one row, as the kind that it has."""
    if kind != OTHER:
        found = single(name, [value] if value.ndim else value[None], as_object=False)
        return None if found is None else found._replace(key=kind)
    if tensors.is_tensor(value) or tensordicts.is_tensordict(value) or tensordicts.is_non_tensor(value):
        return None
    if type(value) is str:
        found, kind = single(name, [value], as_object=False), "=text"
    elif type(value) is dict and any(map(tensors.is_tensor, value.values())):
        return None
    else:
        found, kind = single(name, [value], as_object=True), "=object"
    return None if found is None else found._replace(key=kind)

"""Executes puts: stores their rows, and reports them to TransferQueue's controller.

Each put takes a write to the store and a message to TransferQueue's controller, whose only thread serves all processes.
verl's agent loops put each trajectory separately, and many at the same time. So small puts that arrive while another
one is in progress are merged into one shard and one message. No put waits for others to arrive.

Invariants: a put begins once all earlier puts of its rows are done. Either the controller knows a put, or the put
raises and nothing of it stays stored. Cells that the controller may have recorded are not freed: they are reported up
to `_TELLS` times, and if the controller never answers they stay until their key is cleared. Merged puts that fail are
repeated one by one, so that no put fails because of another. A put that waits for room delays no small put of other
rows. If a put is cancelled before it was reported to the controller, nothing of it stays stored.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from dataplane.errors import Closed, OutcomeUnknown
from dataplane.integrations.verl import cells, sharing
from dataplane.integrations.verl.controller import Controller
from dataplane.integrations.verl.entries import ObjectEntries

_SMALL = 1 << 20  # bytes, up to which a put goes with others
_TOGETHER = 512  # puts
_TELLS = 3  # of the same cells, each of which waits for an answer for `controller._ANSWER_S`
# For larger puts and those that wait for room; small ones have a thread of their own.
_THREADS = 3
_CLOSED = "the storage manager was closed"


class PendingPut:
    """One put's rows. `done` ends when the controller knows them."""

    def __init__(
        self,
        partition: str,
        rows: Sequence[int],
        columns: Mapping[str, Any],
        how: Mapping[str, bytes],
        schema: Mapping[str, Mapping[str, Any]],
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """tags: of the rows, for the controller; None if others tell it of them."""
        self.tags = tags
        self.partition = partition
        self.rows = list(rows)
        self.columns = columns
        self.how = how
        self.schema = schema
        self.places = [(partition, row) for row in rows]
        self.nbytes = 0
        self.cells: dict[int, dict[str, bytes]] = {}
        """By row, the cells of which the controller was told."""
        self.replaced: list[Mapping[str, bytes]] = []
        """Cells to free once it is recorded; when `done` ends, also those of puts that were recorded just before."""
        self.done: Future[None] = Future()
        self.done.set_running_or_notify_cancel()  # a waiter that gives up cancels nothing
        self._lock = threading.Lock()
        self._told = self._given_up = False

    def give_up(self) -> bool:
        """Leave nothing of it. False where the controller is being told, or was: it is too late."""
        with self._lock:
            self._given_up = not self._told
            return self._given_up

    def begin_to_tell(self) -> bool:
        """Mark it as told to the controller; False if it was given up before."""
        with self._lock:
            self._told = not self._given_up
            return self._told

    def likeness(self) -> object:
        """Equal for puts that can go together; None for one that goes alone."""
        alike = [_likeness(values, self.how[name]) for name, values in self.columns.items()]
        return None if None in alike else (self.partition, tuple(zip(self.columns, alike, strict=True)))


class Committer:
    """Commits puts. Any thread may submit. Small ones are committed by a thread of its own, large ones by others."""

    def __init__(self, controller: Controller, timeout: float) -> None:
        """timeout: seconds that a put waits for room."""
        self._controller = controller
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dataplane-puts")
        self._small = ThreadPoolExecutor(1, thread_name_prefix="dataplane-small-puts")
        self._waiting: deque[PendingPut] = deque()  # small ones
        self._timeout = timeout
        self._last: dict[tuple[str, int], PendingPut] = {}  # of the puts that are not done, the last of each row
        self._recorded: dict[tuple[str, int], dict[str, bytes]] = {}  # cells of such rows, by puts that are done
        self._lock = threading.Lock()

    def submit(self, put: PendingPut) -> None:
        """Store it and tell the controller, after earlier puts of the same rows; then completes `put.done`."""
        put.nbytes = _nbytes(put.columns)  # first: it raises for a value whose size is none
        with self._lock:
            before = {self._last[place] for place in put.places if place in self._last}
            self._last.update(dict.fromkeys(put.places, put))
        put.done.add_done_callback(lambda _: self._forget(put))
        if before:
            self._after(before, put)
        else:
            self._begin(put)

    def _after(self, before: set[PendingPut], put: PendingPut) -> None:
        """Begin it when these are done."""
        left = len(before)

        def one_less(_: Future[None]) -> None:
            nonlocal left
            with self._lock:
                left -= 1
                last = not left
            if last:
                self._begin(put)

        for each in before:
            each.done.add_done_callback(one_less)

    def _forget(self, put: PendingPut) -> None:
        """It is done. A later put of its rows replaces its cells, and can not have known them when it was submitted."""
        with self._lock:
            for place in put.places:
                before = self._recorded.pop(place, {})
                own = put.cells.get(place[1], {}) if put.done.exception() is None else {}
                put.replaced.append({name: before[name] for name in own if name in before})
                if self._last.get(place) is put:
                    del self._last[place]
                elif place in self._last:
                    self._recorded[place] = before | own

    def _begin(self, put: PendingPut) -> None:
        if put.nbytes > _SMALL:
            self._begin_alone(put)
            return
        try:
            with self._lock:  # so that the call finds it
                self._small.submit(self._commit_small)
                self._waiting.append(put)
        except RuntimeError:  # the pool has ended
            put.done.set_exception(Closed(_CLOSED))

    def _begin_alone(self, put: PendingPut) -> None:
        try:
            self._pool.submit(self._alone, put)
        except RuntimeError:  # the pool has ended
            put.done.set_exception(Closed(_CLOSED))

    def close(self) -> None:
        """Take no more. Idempotent."""
        self._pool.shutdown(wait=False)
        self._small.shutdown(wait=False)

    def _commit_small(self) -> None:
        """Commit the small puts that wait. There is one call for each; the first takes them all."""
        with self._lock:
            taken = [self._waiting.popleft() for _ in range(min(len(self._waiting), _TOGETHER))]
        try:
            for puts in _together(taken):
                self._commit(puts)
        except BaseException as error:  # their putters get it, and the next are taken
            for each in taken:
                if not each.done.done():
                    each.done.set_exception(error)

    def _commit(self, puts: list[PendingPut]) -> None:
        """Commit puts together if there is room now; else each by itself."""
        try:
            self._store(puts, timeout=0.0)
        except OutcomeUnknown as error:  # not stored again: the controller might have recorded other cells
            for put in puts:
                put.done.set_exception(OutcomeUnknown(str(error), **error.fields))
            return
        except Exception:  # made alone, each raises its own error
            for put in puts:
                self._begin_alone(put)
            return
        for put in puts:
            put.done.set_result(None)

    def _alone(self, put: PendingPut) -> None:
        try:
            self._store([put], timeout=self._timeout)
        except BaseException as error:
            put.done.set_exception(error)
        else:
            put.done.set_result(None)

    def _store(self, puts: Sequence[PendingPut], timeout: float) -> None:
        """Store puts, and tell the controller. Raises the errors of both; then nothing is stored, except after
        OutcomeUnknown."""
        made = _made(puts, timeout)
        try:
            self._tell(puts, made)
        except OutcomeUnknown:
            raise
        except BaseException:
            cells.drop(made)
            raise

    def _tell(self, puts: Sequence[PendingPut], made: sharing.Cells) -> None:
        start = 0
        told: list[PendingPut] = []
        index: dict[int, dict[str, bytes]] = {}
        for put in puts:
            own = range(start, start + len(put.rows))
            start = own.stop
            if not put.begin_to_tell():
                cells.drop({name: several[own.start : own.stop] for name, several in made.items()})
                continue
            told.append(put)
            for row, place in zip(put.rows, own, strict=True):
                put.cells[row] = index[row] = {name: several[place] for name, several in made.items()}
        if told:
            schema = merged_schema([(put.schema, len(put.rows)) for put in told])
            rows = [row for put in told for row in put.rows]
            tags = {row: tag for put in told for row, tag in zip(put.rows, put.tags or (), strict=put.tags is not None)}
            self._settled(partial(self._controller.tell, told[0].partition, rows, _by_row(schema, rows), index, tags))

    def _settled(self, tell: Callable[[], None]) -> None:
        """Tell the controller, and again while its outcome is unknown. Raises OutcomeUnknown if it never answers."""
        unknown: OutcomeUnknown | None = None
        for _ in range(_TELLS):
            try:
                tell()
                return
            except OutcomeUnknown as error:
                unknown = error
            except Exception as error:
                if unknown is None:
                    raise
                raise unknown from error
        if unknown is not None:
            raise unknown


def _made(puts: Sequence[PendingPut], timeout: float) -> sharing.Cells:
    """The cells of puts that go together as one."""
    columns = puts[0].columns if len(puts) == 1 else _joined([put.columns for put in puts])
    return sharing.put(columns, puts[0].how, timeout)


def _together(puts: Sequence[PendingPut]) -> list[list[PendingPut]]:
    """Partition the puts into lists that can each be sent as one."""
    lists: list[list[PendingPut]] = []
    alike: dict[object, list[PendingPut]] = {}
    for put in puts:
        likeness = put.likeness()
        if likeness is not None and likeness in alike:
            alike[likeness].append(put)
            continue
        lists.append([put])
        if likeness is not None:
            alike[likeness] = lists[-1]
    return lists


def merged_schema(several: Sequence[tuple[Mapping[str, Mapping[str, Any]], int]]) -> dict[str, dict[str, Any]]:
    """TransferQueue's schema of the fields of several puts, each with its row count, merged as if of one put."""
    first, _ = several[0]
    if len(several) == 1:
        return {name: dict(known) for name, known in first.items()}
    merged = {}
    for name, known in first.items():
        merged[name] = dict(known)
        if known["is_non_tensor"]:
            continue
        shapes: list[Any] = []
        for schema, rows in several:
            shapes += schema[name].get("per_sample_shapes") or [tuple(schema[name]["shape"])] * rows
        if known["is_nested"] or len(set(shapes)) > 1:
            merged[name] |= {"is_nested": True, "shape": shapes[0], "per_sample_shapes": shapes}
    return merged


def _by_row(schema: Mapping[str, Mapping[str, Any]], rows: Sequence[int]) -> dict[str, dict[str, Any]]:
    """The schema with the shapes of rows by row number, as the controller takes it."""
    found = {}
    for name, known in schema.items():
        found[name] = dict(known)
        if (shapes := known.get("per_sample_shapes")) is not None:
            found[name]["per_sample_shapes"] = dict(zip(rows, shapes, strict=True))
    return found


def _likeness(values: Any, how: bytes) -> object:
    """Equal for values of a column that are one column together; None for those that stay by themselves."""
    if isinstance(values, torch.Tensor):
        plain = values.layout == torch.strided and not values.is_nested and values.ndim == 1
        return (how, "tensor", values.dtype) if plain else None
    if type(values) is ObjectEntries:
        return how, ObjectEntries
    if not isinstance(values, list):
        return None
    kinds = {(type(value), value.dtype, value.ndim) if type(value) is torch.Tensor else type(value) for value in values}
    if len(kinds) != 1:
        return None
    (kind,) = kinds
    return (how, kind) if isinstance(kind, tuple) or kind in (str, bytes) else None


def _joined(several: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, values in several[0].items():
        if isinstance(values, torch.Tensor):
            joined[name] = torch.cat([columns[name] for columns in several])
        else:
            joined[name] = type(values)(value for columns in several for value in columns[name])
    return joined


def _nbytes(columns: Mapping[str, Any]) -> int:
    """An estimate of the bytes, from a quick look; counting stops once the put is too large to go with others. verl
    puts the outputs of a model's image processor last."""
    total = 0
    for values in reversed(list(columns.values())):
        total += _size(values)
        if total > _SMALL:
            break
    return total


def _size(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return int(values.numel() * values.element_size())  # a sparse one has no `nbytes`, and is refused later
    if isinstance(values, list | tuple):
        return sum(map(_size, values))
    if isinstance(values, dict):
        return sum(map(_size, values.values()))
    if isinstance(values, str | bytes):
        return len(values)
    return int(getattr(values, "nbytes", 0))

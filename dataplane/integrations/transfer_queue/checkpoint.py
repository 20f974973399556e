"""Checkpoints of all partitions: rows with their keys, tags, fields and consumption, in a directory.

    dataplane.rows    a chain of frames (`client.checkpointfile`): the metadata; then for each partition its rows
                      without values, followed by their values, some rows at a time, as Arrow IPC streams
    metadata.json     a copy of the user's metadata, for other programs

Invariants: a load restores everything that was saved, or raises `Corrupt` and drops nothing. If the process dies during
a save, the directory has either the old rows or the new ones. Nothing is unpickled. Restored rows have other global
indexes, in the same order. Each process of the job may save and load; a load replaces all existing partitions.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.client.checkpointfile import BLOCK, COLUMNS, END, HEAD, CheckpointReader, CheckpointWriter
from dataplane.client.sync import Plane
from dataplane.client.table_rows import TableSlice
from dataplane.errors import Freed, LimitExceeded, Misuse
from dataplane.integrations.transfer_queue import sharing
from dataplane.integrations.transfer_queue.partition import Index, JobPartition, new_keys
from dataplane.integrations.transfer_queue.session import Session, session

log = logging.getLogger(__name__)

_ROWS, _METADATA = "dataplane.rows", "metadata.json"
_PAGE_BYTES = 32 << 20
_TRIES = 8
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write all partitions to a directory, replacing an older checkpoint. `metadata` is stored in its `metadata.json`.

    Rows that are put or consumed meanwhile are included or not, row by row. Values are saved with
    include_storage=False too, with a warning, as by TransferQueue's SimpleStorage: they would be lost with the node.
    Raises NotStarted, OSError, Misuse (no file can be written there), LimitExceeded (the disk is full).
    """
    if not include_storage:
        log.warning("include_storage=False has no effect: values that are not saved would be lost when the node ends")
    own, target = session(), Path(checkpoint_dir)
    target.mkdir(parents=True, exist_ok=True)
    described = json.dumps({"user_metadata": metadata or {}}, indent=2)
    with CheckpointWriter(target / _ROWS) as file:
        file.frame(HEAD, described.encode())
        for name in own.partitions():
            _save(own, own.partition(name), file)
        file.frame(END, b"")
        file.commit()
    (target / _METADATA).write_text(described)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Replace all partitions by those of a checkpoint.

    Raises FileNotFoundError if there is none, Corrupt if it was changed, NotStarted; and Backpressure, after the former
    partitions were dropped: load again.
    """
    own, path = session(), Path(checkpoint_dir) / _ROWS
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {checkpoint_dir}, which would have {_ROWS} and {_METADATA}")
    with CheckpointReader(path) as file:
        kind = -1
        while not file.ended:
            kind, _ = file.frame()
        if kind != END:
            raise file.corrupt("was cut short")
    for name in own.partitions():
        own.partition(name).drop()
    with CheckpointReader(path) as file:
        _load(own, file)


class _Saved(msgspec.Struct, frozen=True):
    """A partition without its values."""

    name: str
    keys: list[str] | None
    """None: it was cleared meanwhile, and is not there."""

    tags: list[dict[str, Any]]
    consumed: dict[str, list[int]]
    """By task, positions of rows."""


def _save(own: Session, partition: JobPartition, file: CheckpointWriter) -> None:
    """Write a partition; again if rows were cleared or replaced meanwhile: a load takes the last one written."""
    begun = False
    for _ in range(_TRIES):
        names = list(partition.table.schema())
        rows = partition.all(names)
        if rows is None:
            if begun:
                file.frame(BLOCK, _encode(_Saved(partition.name, None, [], {})))
            return
        if list(partition.table.schema()) != names:  # the rows may have fields that were not asked for
            continue
        begun = True
        try:
            tasks = own.plane.tables().get(partition.table.name, {}).get("tasks", [])
            consumed = {task: np.flatnonzero(partition.table.claimed(task, rows.numbers)).tolist() for task in tasks}
            file.frame(BLOCK, _encode(_Saved(partition.name, rows.keys, rows.tags, consumed)))
            _save_values(own.plane, partition, rows, names, file)
        except (Misuse, Freed):  # rows were cleared or replaced since: as they are now, then
            continue
        return
    raise Misuse(f"rows of partition {partition.name!r} are cleared or replaced all the time: save when that is done")


def _save_values(
    plane: Plane, partition: JobPartition, rows: TableSlice, names: Sequence[str], file: CheckpointWriter
) -> None:
    """Write the values: a table for rows that have the same fields, several if they are large, each behind the
    positions of its rows."""
    kinds, which = np.unique(rows.have, axis=0, return_inverse=True) if len(names) else (np.empty((0, 0)), np.empty(0))
    for kind, flags in enumerate(kinds):
        fields = [name for name, there in zip(names, flags, strict=True) if there]
        places: Index = np.flatnonzero(which.reshape(-1) == kind)
        if not fields:
            continue
        ref = partition.table.read(rows.numbers[places], fields)
        _save_pages(plane, ref, places, file)


def _save_pages(plane: Plane, ref: BatchRef, places: Index, file: CheckpointWriter) -> None:
    """Write the rows in tables of about 32 MiB, one of which is in memory at a time. Rows that do not fit into the
    node's memory are written in smaller tables: of fewer rows, and a single row column by column. Raises as
    `Plane.get`."""
    step = max(1, _PAGE_BYTES * len(ref) // max(1, ref.nbytes))
    left = [(slice(start, min(start + step, len(ref))), ref) for start in reversed(range(0, len(ref), step))]
    while left:
        page, of = left.pop()
        half = (page.start + page.stop) // 2
        try:
            batch = plane.get(of[page])
        except LimitExceeded:
            if half > page.start:
                left += [(slice(half, page.stop), of), (slice(page.start, half), of)]
            elif len(of.columns) > 1:
                left += [(page, of.select(name)) for name in of.columns]
            else:
                raise
            continue
        file.frame(COLUMNS, _encode(places[page].tolist()))
        file.table(batch)
        del batch


def _load(own: Session, file: CheckpointReader) -> None:
    """Put the partitions of a file that was checked."""
    table: Any = None
    numbers: Index = np.empty(0, np.int64)
    while True:
        kind, payload = file.frame()
        if kind == END:
            return
        if kind == HEAD:
            continue
        try:
            if kind == BLOCK:
                saved = _decode(payload, type=_Saved)
                partition = own.partition(saved.name)
                partition.drop()
                table = partition.table
                numbers = table.upsert(saved.keys, tags=saved.tags) if saved.keys else numbers[:0]
                if saved.keys == []:  # all were cleared: it is there, and has no rows
                    table.clear(table.numbers(new_keys(1), create=True))
                for task, positions in saved.consumed.items():
                    if positions:
                        table.claim(task, numbers[positions])
            else:
                places = _decode(payload, type=list[int])
                sharing.write(partial(table.upsert, numbers[places]), file.columns())
        except (msgspec.MsgspecError, IndexError) as error:
            raise file.corrupt(f"has an invalid entry: {error}") from error

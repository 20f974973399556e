"""Checkpoints of all partitions: rows with their keys, tags, fields and consumption, in a directory.

    metadata.json               the user's metadata, and each other file with its size and digest
    partitions/<n>.bin          a partition without its values, as MessagePack
    partitions/<n>-<m>.arrow    the values of some of its rows, as an Arrow IPC stream

Invariants: a load restores all that was saved, or raises `Corrupt` and drops nothing; whenever the process dies, the
directory has its old or its new content, except between two renames, after which the next load restores the old one;
nothing is unpickled. Restored rows have other global indexes, in the same order. Each process of the job may save
and load; a load replaces everything that exists.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dataplane.client.table_rows import Rows
from dataplane.errors import Corrupt, Misuse, SchemaMismatch
from dataplane.integrations.transfer_queue import manifest
from dataplane.integrations.transfer_queue.manifest import Manifest
from dataplane.integrations.transfer_queue.partition import Index, Partition, new_keys
from dataplane.integrations.transfer_queue.session import Session, session

log = logging.getLogger(__name__)

_PARTITIONS = "partitions"
_PAGE_BYTES = 64 << 20
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """Write all partitions to a directory, replacing its content. `metadata` is stored in its `metadata.json`.

    Rows that are put or consumed meanwhile are included or not, row by row. Values are saved with
    include_storage=False too, with a warning, as by TransferQueue's SimpleStorage: they would be lost with the node.
    Raises NotStarted, OSError.
    """
    if not include_storage:
        log.warning("include_storage=False has no effect: values that are not saved are lost as the node ends")
    own, target = session(), Path(checkpoint_dir)
    fresh, old = _beside(target)
    shutil.rmtree(fresh, ignore_errors=True)
    (fresh / _PARTITIONS).mkdir(parents=True)
    try:
        files: list[str] = []
        for number, name in enumerate(own.partitions()):
            files += _save(own, own.partition(name), fresh, f"{_PARTITIONS}/{number}")
        manifest.write(fresh, files, metadata or {})
        _sync(fresh)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        fresh.rename(target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """Replace all partitions by those of a checkpoint.

    Raises FileNotFoundError if there is none, Corrupt if it was changed, ProtocolMismatch if it is of an older
    version, NotStarted, Backpressure.
    """
    own, target = session(), Path(checkpoint_dir)
    _, old = _beside(target)
    if not target.exists() and old.exists():  # the process that saved died between two renames
        old.rename(target)
    if not target.is_dir():
        raise FileNotFoundError(f"there is no checkpoint at {target}")
    listed = Manifest(target)
    listed.check()
    for name in own.partitions():
        own.partition(name).table.drop()
    for name in listed.names(".bin"):
        _load(own, listed, target, name)


def _beside(target: Path) -> tuple[Path, Path]:
    return target.parent / f"{target.name}.tmp", target.parent / f"{target.name}.old"


class _Saved(msgspec.Struct, frozen=True):
    """A partition without its values."""

    name: str
    keys: list[str]
    tags: list[dict[str, Any]]
    consumed: dict[str, list[int]]
    """By task, positions of rows."""
    files: list[tuple[list[str], list[int]]]
    """The fields, and the positions of the rows, of each file of values."""


def _save(own: Session, partition: Partition, directory: Path, stem: str) -> list[str]:
    """Write a partition. Returns the names of its files."""
    names = list(partition.table.schema())
    for _ in range(8):
        rows = partition.all(names)
        if rows is None:
            return []
        try:
            files = list(_values(own, partition, rows, names, directory / stem))
            tasks = own.plane.tables().get(partition.table.name, {}).get("tasks", [])
            consumed = {task: np.flatnonzero(partition.table.claimed(task, rows.numbers)).tolist() for task in tasks}
        except Misuse:  # rows were cleared since: as they are now, then
            continue
        saved = _Saved(partition.name, rows.keys, rows.tags, consumed, files)
        (directory / f"{stem}.bin").write_bytes(_encode(saved))
        return [f"{stem}.bin", *(f"{stem}-{number}.arrow" for number in range(len(files)))]
    raise Misuse(f"rows of partition {partition.name!r} are cleared all the time: save when that is done")


def _values(
    own: Session, partition: Partition, rows: Rows, names: Sequence[str], path: Path
) -> Iterator[tuple[list[str], list[int]]]:
    """Write the values: a file `<path>-<number>.arrow` for rows that have the same fields, several if they are
    large."""
    from dataplane.batch import arrow_validate  # as in `_load`

    number = 0
    kinds, which = np.unique(rows.have, axis=0, return_inverse=True) if len(names) else (np.empty((0, 0)), np.empty(0))
    for kind, flags in enumerate(kinds):
        fields = [name for name, there in zip(names, flags, strict=True) if there]
        places: Index = np.flatnonzero(which.reshape(-1) == kind)
        if not fields:
            continue
        ref = partition.table.read(rows.numbers[places], fields)
        step = max(1, _PAGE_BYTES * len(places) // max(1, ref.nbytes))
        for start in range(0, len(places), step):
            values = own.plane.get(ref[start : start + step]).to_arrow()
            Path(f"{path}-{number}.arrow").write_bytes(arrow_validate.encode_table(values))
            number += 1
            yield fields, places[start : start + step].tolist()


def _load(own: Session, listed: Manifest, directory: Path, name: str) -> None:
    from dataplane.batch import arrow_in, arrow_validate  # pyarrow is heavy, and needed only here

    path = directory / name
    try:
        saved = _decode(listed.content(name), type=_Saved)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{path} is not what was saved: {error}", path=str(path)) from error
    table = own.partition(saved.name).table
    if not saved.keys:  # all were cleared: it is there, and has no rows
        table.clear(table.numbers(new_keys(1), create=True))
        return
    numbers = table.upsert(saved.keys, tags=saved.tags)
    for number, (_, places) in enumerate(saved.files):
        values = f"{name.removesuffix('.bin')}-{number}.arrow"
        try:
            read = arrow_validate.decode_table(listed.content(values))
            table.upsert(numbers[places], dict(arrow_in.columns_of(read, checked=True)))
        except (Corrupt, SchemaMismatch, IndexError) as error:
            where = directory / values
            raise Corrupt(f"{where} is not what was saved: {error}", path=str(where)) from error
    for task, taken in saved.consumed.items():
        if taken:
            table.claim(task, numbers[taken])


def _sync(directory: Path) -> None:
    """Flush the directory to disk."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())

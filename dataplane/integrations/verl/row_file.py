"""A file of a checkpoint: rows that TransferQueue's controller knows by their cells, with their values.

The file is a chain of frames (`client.checkpointfile`): for each table of rows the old cells, by field, and the values
as an Arrow IPC stream. Reading puts the values into the plane again under new cells, and returns the new cell of each
old one. The controller's own state contains the old cells, so each row and field that it knows gets its own value or
none, and never another's.

Invariants: one page of the values is in memory at a time, or one row if that is larger; nothing is unpickled; the
values read are those that were written, or `Corrupt` is raised and nothing of them stays in the plane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from dataplane.batch.ref import BatchRef
from dataplane.client.checkpointfile import COLUMNS, END, CheckpointReader, CheckpointWriter
from dataplane.errors import DataplaneError, Freed, LimitExceeded, OwnerDied
from dataplane.integrations.process import with_plane
from dataplane.integrations.verl import cells, sharing

_PAGE_BYTES = 32 << 20
_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode

#: Rows: by field, the cell of each row, or None where it has none.
Rows = Mapping[str, Sequence[bytes | None]]


def write(path: Path, several: Sequence[Rows], timeout: float) -> tuple[bytes, int]:
    """Write the rows to a file. Returns its id, and how many values are missing because they were freed, or their node
    has died, meanwhile.

    timeout: seconds to wait for room for spilled values. Raises Backpressure, LimitExceeded (the disk is full),
    PeerUnavailable.
    """
    with CheckpointWriter(path) as file:
        writing = _Writing(file, timeout)
        for rows in several:
            for found in cells.find(rows):
                places = range(len(found.ref)) if found.positions is None else found.positions.tolist()
                old = {name: [rows[name][place] for place in places] for name in found.how}
                step = max(1, _PAGE_BYTES * len(found.ref) // max(1, found.ref.nbytes))
                for start in range(0, len(found.ref), step):
                    page = slice(start, start + step)
                    writing.page(found.ref[page], {name: own[page] for name, own in old.items()})
        file.frame(END, _encode(writing.tables))
        file.commit()
    return file.id, writing.lost


class _Writing:
    """A file that is being written."""

    def __init__(self, file: CheckpointWriter, timeout: float) -> None:
        self._file = file
        self._timeout = timeout
        self.tables = 0
        self.lost = 0

    def page(self, ref: BatchRef, old: Mapping[str, Sequence[bytes | None]]) -> None:
        """Write these rows; in smaller pages if they cannot be read together."""
        try:
            batch = with_plane(lambda plane: plane.get(ref, timeout=self._timeout))
        except (Freed, OwnerDied, LimitExceeded) as error:
            if len(ref) > 1:
                half = len(ref) // 2
                self.page(ref[:half], {name: own[:half] for name, own in old.items()})
                self.page(ref[half:], {name: own[half:] for name, own in old.items()})
            elif len(old) > 1:
                for name, own in old.items():
                    self.page(ref.select(name), {name: own})
            elif isinstance(error, LimitExceeded):
                raise
            else:
                self.lost += 1
            return
        self._file.frame(COLUMNS, _encode(old))
        self._file.table(batch)
        self.tables += 1


class Restored:
    """Rows that were read into the plane: the new cell of each old one."""

    def __init__(self) -> None:
        self.cells: dict[bytes, bytes] = {}

    def free(self, kept: frozenset[bytes] | set[bytes] = frozenset()) -> None:
        """Free the values of all new cells except those kept."""
        with suppress(DataplaneError):
            free([cell for cell in self.cells.values() if cell not in kept])


def free(several: Sequence[bytes]) -> None:
    """Free the values of these cells. The values of a dead node are gone already. Raises PeerUnavailable, Corrupt."""
    for found in cells.find({"": several}) if several else ():
        with_plane(lambda plane, ref=found.ref: plane.free(ref))  # type: ignore[misc]  # mypy knows no such lambda


def read(path: Path, file_id: bytes, timeout: float) -> dict[bytes, bytes]:
    """Put the rows of the file with this id into the plane. Returns the new cell of each old one.

    timeout: seconds to wait for room for a page. Raises Corrupt, ProtocolMismatch, Backpressure, LimitExceeded,
    PeerUnavailable; then nothing of it stays.
    """
    made = Restored()
    try:
        with CheckpointReader(path) as file:
            if file.id != file_id:
                raise file.corrupt("is of another checkpoint")
            _read(file, made.cells, timeout)
    except BaseException:
        made.free()
        raise
    return made.cells


def _read(file: CheckpointReader, made: dict[bytes, bytes], timeout: float) -> None:
    tables = 0
    while True:
        kind, payload = file.frame()
        if kind == END:
            if not file.ended or payload != _encode(tables):
                raise file.corrupt("has tables too few or too many")
            return
        try:
            old: dict[str, list[bytes]] = _decode(payload, type=dict[str, list[bytes]])
        except msgspec.MsgspecError as error:
            raise file.corrupt(f"holds what is no table of rows: {error}") from error
        if kind != COLUMNS or not old:
            raise file.corrupt("has a table without the cells of its rows")
        columns = file.columns()
        if columns.keys() != old.keys() or any(columns[name].rows != len(own) for name, own in old.items()):
            raise file.corrupt("has values of other rows than it says")
        _put(columns, old, made, timeout)
        tables += 1


def _put(columns: dict[str, Any], old: Mapping[str, list[bytes]], made: dict[bytes, bytes], timeout: float) -> None:
    new = sharing.restore(columns, {name: cells.way(own[0]) for name, own in old.items()}, timeout)
    for name, own in old.items():
        made.update({was: cells.given_back_as(is_, was) for was, is_ in zip(own, new[name], strict=True)})

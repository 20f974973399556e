"""Checkpoints of a TransferQueue with rows in the plane, and the steps to resume from one.

    controller_state.pkl       TransferQueue's own: rows, keys, tags, what was consumed, and our cells
    dataplane/<n>.rows         rows with their values (`row_file`)
    dataplane/files            the id of each of those files, and the digest of the state

TransferQueue has a storage manager save its part, and restore it before the controller restores its own. The cells in
the controller's state are the old ones, so after it has loaded that state, it gets the new cells of the values.

Invariants: nothing is changed if a file was changed; a row of the restored state has all its values, or is cleared,
and a warning says how many were; the rows that the plane had before the load are freed after it. TransferQueue puts
the directory in place as a whole, after all of it is written.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from dataplane.client.checkpointfile import END, CheckpointReader, CheckpointWriter
from dataplane.errors import Corrupt, DataplaneError, Misuse
from dataplane.integrations.process import with_plane
from dataplane.integrations.verl import cells, row_file
from dataplane.integrations.verl.controller import Controller, Index
from dataplane.integrations.verl.hosts import each_host, results
from dataplane.integrations.verl.row_file import Restored

log = logging.getLogger(__name__)

_OURS = "dataplane"
_STATE = "controller_state.pkl"
_FILES, _SUFFIX = "files", ".rows"
_MESSAGE_ROWS = 4096

#: All cells, by partition and row.
Indexes = Mapping[str, Index]


def save(controller: Controller, directory: Path, timeout: float) -> None:
    """Add the rows to the checkpoint that TransferQueue writes to this directory.

    Rows are put and cleared meanwhile, so the controller writes its state once more after the values are on disk,
    and the rows put in between are added. Raises OSError, and as `row_file.write`.
    """
    own = directory / _OURS
    own.mkdir()
    first = indexes(controller)
    ids, lost = _write(own, first, 0, timeout)
    controller.save(str(directory / _STATE))
    seen = set(_all(first))
    more, lost_since = _write(own, _without(indexes(controller), seen), len(ids), timeout)
    if lost_since or lost:
        log.warning(
            "%d values were cleared, replaced or lost while the checkpoint %s was written: rows of it that still need"
            " them will be cleared when it is loaded",
            lost + lost_since,
            directory,
        )
    with CheckpointWriter(own / _FILES) as file:
        file.frame(END, msgspec.msgpack.encode((ids | more, _digest(directory / _STATE))))
        file.commit()


def load(directory: Path, timeout: float) -> Restored:
    """Put the rows of a checkpoint into the plane. The controller does not know them yet.

    Raises Misuse if the checkpoint has no rows of the backend, Corrupt if it was changed, and as `row_file.read`;
    then nothing was changed.
    """
    own = directory / _OURS
    if not own.is_dir():
        raise Misuse(
            f"the checkpoint {directory} was saved with another storage backend: load it with that, or save it again"
            " with this one"
        )
    ids = _listed(own / _FILES, directory / _STATE)
    restored = Restored()
    outcomes = each_host([(None, row_file.read, (own / name, file_id, timeout)) for name, file_id in ids.items()])
    for outcome in outcomes:
        if not isinstance(outcome, Exception):
            restored.cells.update(outcome)
    try:
        results(outcomes)
    except Exception:
        restored.free()
        raise
    return restored


def _listed(path: Path, state: Path) -> dict[str, bytes]:
    """The ids of the files of a checkpoint, by name. Raises Corrupt if they or the state were changed."""
    if not path.is_file():
        raise Corrupt(f"{path} is missing", path=str(path))
    with CheckpointReader(path) as file:
        try:
            ids, digest = msgspec.msgpack.decode(file.frame()[1], type=tuple[dict[str, bytes], str])
        except msgspec.MsgspecError as error:
            raise file.corrupt(f"names no files: {error}") from error
    for each in [path.parent / name for name in ids] + [state] * bool(digest):
        if not each.is_file():
            raise Corrupt(f"{each} is missing", path=str(each))
    if digest != _digest(state):
        raise Corrupt(f"{state} is not the file that was written there", path=str(state))
    return ids


def _digest(path: Path) -> str:
    """The digest of a file; empty without one."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def indexes(controller: Controller) -> Indexes:
    """All cells that the controller has now."""
    return {partition: controller.cells(partition) for partition in controller.partitions()}


def settle(controller: Controller, before: Indexes, restored: Restored | None) -> None:
    """Replace the old cells of a loaded state by the new ones. `before`: the controller's cells before the load."""
    after = indexes(controller)
    if restored is None:  # it was saved without its rows
        kept = set(_all(after))
        row_file.free([cell for cell in _all(before) if cell not in kept])
        _warn_of_lost(after)
        return
    kept, cleared = set(), 0
    for partition, index in after.items():
        found, missing = {}, []
        for row, own in index.items():
            if all(cell in restored.cells for cell in own.values()):
                found[row] = {name: restored.cells[cell] for name, cell in own.items()}
                kept.update(found[row].values())
            else:
                missing.append(row)
        rows = [row for row, own in found.items() if own]
        for start in range(0, len(rows), _MESSAGE_ROWS):
            part = rows[start : start + _MESSAGE_ROWS]
            controller.tell(partition, part, {}, {row: found[row] for row in part})
        if missing:
            controller.clear(partition, missing)
            cleared += len(missing)
    if cleared:
        log.warning("%d rows of the checkpoint were cleared: they have no values in it", cleared)
    restored.free(kept)
    row_file.free(list(_all(before)))


def _all(several: Indexes) -> Iterable[bytes]:
    return (cell for index in several.values() for own in index.values() for cell in own.values())


def _without(several: Indexes, seen: set[bytes]) -> Indexes:
    """The cells that are not in `seen`."""
    left: dict[str, Index] = {}
    for partition, index in several.items():
        rows = {row: {name: cell for name, cell in own.items() if cell not in seen} for row, own in index.items()}
        left[partition] = {row: own for row, own in rows.items() if own}
    return left


def _write(directory: Path, several: Indexes, first: int, timeout: float) -> tuple[dict[str, bytes], int]:
    """Write a file for each node that has rows, on its own host if possible. Returns their ids by name, and how many
    values were lost."""
    by_node: dict[bytes, list[row_file.Rows]] = {}
    for index in several.values():
        for node, rows in _by_node(index).items():
            by_node.setdefault(node, []).append(rows)
    names = [f"{number}{_SUFFIX}" for number in range(first, first + len(by_node))]
    jobs = [
        (node, row_file.write, (directory / name, rows, timeout))
        for name, (node, rows) in zip(names, by_node.items(), strict=True)
    ]
    written = results(each_host(jobs))
    return {name: own for name, (own, _) in zip(names, written, strict=True)}, sum(lost for _, lost in written)


def _by_node(index: Index) -> dict[bytes, dict[str, Sequence[bytes | None]]]:
    """The cells of a partition, by the node that stores the values, as columns of the rows."""
    fields = dict.fromkeys(name for own in index.values() for name in own)
    nodes = dict.fromkeys(cells.node(cell) for own in index.values() for cell in own.values())
    if len(nodes) == 1:
        return {node: {name: [own.get(name) for own in index.values()] for name in fields} for node in nodes}
    found: dict[bytes, dict[str, Sequence[bytes | None]]] = {}
    for node in nodes:
        found[node] = {}
        for name in fields:
            own_cells = [own.get(name) for own in index.values()]
            found[node][name] = [None if cell is None or cells.node(cell) != node else cell for cell in own_cells]
    return found


def _warn_of_lost(after: Indexes) -> None:
    """Warn of rows that were in nodes of an earlier run and are not in the checkpoint."""
    try:
        members = with_plane(lambda plane: [plane.stats().node, *plane.members().get("members", ())])
    except DataplaneError:  # a node is started again: it says soon enough what it lacks
        return
    there = set(map(bytes.fromhex, members))
    lost = sum(
        any(cells.node(cell) not in there for cell in own.values())
        for index in after.values()
        for own in index.values()
    )
    if lost:
        log.warning(
            "%d rows of the checkpoint can not be read: it was saved with include_storage=False, and the nodes that had"
            " them have ended; save with include_storage=True",
            lost,
        )

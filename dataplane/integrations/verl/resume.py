"""Checkpoints of a TransferQueue with rows in the plane, and the steps to resume from one.

    controller_state.pkl       TransferQueue's own: rows, keys, tags, consumption, and our cells
    dataplane/<n>.rows         rows with their values (a chain of frames, `client.checkpointfile`)
    dataplane/files            the id of each of those files, and the digest of the state

TransferQueue has a storage manager save its part, and restore it before the controller restores its own. The cells in
the controller's state are the old ones, so after it has loaded that state, it gets the new cells of the values.

Invariants: nothing is changed if a file was changed; a row of the restored state has all its values, or is cleared,
and a warning says how many were; the rows that the plane had before the load are freed after it. TransferQueue puts
the directory in place as a whole, after all of it is written.

A file of rows has for each table of them the old cells, by field, and the values as an Arrow IPC stream. One page of
the values is in memory at a time, or one row if that is larger; the values read are those that were written, or
`Corrupt` is raised and nothing of them stays in the plane. Nothing is unpickled.

Files are written and read on the hosts of a Ray job, each where its node is (`each_host`); a job of one host does it in
this process.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from dataplane.batch.batch import Batch
from dataplane.client.checkpointfile import COLUMNS, END, CheckpointReader, CheckpointWriter
from dataplane.errors import Corrupt, DataplaneError, Misuse, PeerUnavailable
from dataplane.integrations import process
from dataplane.integrations.pages import read_pages
from dataplane.integrations.process import with_plane
from dataplane.integrations.verl import cells, sharing
from dataplane.integrations.verl.controller import Controller, Index

log = logging.getLogger(__name__)

_OURS = "dataplane"
_STATE = "controller_state.pkl"
_FILES, _SUFFIX = "files", ".rows"
_MESSAGE_ROWS = 4096

#: All cells, by partition and row.
Indexes = Mapping[str, Index]


def save(controller: Controller, directory: Path, timeout: float) -> None:
    """Add the rows to the checkpoint that TransferQueue writes to this directory.

    Producers put and clear rows during the save. Therefore the values are written first, then the controller's state is
    written again, then the values of rows that were put in between. Raises OSError, and the
    errors of `write`.
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


def load(directory: Path, timeout: float) -> RestoredRows:
    """Put the rows of a checkpoint into the plane. The controller does not know them yet.

    Raises Misuse if the checkpoint has no rows of the backend, Corrupt if it was changed, and as `read`;
    then nothing was changed.
    """
    own = directory / _OURS
    if not own.is_dir():
        raise Misuse(
            f"the checkpoint {directory} was saved with another storage backend: load it with that, or save it again"
            " with this one"
        )
    ids = _listed(own / _FILES, directory / _STATE)
    restored = RestoredRows()
    outcomes = each_host([(None, read, (own / name, file_id, timeout)) for name, file_id in ids.items()])
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
    """The id of each file of a checkpoint, by its name. Raises Corrupt if a file is missing or was changed."""
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


def settle(controller: Controller, before: Indexes, restored: RestoredRows | None) -> None:
    """Replace the old cells of a loaded state by the new ones. `before`: the controller's cells before the load."""
    after = indexes(controller)
    if restored is None:  # it was saved without its rows
        kept = set(_all(after))
        _free([cell for cell in _all(before) if cell not in kept])
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
    _free(list(_all(before)))


def _free(several: Sequence[bytes]) -> None:
    if several:
        cells.free({"": several})


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
    by_node: dict[bytes, list[Rows]] = {}
    for index in several.values():
        for node, rows in _by_node(index).items():
            by_node.setdefault(node, []).append(rows)
    names = [f"{number}{_SUFFIX}" for number in range(first, first + len(by_node))]
    jobs = [
        (node, write, (directory / name, rows, timeout))
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
    except DataplaneError:  # a node that is restarting: it soon reports what it lacks
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


#: The best suited node of the plane, or None; the function to call; its arguments.
Job = tuple[bytes | None, Callable[..., Any], tuple[Any, ...]]


def each_host(jobs: Sequence[Job]) -> list[Any]:
    """The results of the jobs, or the exceptions that they raised, in order. Each runs where its node is; jobs
    without a node run on all hosts in turn. Raises PeerUnavailable, before any begins, if a host does not answer."""
    places = _places() if len(jobs) > 1 else {}
    if len(places) < 2:
        return [_run(work, arguments) for _, work, arguments in jobs]
    every = list(places.values())
    started = []
    for number, (node, work, arguments) in enumerate(jobs):
        place = every[number % len(every)] if node is None else places.get(node, every[0])
        started.append(_task(_run, place).remote(work, arguments))
    return [_outcome(each) for each in started]


def results(outcomes: Sequence[Any]) -> list[Any]:
    """The results; raises the first exception among them."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return list(outcomes)


def _run(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return work(*arguments)
    except (DataplaneError, OSError) as error:
        return error


def _task(work: Callable[..., Any], place: str) -> Any:
    """A Ray task on this Ray node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on = NodeAffinitySchedulingStrategy(place, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(work).options(scheduling_strategy=on)


def _outcome(started: Any) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(started)
    except RayError as error:
        return PeerUnavailable(f"work on a Ray node did not end well: {error}", address="ray")


def _places() -> dict[bytes, str]:
    """The Ray node of each node of the plane; empty without Ray, or with a single Ray node."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    alive = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    if len(alive) < 2:
        return {}
    found = results([_outcome(started) for started in [_task(_node_here, name).remote() for name in alive]])
    return dict(zip(found, alive, strict=True))


def _node_here() -> bytes:
    return bytes.fromhex(process.plane().stats().node)


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
        writing = _Writing(file)
        for rows in several:
            for found in cells.find(rows):
                places = range(len(found.ref)) if found.positions is None else found.positions.tolist()
                old = {name: [rows[name][place] for place in places] for name in found.how}
                read_pages(found.ref, timeout, partial(writing.page, old), writing.miss)
        file.frame(END, _encode(writing.tables))
        file.commit()
    return file.id, writing.lost


class _Writing:
    """A file that is being written."""

    def __init__(self, file: CheckpointWriter) -> None:
        self._file = file
        self.tables = 0
        self.lost = 0

    def page(self, old: Mapping[str, Sequence[bytes | None]], rows: slice, batch: Batch) -> None:
        """Write these rows, whose cells are those of `old` at their positions."""
        self._file.frame(COLUMNS, _encode({name: old[name][rows] for name in batch}))
        self._file.table(batch)
        self.tables += 1

    def miss(self) -> None:
        """Count a value that is not there."""
        self.lost += 1


class RestoredRows:
    """Rows that were read into the plane: the new cell of each old one."""

    def __init__(self) -> None:
        self.cells: dict[bytes, bytes] = {}

    def free(self, kept: frozenset[bytes] | set[bytes] = frozenset()) -> None:
        """Free the values of all new cells except those kept."""
        cells.drop({"": [cell for cell in self.cells.values() if cell not in kept]})


def read(path: Path, file_id: bytes, timeout: float) -> dict[bytes, bytes]:
    """Put the rows of the file with this id into the plane. Returns the new cell of each old one.

    timeout: seconds to wait for room for a page. Raises Corrupt, Backpressure, LimitExceeded,
    PeerUnavailable; then nothing of it stays.
    """
    made = RestoredRows()
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
            raise file.corrupt(f"has an invalid table of rows: {error}") from error
        if kind != COLUMNS or not old:
            raise file.corrupt("has a table without the cells of its rows")
        columns = file.columns()
        if columns.keys() != old.keys() or any(columns[name].rows != len(own) for name, own in old.items()):
            raise file.corrupt("has values of other rows than its index lists")
        _put(columns, old, made, timeout)
        tables += 1


def _put(columns: dict[str, Any], old: Mapping[str, list[bytes]], made: dict[bytes, bytes], timeout: float) -> None:
    new = sharing.restore(columns, {name: cells.way(own[0]) for name, own in old.items()}, timeout)
    for name, own in old.items():
        made.update({was: cells.given_back_as(is_, was) for was, is_ in zip(own, new[name], strict=True)})

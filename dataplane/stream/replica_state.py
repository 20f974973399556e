"""The replicated state of a partition of a stream as bytes: everything that commands depend on, and no leases.

Equal states have equal bytes, independent of how a replica came by its state. Derived counts are left out and counted
again. A version and a checksum come first.

Unlike a `snapshot.Snapshot`, which is a checkpoint for users, it keeps the identity of patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, DataplaneError
from dataplane.replication.outbox import OutboxState
from dataplane.stream.block import Value
from dataplane.stream.column_batch import ColumnBatch, Hold
from dataplane.stream.packing import Packed, pack, unpack
from dataplane.stream.page import Index
from dataplane.stream.partition_state import StreamState
from dataplane.stream.progress import ACKED, DEAD, EXPIRED, LEASED, PENDING
from dataplane.stream.settings import Settings
from dataplane.stream.unfinished import UnfinishedState

_MAGIC = b"dpstream\x05"  # the last is the version
_SUM = 8
_COUNTED = (ACKED, EXPIRED, DEAD)
_LOST = tuple[int, str, str | int | None, int, int]


class PatchState(msgspec.Struct, array_like=True):
    """See `column_batch.ColumnBatch`."""

    number: int
    ref: bytes
    hold: Packed
    nodes: tuple[bytes, ...]
    pieces: list[tuple[bytes, tuple[bytes, ...]]] = []
    """Of a row that came piece by piece: the reference of each, and the nodes that have it too."""


class LayerState(msgspec.Struct, array_like=True):
    """For each row, where the columns of these names are."""

    names: tuple[str, ...]
    patch: Packed
    index: Packed


class RowsState(msgspec.Struct, array_like=True):
    """The existing rows in ascending order, and the metadata of each."""

    offsets: Packed
    patches: list[PatchState]
    layers: list[LayerState]
    group: Packed
    groups: list[str | int]
    drops: list[tuple[int, list[int]]]
    versions: Packed
    arrived: Packed
    tags: dict[str, list[Value]]
    lengths: dict[str, Packed]
    states: Packed
    tries: Packed
    dropped: Packed
    keyed: Packed
    keys: list[str]
    calls: list[tuple[str, int, int, bytes]]
    kept: list[Packed]


class PartitionState(msgspec.Struct, array_like=True):
    """The whole state."""

    name: str
    settings: Settings
    mark: str
    next_offset: int
    next_patch: int
    columns: list[tuple[str, Field]]
    tag_names: list[str]
    appended: int
    latest: int
    closed: bool
    clock_s: float
    counts: list[list[int]]
    lost: list[_LOST]
    lost_nodes: list[tuple[bytes, int]]
    opened: bool
    outboxes: list[OutboxState]
    sessions: bytes
    rows: RowsState
    unfinished: UnfinishedState = msgspec.field(default_factory=UnfinishedState)


_encode = msgspec.msgpack.Encoder(order="sorted").encode
_decode = msgspec.msgpack.Decoder(PartitionState).decode


def seal(state: PartitionState) -> bytes:
    """The bytes of a state."""
    body = _encode(state)
    return _MAGIC + xxhash.xxh3_64_digest(body) + body


def open_sealed(data: bytes) -> PartitionState:
    """Raises Corrupt for anything but the bytes of a state of this version."""
    start = len(_MAGIC) + _SUM
    if not data.startswith(_MAGIC[:-1]):
        raise Corrupt("this is no snapshot of a stream's partition")
    if data[len(_MAGIC) - 1] != _MAGIC[-1]:
        raise Corrupt(f"a snapshot of version {data[len(_MAGIC) - 1]}; this software reads {_MAGIC[-1]}")
    if xxhash.xxh3_64_digest(data[start:]) != data[len(_MAGIC) : start]:
        raise Corrupt("a snapshot of a stream's partition whose bytes are not those that were written")
    try:
        return _decode(data[start:])
    except (msgspec.MsgspecError, DataplaneError) as error:
        raise Corrupt(f"this is no snapshot of a stream's partition: {error}") from error


def rows_state(partition: StreamState, kept: Sequence[Index]) -> RowsState:
    """The rows of the partition, with the numbers of replaced patches that are `kept`."""
    stored, rows = partition.rows, partition.rows.all()
    rows = np.sort(rows)
    places = stored.places(rows)
    layers = stored.layers(rows)
    needed = np.unique(np.concatenate([*(of for _, of, _ in layers), *kept, rows[:0]]))
    which, groups, drops = partition.groups.state(partition.metadata.groups(places))
    states, tries = partition.progress.states(places, len(rows)), partition.progress.tries(places, len(rows))
    leased = states == LEASED
    tries -= leased
    states[leased] = PENDING
    tries[(states == ACKED) | (states == EXPIRED)] = 0
    tags = {name: values.tolist() for name, values in partition.metadata.tags(places).items()}
    lengths = {name: partition.metadata.lengths(places, name) for name in partition.metadata.measured(places)}
    keyed, keys, calls = partition.keys.state(rows)
    return RowsState(
        offsets=pack(rows),
        patches=[_patch_state(int(number), stored.patch(int(number))) for number in needed if number >= 0],
        layers=[LayerState(names, pack(of), pack(index)) for names, of, index in layers],
        group=pack(which),
        groups=groups,
        drops=drops,
        versions=pack(partition.metadata.versions(places)),
        arrived=pack(partition.metadata.arrived(places)),
        tags={name: values for name, values in tags.items() if any(value is not None for value in values)},
        lengths={name: pack(values) for name, values in lengths.items() if values.any()},
        states=pack(states.reshape(-1)),
        tries=pack(tries.reshape(-1)),
        dropped=pack(partition.progress.dropped(places, len(rows)).astype(np.int64)),
        keyed=pack(keyed),
        keys=keys,
        calls=calls,
        kept=[pack(np.array(of, np.int64)) for of in sorted(of.tolist() for of in kept)],
    )


def _patch_state(number: int, patch: ColumnBatch) -> PatchState:
    hold = np.array([patch.hold]) if isinstance(patch.hold, int) else patch.hold
    pieces = [(piece.encode(), piece.spares) for piece in patch.pieces]
    return PatchState(number, patch.encode(), pack(hold), patch.spares, pieces)


def _patch(state: PatchState) -> ColumnBatch:
    ref, holds = BatchRef.decode(state.ref), unpack(state.hold)
    if len(holds) not in (1, len(ref)):
        raise ValueError("holds of other rows")
    hold: Hold = int(holds[0]) if len(holds) == 1 else holds
    pieces = tuple(ColumnBatch(BatchRef.decode(piece), 1, spares=nodes, encoded=piece) for piece, nodes in state.pieces)
    if pieces and len(ref) != 1:
        raise ValueError("pieces of more than one row")
    return ColumnBatch(ref, 0, hold, state.nodes, encoded=state.ref, pieces=pieces)


def restore_rows(partition: StreamState, state: RowsState, columns: list[tuple[str, Field]]) -> list[Index]:
    """Restore the rows into an empty partition, after `rows.next` is set. Returns the kept patches. Raises ValueError,
    KeyError or IndexError for an invalid state."""
    rows = unpack(state.offsets)
    count, tasks = len(rows), len(partition.settings.tasks)
    layers = [(layer.names, unpack(layer.patch, count), unpack(layer.index, count)) for layer in state.layers]
    kept = [unpack(of) for of in state.kept]
    partition.rows.restore(rows, dict(columns), {each.number: _patch(each) for each in state.patches}, layers, kept)
    places = partition.rows.places(rows)
    which, dropped = unpack(state.group, count), unpack(state.dropped, count).astype(np.bool_)
    states = unpack(state.states, tasks * count).reshape(tasks, count)
    tries = unpack(state.tries, tasks * count).reshape(tasks, count)
    if not np.isin(states, (PENDING, ACKED, EXPIRED, DEAD)).all() or (count and not _within(tries, 0, 256)):
        raise ValueError("states that no row has")
    if (count and not _within(which, -1, len(state.groups))) or len(set(state.groups)) != len(state.groups):
        raise ValueError("a group that is not listed")
    done = (states == ACKED) | (states == EXPIRED)
    numbers = partition.groups.restore(rows, which, state.groups, state.drops, dropped, done, states == DEAD)
    versions = unpack(state.versions, count)
    partition.metadata.enter(places, numbers, versions, unpack(state.arrived, count), state.tags)
    partition.metadata.measure(places, {name: unpack(values, count) for name, values in state.lengths.items()})
    partition.progress.restore(places, versions, states, tries)
    partition.progress.mark_dropped(places, dropped)
    named = [""] * count
    for at, key in zip(unpack(state.keyed).tolist(), state.keys, strict=True):
        named[at] = key
    partition.keys.put_back(named, rows, state.calls)
    partition.nbytes = sum(partition.rows.patch(each.number).nbytes for each in state.patches)
    return kept


def _within(values: Index, least: int, below: int) -> bool:
    return bool(values.min() >= least and values.max() < below)


def counts_of(partition: StreamState) -> list[list[int]]:
    """For each task the number of rows that were ever acked, expired and dead."""
    return [[of[what] for what in _COUNTED] for of in partition.progress.counts]


def restore_counts(partition: StreamState, counts: list[list[int]]) -> None:
    """Raises ValueError if they are of other tasks."""
    for of, numbers in zip(partition.progress.counts, counts, strict=True):
        for what, number in zip(_COUNTED, numbers, strict=True):
            of[what] = number

"""What several partitions answered, as one answer: deliveries one below the other, figures added up.

A row's origin is its partition's token and its offset, so rows of several partitions stay told apart in one reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.node.clustered.streams import Partition
from dataplane.stream import requests as r
from dataplane.stream.keys import unnamed
from dataplane.wire import messages as m

T = TypeVar("T")

Given = tuple[Partition, r.Delivered]
"""What one partition delivers."""


def delivered(request: m.Consume, given: Given) -> m.Delivered:
    """A delivery of one partition, under the partition's own grant."""
    partition, reply = given
    return merged(request.id, partition.token, [given], reply.grant, request.replica)


def merged(identifier: int, stream: bytes, given: Sequence[Given], grant: int, replica: int | None) -> m.Delivered:
    """The rows of all these deliveries under one grant of the stream of this token."""
    refs = [reply.ref.with_origin(partition.token, reply.rows, reply.holds) for partition, reply in given]
    reply = _together(identifier, stream, given, concat(refs).encode())
    return msgspec.structs.replace(reply, grant=grant, replica=replica, lengths=_lengths(given))


def letters(identifier: int, stream: bytes, given: Sequence[tuple[Partition, r.Letters]]) -> m.Delivered:
    """Rows of these partitions, of no grant, with the columns that all of them have."""
    given = [(partition, reply) for partition, reply in given if len(reply.rows)]
    columns = [{*reply.ref.columns} if reply.ref is not None else set() for _, reply in given]
    names = set.intersection(*columns) if columns else set()
    refs = []
    for partition, reply in given:
        if reply.ref is not None and names:
            ref = reply.ref.select(*(name for name in reply.ref.columns if name in names))
            refs.append(ref.with_origin(partition.token, reply.rows))
    return _together(identifier, stream, given, concat(refs).encode() if refs else b"")


def _together(
    identifier: int, stream: bytes, given: Sequence[tuple[Partition, r.Delivered | r.Letters]], ref: bytes
) -> m.Delivered:
    tags = dict.fromkeys(name for _, reply in given for name in reply.tags)
    return m.Delivered(
        id=identifier,
        stream=stream,
        grant=0,
        replica=None,
        ref=ref,
        keys=[key for partition, reply in given for key in reply.keys or unnamed(partition.mark, reply.rows.tolist())],
        groups=[group for _, reply in given for group in reply.groups],
        versions=[version for _, reply in given for version in reply.versions],
        tags={
            name: [value for _, reply in given for value in reply.tags.get(name) or [None] * len(reply.rows)]
            for name in tags
        },
        lengths={},
    )


def _lengths(given: Sequence[Given]) -> dict[str, bytes]:
    names = dict.fromkeys(name for _, reply in given for name in reply.lengths)
    absent = {name: [np.zeros(len(reply.rows), np.int64) for _, reply in given] for name in names}
    return {
        name: b"".join(
            reply.lengths.get(name, zeros).tobytes() for (_, reply), zeros in zip(given, absent[name], strict=True)
        )
        for name in names
    }


def reordered(reply: m.Delivered, order: npt.NDArray[np.int64]) -> m.Delivered:
    """The rows of a delivery in this order."""

    def picked(values: Sequence[T]) -> list[T]:
        return [values[at] for at in order.tolist()]

    return msgspec.structs.replace(
        reply,
        ref=BatchRef.decode(reply.ref)[order].encode(),
        keys=picked(reply.keys),
        groups=picked(reply.groups),
        versions=picked(reply.versions),
        tags={name: picked(values) for name, values in reply.tags.items()},
        lengths={name: np.frombuffer(values, np.int64)[order].tobytes() for name, values in reply.lengths.items()},
    )


def summed(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a stream from those of its partitions."""
    first = figures[0]
    found = dict(first)
    for name in ("rows", "bytes", "appended", "unfinished", "waiting", "groups"):
        found[name] = sum(each[name] for each in figures)
    for name in ("oldest_s", "oldest_unfinished_s", "latest_version"):
        found[name] = max(each[name] for each in figures)
    found["closed"] = all(each["closed"] for each in figures)
    if all("columns" in each for each in figures):
        found["columns"] = list(dict.fromkeys(name for each in figures for name in each["columns"]))
    found["behind"] = list(dict.fromkeys(name for each in figures for name in each["behind"]))
    found["task"] = {name: _task([each["task"][name] for each in figures]) for name in first["task"]}
    return found


def _task(figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found = {name: sum(each[name] for each in figures) for name, value in figures[0].items() if isinstance(value, int)}
    ready = dict.fromkeys(columns for each in figures for columns in each["ready"])
    found["ready"] = {columns: sum(each["ready"].get(columns, 0) for each in figures) for columns in ready}
    incomplete = [group for each in figures for group in each["incomplete"]]
    found["incomplete"] = sorted(incomplete, key=lambda group: -float(group["age_s"]))[:8]
    return found

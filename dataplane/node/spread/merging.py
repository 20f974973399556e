"""What several homes answered, as one answer: deliveries one below the other, figures added up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.node.spread.wholes import Part
from dataplane.stream.keys import unnamed
from dataplane.wire import messages as m

T = TypeVar("T")

Told = tuple[Part, m.Delivered]


def keys_of(part: Part, ref: BatchRef, reply: m.Delivered) -> list[str]:
    """The keys of the rows of a delivery of this part, also of those that have none of their own."""
    origin = ref.origin()
    return reply.keys or ([] if origin is None else unnamed(part.mark, origin[1].tolist()))


def keyed(part: Part, reply: m.Delivered) -> m.Delivered:
    """The delivery with all its keys, for somebody who does not know the part's mark."""
    keys = reply.keys or keys_of(part, BatchRef.decode(reply.ref), reply)
    return msgspec.structs.replace(reply, keys=keys)


def merged(
    identifier: int,
    stream: bytes,
    told: Sequence[Told],
    grant: int,
    replica: int | None,
    columns: Collection[str] | None = None,
) -> m.Delivered:
    """The rows of all these deliveries, under this number of the whole stream; of all columns, or of these."""
    refs = [BatchRef.decode(reply.ref) if reply.ref else None for _, reply in told]
    keys: list[str] = []
    for (part, reply), ref in zip(told, refs, strict=True):
        keys += reply.keys if ref is None else keys_of(part, ref, reply)
    chosen = [ref for ref in refs if ref is not None]
    if columns is not None:
        chosen = [ref.select(*(name for name in ref.columns if name in columns)) for ref in chosen] if columns else []
    tags = dict.fromkeys(name for _, reply in told for name in reply.tags)
    lengths = dict.fromkeys(name for _, reply in told for name in reply.lengths)
    return m.Delivered(
        id=identifier,
        stream=stream,
        grant=grant,
        replica=replica,
        ref=concat(chosen).encode() if len(chosen) == len(told) else b"",
        keys=keys,
        groups=[group for _, reply in told for group in reply.groups],
        versions=[version for _, reply in told for version in reply.versions],
        tags={
            name: [value for _, r in told for value in r.tags.get(name) or [None] * len(r.versions)] for name in tags
        },
        lengths={
            name: b"".join(r.lengths.get(name) or bytes(8 * len(r.versions)) for _, r in told) for name in lengths
        },
    )


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
    """The figures of a stream from those of its parts."""
    first = figures[0]
    found = dict(first)
    for name in ("rows", "bytes", "appended", "waiting", "groups"):
        found[name] = sum(each[name] for each in figures)
    for name in ("oldest_s", "latest_version"):
        found[name] = max(each[name] for each in figures)
    found["closed"] = all(each["closed"] for each in figures)
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

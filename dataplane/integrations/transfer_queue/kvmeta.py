"""`KVBatchMeta`: keys of one partition with their tags, as TransferQueue's users hand them around.

A value of plain Python: picklable, and worth a few bytes a row. What it holds of tags and extra_info is its own copy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from dataplane.errors import Misuse
from dataplane.integrations.transfer_queue.shares import copied, merged, sizes


@dataclass
class KVBatchMeta:
    """keys: of one partition. tags: one dict a key. fields: their names, None where they are not known.

    Raises ValueError where keys and tags do not match, or a key or a field is named twice.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.tags):
            raise ValueError(f"keys and tags have one entry a row: {len(self.keys)} keys, {len(self.tags)} tags")
        for what, names in (("keys", self.keys), ("fields", self.fields or [])):
            if len(names) != len(set(names)):
                raise ValueError(f"{what} are named once each: {_twice(names)!r} is there twice")
        self.tags = copied(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        """How many rows."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, name: Any) -> Any:
        """Raises Misuse: it has keys, and no columns. A function of verl's that asks got it where it should get rows,
        as in a process whose verl knows TransferQueue's own KVBatchMeta."""
        raise Misuse(
            f"a KVBatchMeta has no {name!r}, it has keys, and kv_batch_get_by_meta(meta) gives their rows. Where verl"
            " was to do that, dataplane does not stand in for transfer_queue in this process: call"
            " dataplane.integrations.transfer_queue.install() in it, or put DATAPLANE_TRANSFER_QUEUE=nested into the"
            " environment that it starts with"
        )

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """Those of these keys, in this order. Raises ValueError for a key named twice, RuntimeError for others."""
        if len(keys_to_select) != len(set(keys_to_select)):
            raise ValueError(f"keys are named once each: {_twice(keys_to_select)!r} is there twice")
        places = {key: place for place, key in enumerate(self.keys)}
        absent = [key for key in keys_to_select if key not in places]
        if absent:
            raise RuntimeError(f"{len(absent)} keys are not in this batch, the first is {absent[0]!r}")
        return self._of([places[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Put the rows into this order, in place. Raises ValueError where it is none of all rows."""
        if len(indexes) != self.size:
            raise ValueError(f"an order of {len(indexes)} rows for a batch of {self.size}")
        if len(set(indexes)) != len(indexes):
            raise ValueError("a row is named twice in the order")
        self.keys = [self.keys[i] for i in indexes]
        self.tags = [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """So many consecutive parts; the first are one row longer where it does not come out even."""
        edges = sizes(self.size, chunks)
        return [self._of(range(start, stop)) for start, stop in edges]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """The rows of each after those of the one before; empty ones are left out.

        Raises ValueError where fields, partitions, or values of extra_info differ.
        """
        parts = [part for part in data if len(part)]
        if not parts:
            return cls()
        first = parts[0]
        for part in parts:
            if part.fields is not None and set(part.fields) != set(first.fields or []):
                raise ValueError(f"batches with the fields {first.fields} and {part.fields} are not concatenated")
            if part.partition_id != first.partition_id:
                raise ValueError(f"partitions {first.partition_id!r} and {part.partition_id!r} are not concatenated")
        info = merged("KVBatchMeta", [part.extra_info or {} for part in parts])
        return cls(
            keys=list(chain.from_iterable(part.keys for part in parts)),
            tags=list(chain.from_iterable(part.tags for part in parts)),
            partition_id=first.partition_id,
            fields=first.fields,
            extra_info=info or None,
        )

    def _of(self, places: Iterable[int]) -> KVBatchMeta:
        rows = list(places)
        return KVBatchMeta(
            keys=[self.keys[i] for i in rows],
            tags=[self.tags[i] for i in rows],
            partition_id=self.partition_id,
            fields=self.fields,
            extra_info=self.extra_info,
        )


def _twice(names: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]

"""Columns of durable partitions, where the disk fails once."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.clock import Deadline
from dataplane.node.clustered.durable import DurableColumns
from dataplane.store.durable.database import DirectoryUnusable

PARTITION = "rollouts/s0/0-6e.durable"


class _Notes:
    def __init__(self) -> None:
        self.kept: dict[str, bytes | None] = {}
        self.broken = True

    def load(self) -> dict[str, bytes]:
        return {}

    async def write(self, changes: dict[str, bytes | None], *, lazily: bool = False) -> None:
        if self.broken:
            self.broken = False
            raise DirectoryUnusable("the disk failed once", path="", reason="failed")
        self.kept.update(changes)


class _Keeping:
    me = "6e" * 8

    def __init__(self) -> None:
        self.of = _Notes()
        self.persistence = _Persistence()

    def notes(self, kind: str) -> _Notes:
        return self.of


class _Persistence:
    async def persist(self, shards: object, deadline: object, *, with_next: bool) -> None:
        return


class _Homes:
    def number(self, key: tuple[bytes, int]) -> int:
        return key[1]


class _Partitions:
    class replicas:
        @staticmethod
        def find(partition: str) -> None:
            return None


async def test_a_partition_name_that_failed_to_persist_is_written_with_the_next_columns() -> None:
    """Or after a restart nobody asks what it needs here, and what it needs is freed."""
    keeping: Any = _Keeping()
    nothing: Any = None
    homes: Any = _Homes()
    columns = DurableColumns(keeping, homes, nothing)
    partitions: Any = _Partitions()
    columns.partitions = partitions
    with pytest.raises(DirectoryUnusable):
        await columns.keep(PARTITION, [(bytes.fromhex(keeping.me), 1)], Deadline.after(1.0))
    await columns.keep(PARTITION, [(bytes.fromhex(keeping.me), 2)], Deadline.after(1.0))
    assert PARTITION in keeping.of.kept

"""How many rows partitions have, and whose: told by leaders to those who would say so if every replica died."""

from __future__ import annotations

from dataplane.clock import monotonic
from dataplane.cluster.membership import Membership
from dataplane.node.partitions import table as tables
from dataplane.node.partitions.records import Records
from dataplane.node.partitions.replicas import Replicas
from dataplane.node.partitions.requests import Counted
from dataplane.node.partitions.table import LostPartition, Table
from dataplane.wire import partition_messages as m

MAX_PRODUCERS = 64
"""Nodes whose producers are named of a partition that is lost."""


def caretakers(members: Membership, table: Table, most: int) -> list[str]:
    """The first takes care of a table; if it dies, the next does."""
    named = {each.node for each in table.partitions if not members.away(each.node)}
    return sorted(named or {members.me})[:most]


class Census:
    """What one node says and hears."""

    def __init__(self, members: Membership, replicas: Replicas, records: Records, kind: str) -> None:
        self._members = members
        self._replicas = replicas
        self._records = records
        self._kind = kind
        self._said: dict[str, tuple[m.Census, list[str]]] = {}  # of partitions led here, and to whom
        self._census: dict[str, m.Census] = {}  # of partitions, as their leaders said last
        self._counts, replicas.census = replicas.census, self._count

    def say(self, forgotten: dict[str, float]) -> None:
        """Say how many rows the partitions have that are led here; what is known of others that are no more goes, also
        from `forgotten`."""
        now = monotonic()
        for hosted in self._replicas:
            table = self._records.find(tables.name_of(hosted.partition))
            if table is None or not isinstance(hosted.machine, Counted) or not hosted.replica.serves(now):
                continue
            rows, producers = hosted.machine.census()
            census = m.Census(hosted.partition, rows, tuple(sorted(producers)[:MAX_PRODUCERS]))
            said = census, caretakers(self._members, table, table.followers + 2)
            if self._said.get(hosted.partition) != said:
                self._said[hosted.partition] = said
                self._replicas.count(said[1], census)
        named = {table.key(each.number) for table in self._records for each in table.partitions}
        for known in (self._said, self._census, forgotten):
            for partition in known.keys() - named:
                del known[partition]

    def _count(self, census: m.Census) -> None:
        if tables.kind_of(census.partition) == self._kind:
            self._census[census.partition] = census
        else:
            self._counts(census)

    def lost(self, table: Table, partition: tables.Partition) -> LostPartition:
        census = self._census.get(table.key(partition.number))
        if census is None:
            return LostPartition(partition.number, partition.node)
        return LostPartition(partition.number, partition.node, census.rows, census.producers)

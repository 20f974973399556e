"""Creates the state machine of a partition by its key: a node that is asked for a replica knows only the key."""

from __future__ import annotations

from dataplane.node.clustered import open_streams, table_directory
from dataplane.node.partitions.record import TABLES, kind_of
from dataplane.replication.machine import StateMachine


def machine(partition: str) -> StateMachine:
    """The state machine, before its first command."""
    return table_directory.machine(partition) if kind_of(partition) == TABLES else open_streams.machine(partition)

"""Creates the state machine of a partition by its key: a node that is asked for a replica knows only the key."""

from __future__ import annotations

from dataplane.node.partitions.record import TABLES, kind_of, name_of
from dataplane.replication.machine import StateMachine
from dataplane.stream.machine import StreamMachine
from dataplane.table.machine import TableMachine


def machine(partition: str) -> StateMachine:
    """The state machine, before its first command."""
    return (TableMachine if kind_of(partition) == TABLES else StreamMachine)(name_of(partition))

"""The list of the etcd servers that nodes run: a value of theirs, and who is next in line to run one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from dataplane.cluster.membership import Member
from dataplane.cluster.server import Place
from dataplane.coordinator.base import Unavailable

SERVERS = 3
"""Of a cluster of as many members or more: one of them may be lost at a time."""

LIST = "servers"
"""The value of the coordinator that has the list."""


class Server(msgspec.Struct, frozen=True):
    """A server: the node that runs it, in which life, and where that is found; its place; whether it has a vote."""

    node: str
    life: int
    name: str
    clients: str
    servers: str
    address: str
    ready: bool = False

    @property
    def place(self) -> Place:
        return Place(self.name, self.clients, self.servers)


def encoded(servers: tuple[Server, ...]) -> bytes:
    """The list, as it is written."""
    return msgspec.json.encode(servers)


def decoded(value: bytes | None) -> tuple[Server, ...]:
    """The list as it was read. Raises Unavailable for what is none."""
    try:
        return () if not value else msgspec.json.decode(value, type=tuple[Server, ...])
    except msgspec.MsgspecError as error:
        raise Unavailable(
            f"what the cluster's etcd has under {LIST!r} is no list of its servers ({error}): somebody has changed it,"
            " and it is left as it is. Put the list back, or start the cluster again"
        ) from None


def in_line(members: Mapping[str, Member], running: Collection[str]) -> list[str]:
    """The nodes that could run another server beside these, if there is to be one; first those of hosts without any."""
    able = [node for node, member in members.items() if member.serves]
    if len(running) >= SERVERS or len(able) < SERVERS:
        return []
    hosts = {members[node].host for node in running}
    return sorted((node for node in able if node not in running), key=lambda node: (members[node].host in hosts, node))

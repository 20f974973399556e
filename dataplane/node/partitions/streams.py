"""Streams as partitions: their state machines, and what the directory asks of them.

A placement table's settings are a stream's, encoded. A partition's machine is made before its settings are known here
(a follower is asked to have a replica of a name), so they come with its first command. Rows without a key are called
by numbers in their partition, after a mark that tells which partition that is.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dataplane.errors import Corrupt
from dataplane.node.partitions.table import Table
from dataplane.stream import requests as r
from dataplane.stream.machine import StreamMachine
from dataplane.stream.settings import Settings
from dataplane.stream.totals import added

encode_settings = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Settings)


def decode_settings(settings: bytes) -> Settings:
    """Raises Corrupt for what no node wrote."""
    try:
        return _decode.decode(settings)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"these are no settings of a stream: {error}") from error


def mark(generation: str, number: int) -> str:
    """What the keys begin with, after `~`, that a partition makes."""
    return f"{generation}.{number}"


def partition_of_key(table: Table, key: str) -> int | None:
    """The partition that made this key; None for a key that a user gave, or that no partition of the stream made."""
    parts = key.split(".")
    if len(parts) != 3 or parts[0] != f"~{table.generation}" or not parts[1].isdecimal():
        return None
    number = int(parts[1])
    return number if table.find(number) is not None else None


def machine(partition: str) -> StreamMachine:
    """The state machine of the partition of this key, before its first command. Raises Corrupt for no such key."""
    try:
        stream, _, rest = partition.rsplit("/", 2)
        return StreamMachine(stream, int(rest.partition("-")[0]))
    except ValueError:
        raise Corrupt(f"{partition!r} is no partition of a stream") from None


class StreamRequests:
    """`directory.Requests`, of streams."""

    def opening(self, table: Table, number: int) -> bytes:
        settings = decode_settings(table.settings)
        return r.encode_request(r.Open(settings=settings, mark=mark(table.generation, number)))

    def disowning(self, groups: Sequence[str | int], version: int) -> bytes:
        return r.encode_request(r.Disown(groups=list(groups), table=version))

    def outliving(self, version: int) -> bytes:
        return r.encode_request(r.Outlive(table=version))

    def retiring(self) -> bytes:
        return r.encode_request(r.Retire())

    def closing(self) -> bytes:
        return r.encode_request(r.Close())

    def counting(self) -> bytes:
        return r.encode_request(r.Measure())

    def counted(self, totals: bytes, answer: bytes) -> bytes:
        figures = r.decode_result(answer)
        if not isinstance(figures, r.Figures):
            return totals
        return added(totals, figures.values)

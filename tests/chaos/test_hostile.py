"""A hostile client of the same user: cut off or refused, with the node's memory bounded and nobody else disturbed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.wire import messages as m
from dataplane.wire import shard_messages as sm
from dataplane.wire.framing import frame
from tests.attack.neighbour import Neighbour
from tests.cases import each_case
from tests.chaos.raw import Raw, framed, one_column
from tests.processes import MIB, StandingNode, own_memory, pattern

BUDGET = 16 * MIB
ALLOWED = 64 * MIB  # of the node's own memory, on top of what it had


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    """A node with a neighbour on it, whose memory is looked at before and after."""
    with StandingNode(tmp_path, memory=BUDGET, spill="16MiB") as node:
        with Neighbour(node.address) as neighbour:
            before = own_memory(node.pid)
            yield node
            grown = own_memory(node.pid) - before
            neighbour.stop()
        with Neighbour(node.address) as another:  # it goes on
            another.stop()
        assert grown < ALLOWED


NONSENSE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "the largest length": struct.pack("<I", 0xFFFFFFFF),
    "an empty frame": framed(b""),
    "no MessagePack": framed(b"\xc1" * 10),
    "text that is no UTF-8": framed(b"\x95\xa4seal\x01\x90\xa2\xff\xfe\xc2"),
    "deep nesting": framed(b"\x91" * 100_000),
    "an announced array of billions": framed(b"\xdd\xff\xff\xff\xff"),
    "a reply": frame(m.Done(1)),
    "a negative timeout": frame(sm.Reserve(9, [BUDGET], -1.0)),
    "a timeout that is no number": frame(sm.Reserve(9, [BUDGET], float("nan"))),
    "a reservation of nothing": frame(sm.Reserve(9, [], 1.0)),
    "a negative reservation": frame(sm.Reserve(9, [-4096], 1.0)),
    "no part of a shard": frame(sm.Free(9, [], [(1, [0], (5, 2, b""))], "")),
    "rows of an unknown code": frame(sm.Free(9, [], [(1, [0], (0, 2, b"X12"))], "")),
}


@each_case("what", NONSENSE)
def test_a_client_that_sends_invalid_bytes_is_disconnected(node: StandingNode, what: str) -> None:
    with Raw(node.address) as raw:
        raw.socket.sendall(NONSENSE[what])
        assert raw.is_cut_off()


@pytest.mark.long
def test_a_layout_with_many_overlapping_columns_is_refused_quickly(node: StandingNode) -> None:
    """Ten thousand columns that claim one table of a MiB: checking each would take minutes."""
    with Raw(node.address) as raw:
        (shard,) = raw.reserve(8 * MIB)
        table = ColumnLayout(Field("bytes", "", ()), MIB - 1, MIB - 1, ((0, 8 * MIB), (0, 0)))
        layout = ShardLayout(tuple((f"{i}", table) for i in range(9_000))).encode()
        reply = raw.ask(sm.SealShards(raw.next(), [(shard, layout)], "", False))
        assert isinstance(reply, m.Failure)


def test_a_hostile_client_cannot_affect_reservations_pins_or_shards_of_others(node: StandingNode) -> None:
    with Raw(node.address) as raw, dp.connect(node.address) as plane, Raw(node.address) as victim:
        (shard,) = victim.reserve(4096)
        ref = plane.put({"x": pattern(1, MIB)})
        view = plane.get(ref)["x"].numpy()
        (number,) = (number for _, number in ref.shards())
        raw.send(sm.Abort([shard, number]), sm.UnpinShards([number] * 5), sm.UnpinShards([shard]))
        plane.free(ref)
        assert isinstance(raw.ask(m.ReadStats(raw.next())), m.Figures)
        figures = plane.stats()
        assert figures.pinned_bytes >= MIB
        assert figures.reserved_bytes >= 4096
        assert np.array_equal(view, pattern(1, MIB))
        reply = raw.ask(sm.SealShards(raw.next(), [(shard, one_column(8))], "", False))
        assert (reply.name, reply.id) == ("ProtocolMismatch", 0)
        assert raw.is_cut_off()
        assert isinstance(victim.ask(sm.SealShards(victim.next(), [(shard, one_column(8))], "", False)), m.Done)

"""A hostile client of the same user: cut off or refused, with the node's memory bounded and nobody else disturbed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
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
from dataplane.wire.places import unpack
from tests.attack.neighbour import Neighbour
from tests.cases import each_case
from tests.chaos.raw import Raw, framed, one_column
from tests.processes import MIB, StandingNode, eventually, own_memory, pattern

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


# Processes of one user, one of which means harm or is wrong: it changes nothing that others have sealed.
#
# Each test is an attack that once worked.

NODE = {"memory": "64MiB"}


@pytest.mark.long
def test_writes_to_a_draft_of_a_disconnected_client_change_no_shard(node: StandingNode) -> None:
    """The array of a draft outlives the connection, and the user's loop goes on filling it."""
    with dp.connect(node.address) as other:
        plane = dp.connect(node.address)
        draft = plane.draft({"x": dp.dense((8 * MIB,), "uint8")})
        mine = draft["x"]
        mine[:] = 1
        plane.close()
        eventually(lambda: other.stats().clients == 1, "it has gone")
        refs = [other.put({"x": pattern(seed, 8 * MIB)}) for seed in range(6)]
        mine[:] = 0xEE
        for seed, ref in enumerate(refs):
            assert np.array_equal(other.get(ref)["x"].numpy(), pattern(seed, 8 * MIB))
        draft.drop()


REOPEN = """
import mmap, os, sys
descriptor, offset, user = map(int, sys.argv[1:])
os.setgid(user), os.setuid(user)
try:
    os.fchmod(descriptor, 0o600)
except PermissionError:
    pass
try:
    writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
except PermissionError:
    print("not opened")
    sys.exit()
for attempt in (lambda: os.pwrite(writable, b"evil", offset), lambda: mmap.mmap(writable, 0)):
    try:
        attempt()
    except PermissionError:
        print("refused")
    else:
        print("WRITTEN")
"""


@pytest.mark.parametrize("user", sorted({os.getuid(), 65534 if os.getuid() == 0 else os.getuid()}))
def test_a_reader_can_not_open_its_descriptor_again_for_writing(node: StandingNode, user: int) -> None:
    """Through /proc: the file is its own user's, so it may change the mode; root passes modes anyway."""
    with dp.connect(node.address) as plane, Raw(node.address) as raw:
        ref = plane.put({"x": pattern(1, MIB)})
        ((_, shard),) = ref.shards()
        held = raw.ask(sm.PinShards(raw.next(), [shard], 5.0))
        assert [grant.writable for grant in held.grants] == [False]
        (descriptor,) = raw.descriptors
        offset = int(unpack(held.places)[0, 2])
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", REOPEN, str(descriptor), str(offset), str(user)],
            pass_fds=[descriptor],
            capture_output=True,
            text=True,
            timeout=60,
            cwd="/",
        )
        if ran.returncode and user != os.getuid():
            pytest.skip(f"user {user} can not run {sys.executable}")
        assert set(ran.stdout.split("\n")) <= {"refused", "not opened", ""}, ran.stdout
        assert ran.stdout, ran.stderr
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(1, MIB))
        # The segment can not give memory back any more, and the plane goes on with another one.
        for seed in range(4):
            plane.free(plane.put({"x": pattern(seed, 8 * MIB)}))
        plane.free(ref)

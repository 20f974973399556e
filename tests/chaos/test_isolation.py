"""Processes of one user, one of which means harm or is wrong: it changes nothing that others have sealed.

Each test is an attack that once worked.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import dataplane as dp
from dataplane.wire import shard_messages as sm
from dataplane.wire.places import unpack
from tests.chaos.raw import Raw
from tests.processes import MIB, StandingNode, eventually, pattern

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

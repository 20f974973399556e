"""Hosts that die, stop and come back while others read from them. Links that fail: `test_links`."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.integration.test_hosts import Hosts, Planes, connected, members, together
from tests.processes import MIB, eventually, pattern


def test_reads_from_a_killed_host_are_right_or_fail_with_a_typed_error(tmp_path: Path) -> None:
    with connected(tmp_path, memory="64MiB") as ((host, _), (one, other)):
        refs = [one.put({"x": pattern(seed, 8 * MIB)}) for seed in range(6)]
        outcomes: list[str] = []
        begun = threading.Event()

        def read(seed: int) -> None:
            begun.set()
            try:
                right = np.array_equal(other.get(refs[seed], timeout=60)["x"].numpy(), pattern(seed, 8 * MIB))
                outcomes.append("right" if right else "wrong")
            except dp.DataplaneError as error:
                outcomes.append(type(error).__name__)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        begun.wait()
        host.kill()
        for thread in threads:
            thread.join(60)
        assert len(outcomes) == 6
        assert set(outcomes) <= {"right", "PeerUnavailable", "OwnerDied"}
        eventually(lambda: other.stats().pinned_bytes == 0, "nothing is pinned")
        eventually(lambda: members(other) == {other.stats().node}, "the dead one is no member")
        assert np.array_equal(other.get(other.put({"x": pattern(9, 48 * MIB)}))["x"].numpy(), pattern(9, 48 * MIB))


@pytest.mark.long
def test_an_owner_that_was_suspended_is_readable_again_after_it_resumes(two: Hosts, planes: Planes) -> None:
    one, other = planes
    node = one.stats().node
    ref, ref_2 = one.put({"x": pattern(1, 2 * MIB)}), one.put({"x": pattern(2, 2 * MIB)})
    two[0].freeze()
    try:
        with pytest.raises(dp.PeerUnavailable):
            other.get(ref, timeout=0.1)
        eventually(lambda: members(other) == {other.stats().node}, "it is no member")
        with pytest.raises(dp.PeerUnavailable, match="away"):  # and may come back
            other.get(ref_2, timeout=600)
    finally:
        two[0].thaw()
    together(one, other)
    assert one.stats().node == node
    for seed, each in ((1, ref), (2, ref_2)):
        assert np.array_equal(other.get(each)["x"].numpy(), pattern(seed, 2 * MIB))
    eventually(lambda: two[0].facts()["offers"] == 0, "the owner holds nothing for the reader")


def read_quietly(plane: Any, ref: dp.BatchRef) -> None:
    with suppress(dp.DataplaneError):
        plane.get(ref, timeout=5)


@pytest.mark.long
@pytest.mark.parametrize("which", [0, 1], ids=["the owner", "the reader"])
def test_a_node_terminates_while_its_peer_is_suspended(two: Hosts, planes: Planes, which: int) -> None:
    one, other = planes
    ref = one.put({"x": pattern(1, 8 * MIB)})
    two[1 - which].freeze()
    reading = threading.Thread(target=read_quietly, args=(other, ref))
    reading.start()
    try:
        assert two[which].kill(signal.SIGTERM) == 0
    finally:
        two[1 - which].thaw()
        reading.join()

"""Hosts whose links fail: every call ends in time, with its data or a typed error, and all agree again afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from tests.netns import Host, hosts, needs_namespaces
from tests.processes import MIB, eventually, pattern

pytestmark = needs_namespaces

LONG_S = 600.0  # that who reads would wait: longer than a test may take


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[list[Host], list[dp.Plane]]]:
    with hosts(2, tmp_path) as made, dp.connect(made[0].address) as a, dp.connect(made[1].address) as b:
        eventually(lambda: known(a) == known(b) == 2, "they know each other")
        yield made, [a, b]


def known(plane: dp.Plane) -> int:
    return len(plane.members()["members"])


def put(plane: dp.Plane, seed: int, size: int = MIB) -> dp.BatchRef:
    return plane.put({"x": pattern(seed, size, 4)})


def fetched(plane: dp.Plane, ref: dp.BatchRef, seed: int, size: int = MIB) -> bool:
    return bool((np.asarray(plane.get(ref)["x"].numpy()) == pattern(seed, size, 4)).all())


def again(plane: dp.Plane, ref: dp.BatchRef, seed: int, size: int = MIB) -> bool:
    """As `fetched`; False where that is to be tried again."""
    try:
        return fetched(plane, ref, seed, size)
    except dp.PeerUnavailable:
        return False


def refused(plane: dp.Plane, ref: dp.BatchRef) -> type[Exception]:
    """How a get fails that could wait for long."""
    with pytest.raises((dp.PeerUnavailable, dp.OwnerDied)) as told:
        plane.get(ref, timeout=LONG_S)
    return type(told.value)


def test_reads_over_a_cut_link_fail_until_it_is_healed(two: tuple[list[Host], list[dp.Plane]]) -> None:
    (_, far), (a, b) = two
    refs = [put(a, seed) for seed in range(3)]
    assert fetched(b, refs[0], 0)
    far.cut()
    assert refused(b, refs[1]) is dp.PeerUnavailable, "silence is not death"
    assert known(b) == 2
    assert fetched(b, refs[0], 0), "what was copied is there"
    assert fetched(a, refs[1], 1), "and whose it is has it"
    far.heal()
    eventually(lambda: again(b, refs[1], 1), "it is read")


@pytest.mark.long
def test_reads_over_a_link_cut_in_one_direction_fail_until_it_is_healed(two: tuple[list[Host], list[dp.Plane]]) -> None:
    (near, far), (a, b) = two
    ref = put(a, 1)
    near.mute_to(far)
    assert refused(b, ref) is dp.PeerUnavailable
    near.speak_to(far)
    eventually(lambda: again(b, ref, 1), "it is read")


@pytest.mark.long
def test_readers_fail_early_when_the_owner_becomes_unreachable(tmp_path: Path) -> None:
    with hosts(3, tmp_path) as made, ExitStack() as undo:
        a, b, c = (undo.enter_context(dp.connect(host.address)) for host in made)
        eventually(lambda: known(a) == known(b) == known(c) == 3, "they know each other")
        made[0].slow_down("80mbit")
        ref, other = put(a, 4, 32 * MIB), put(c, 6)
        planes = [undo.enter_context(dp.connect(made[1].address)) for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            before = made[1].received()
            reading = [pool.submit(refused, plane, ref) for plane in planes]
            eventually(lambda: made[1].received() - before > 2 * MIB, "they read")
            made[0].cut()
            outcomes = [each.result() for each in reading]
        assert outcomes == [dp.PeerUnavailable] * 3
        eventually(lambda: not b.stats().pinned_bytes and b.stats().memory_used == 0, "nothing is held")
        assert fetched(b, other, 6)
        made[0].heal()
        made[0].slow_down("1gbit")
        eventually(lambda: again(b, ref, 4, 32 * MIB), "it is there again")
        eventually(lambda: not a.stats().pinned_bytes, "nothing is held for who did not come")

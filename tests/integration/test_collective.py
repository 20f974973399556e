"""Collectives between real processes over gloo: what arrives, what is read, and what becomes of those that fail."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")


import dataplane as dp
from tests.integration.ranks import Outcome, Ranks
from tests.processes import MIB, StandingNode, eventually

pytestmark = pytest.mark.usefixtures("with_torch")

SIZE = 4


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandingNode]:
    with StandingNode(tmp_path_factory.mktemp("node"), memory="128MiB", spill=0) as standing:
        yield standing


@pytest.fixture
def plane(node: StandingNode) -> Iterator[dp.Plane]:
    with dp.connect(node.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def ranks(node: StandingNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(SIZE, tmp_path_factory.mktemp("ranks"), node.address) as several:
        yield several


def rows(count: int, seed: int = 0) -> dict[str, Any]:
    """Rows of every kind, of lengths that differ."""
    rng = np.random.default_rng(seed)
    return {
        "dense": rng.random((count, 2, 3), np.float32),
        "ids": [list(range(seed, seed + i % 7)) for i in range(count)],
        "image": [rng.integers(0, 255, (3, i % 4, 5), np.uint8) for i in range(count)],
        "text": [f"{seed}: row {i} – ü" for i in range(count)],
        "bytes": [bytes([seed % 256]) * i for i in range(count)],
        "struct": [{"a": i, "b": str(i)} if i % 2 else {"a": -i} for i in range(count)],
        "object": [{"number": 2**70 + i, "list": [None, i]} for i in range(count)],
    }


def errors(outcomes: list[Outcome]) -> list[dp.DataplaneError]:
    assert all(outcome.error is not None for outcome in outcomes), outcomes
    return [outcome.error for outcome in outcomes if outcome.error is not None]


def values(outcomes: list[Outcome]) -> list[Any]:
    assert not [outcome.error for outcome in outcomes if outcome.error is not None]
    return [outcome.value for outcome in outcomes]


def test_overlapping_rows_requested_by_ranks_are_read_once(plane: dp.Plane, ranks: Ranks) -> None:
    columns = rows(40, 6)
    ref = plane.put({"dense": columns["dense"], "ids": columns["ids"]})
    both = dp.concat([ref, plane.put({"dense": columns["dense"], "ids": columns["ids"]})])
    cases: list[tuple[list[Any], list[int], Any]] = [
        ([ref[:25], ref[20:40], ref[:25], ref[[39, 3, 3, 21]]], [1, 0, 0, 0], ref),
        ([ref[:10], ref[10:20], ref[20:30], ref[30:40]], [1, 1, 1, 1], ref),  # apart: each reads its own
        ([ref.select("dense"), ref, ref[:0], ref[5:6]], [2, 0, 1, 0], ref),
        ([both[30:60], both[:5], both[55:], both[:35]], [1, 0, 0, 0], both[:60]),
    ]
    cases[3][0][2] = both[55:60]
    for asked, reads, once in cases:
        outcomes = ranks.call("get", asked)
        assert values(outcomes) == [plane.get(each).to_dict() for each in asked]
        assert [outcome.reads for outcome in outcomes] == reads
        assert sum(outcome.read_bytes for outcome in outcomes) == sum(part.nbytes for part, _ in once.distinct())
    freed = plane.put({"x": list(range(9))})
    plane.free(freed[4:5])
    raised = errors(ranks.call("get", [freed[:3], freed[2:5], freed[7:], freed[8:]]))
    assert [type(error) for error in raised] == [dp.Freed] * SIZE
    assert values(ranks.call("get", [freed[:3], freed[2:4], freed[7:], freed[8:]]))[1] == {"x": [2, 3]}


def test_mismatched_collective_calls_are_misuse_on_all_ranks(plane: dp.Plane, ranks: Ranks) -> None:
    ref = plane.put(rows(5))
    cases: list[tuple[Any, list[Any], str]] = [
        (lambda rank: "gather" if rank == 1 else "get", [ref] * SIZE, "rank 1: gather"),
        ("broadcast", [None] * SIZE, "none gave one"),
        ("broadcast", [None, ref, ref, None], r"\[1, 2\] gave one"),
        ("scatter", [[ref] * 3, None, None, None], "3 references over 4 ranks"),
    ]
    for call, arguments, message in cases:
        for error in errors(ranks.call(call, arguments)):
            assert isinstance(error, dp.Misuse)
            with pytest.raises(dp.Misuse, match=message):
                raise error
    assert values(ranks.call("get", [ref] * SIZE)) == [plane.get(ref).to_dict()] * SIZE


def test_an_error_of_a_receiving_rank_is_raised_on_all_ranks(plane: dp.Plane, ranks: Ranks) -> None:
    ref = plane.put(rows(8))
    given = [ref, None, None, None]
    ranks.begin("broadcast", given, [2], device="no such device")
    ranks.begin("broadcast", given, [0, 1, 3])
    for rank, error in enumerate(errors(ranks.hear())):
        assert isinstance(error, dp.Misuse)
        assert "names no device" in str(error)
        assert str(error).startswith("rank 2: ") == (rank != 2)
    assert values(ranks.call("get", [ref] * SIZE)) == [plane.get(ref).to_dict()] * SIZE


def test_an_absent_rank_is_named_in_time_and_may_join_the_next_call(plane: dp.Plane, ranks: Ranks) -> None:
    ref = plane.put(rows(5))
    for timeout in (1, 10, 40):  # where three ranks do not come within a second either, they are named as well
        ranks.begin("get", [ref] * SIZE, [0, 1, 3], timeout=timeout)
        found = errors(ranks.hear([0, 1, 3]))
        assert all(isinstance(error, dp.PeerUnavailable) for error in found)
        named = {error.address for error in found if isinstance(error, dp.PeerUnavailable)}
        if named == {"rank 2"}:
            break
    assert named == {"rank 2"}
    assert values(ranks.call("get", [ref] * SIZE, timeout=60)) == [plane.get(ref).to_dict()] * SIZE


@pytest.mark.parametrize("size", [2, 3])
def test_an_interrupt_between_calls_fails_none_of_them(
    plane: dp.Plane, node: StandingNode, tmp_path: Path, size: int
) -> None:
    ref = plane.put(rows(5))
    with Ranks(size, tmp_path, node.address) as some:
        for interrupting in ([0], [size - 1], list(range(size))):
            values(some.call("get", [ref] * size))
            some.begin("interrupt", [None] * size, interrupting)
            values(some.hear(interrupting))
        assert values(some.call("get", [ref] * size)) == [plane.get(ref).to_dict()] * size


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_lost_during_a_collective_fails_it_on_all_others(
    plane: dp.Plane, node: StandingNode, tmp_path: Path, how: str
) -> None:
    ref = plane.put({"x": np.ones((48, MIB), np.uint8)})
    with Ranks(SIZE, tmp_path, node.address) as some:
        values(some.call("broadcast", [ref, None, None, None]))
        begun = plane.stats().pinned_bytes
        some.workers[2].freeze()
        others = [0, 1, 3]
        for rank in range(SIZE):  # the source waits for rank 2, and the others for the source: it is to give up first
            timeout = 2.0 if how == "stopped" and rank == 0 else 160.0
            some.begin("broadcast", [ref, None, None, None], [rank], timeout=timeout)
        if how == "killed":  # once the source has read, it waits for this rank
            eventually(lambda: plane.stats().pinned_bytes > begun, "the source reads")
            some.workers[2].kill(signal.SIGKILL)
        outcomes = some.hear(others)
        for error in errors(outcomes):
            assert isinstance(error, dp.PeerUnavailable)
            assert "rank 2" in str(error)
    plane.free(ref)

"""Collectives between GPUs, one a rank, over NCCL."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")


import dataplane as dp
from tests.gpu.conftest import cuda
from tests.integration.ranks import Ranks
from tests.processes import MIB, StandingNode, eventually

pytestmark = cuda(devices=2, timeout=240)

CONTROL = 160 << 10  # bytes that go over gloo beside the pieces of numbers


@pytest.fixture
def ranks(node: StandingNode, tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(2, tmp_path, node.address, backend="nccl") as several:
        yield several


def test_numeric_columns_cross_between_devices_in_every_collective(plane: dp.Plane, ranks: Ranks) -> None:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        "pixels": rng.integers(0, 255, (4, 100_000), np.uint8),
        "ids": [np.arange(20_000 + i) for i in range(4)],
        "text": list("abcd"),
    }
    ref = plane.put(columns)
    expected = plane.get(ref).to_dict()
    halves = [plane.get(half).to_dict() for half in ref.chunk(2)]
    cases: list[tuple[str, list[Any], list[Any]]] = [
        ("broadcast", [ref, None], [expected] * 2),
        ("broadcast", [None, ref], [expected] * 2),
        ("scatter", [ref.chunk(2), None], halves),
        ("gather", ref.chunk(2), [halves, None]),
        ("get", [ref, ref], [expected] * 2),
    ]
    for call, arguments, values in cases:
        outcomes = ranks.call(call, arguments, device="cuda")
        assert [outcome.value for outcome in outcomes] == values, outcomes
        assert all(sum(outcome.sent.values()) < CONTROL for outcome in outcomes)
    outcomes = ranks.call("broadcast", [ref, None])  # of host memory: over gloo
    assert [outcome.value for outcome in outcomes] == [expected] * 2
    assert sum(outcomes[0].sent.values()) > ref.nbytes


def test_a_killed_rank_ends_the_collective_on_the_other_rank(plane: dp.Plane, ranks: Ranks) -> None:
    ref = plane.put({"x": np.ones((48, MIB), np.uint8)})
    ranks.call("broadcast", [ref, None], device="cuda")
    begun = plane.stats().pinned_bytes
    ranks.workers[1].freeze()
    ranks.begin("broadcast", [ref, None], device="cuda", timeout=10.0)
    eventually(lambda: plane.stats().pinned_bytes > begun, "the source reads")
    ranks.workers[1].kill(signal.SIGKILL)
    (outcome,) = ranks.hear([0])
    assert isinstance(outcome.error, dp.PeerUnavailable)

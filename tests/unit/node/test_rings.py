"""The rings of a node's clients: never more than there is memory for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.node import observing
from dataplane.node.observing import Observing
from dataplane.observe.ring import RING_BYTES


def observed(memory: int) -> Observing:
    homes: Any = SimpleNamespace(ending=None)
    return Observing(homes, dict, memory=memory)


def test_clients_for_whose_rings_there_is_no_memory_have_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(observing, "_LEAST_RINGS", 2)
    node = observed(3 * 64 * RING_BYTES)
    assert [node.grant(client, 1, f"client {client}") is not None for client in range(4)] == [True] * 3 + [False]
    assert "client 3 records no events" in caplog.text
    node.leave(0)
    assert node.grant(4, 1, "another") is not None
    asyncio.run(node.aclose())


def test_a_small_node_has_rings_for_some_clients_all_the_same() -> None:
    node = observed(1 << 20)
    assert all(node.grant(client, 1, "client") is not None for client in range(observing._LEAST_RINGS))
    assert node.grant("more", 1, "client") is None
    asyncio.run(node.aclose())

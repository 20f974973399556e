"""What requests that wait keep: how much that is, and that clients share a bound."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dataplane.errors import LimitExceeded
from dataplane.node.requests.waiting_bytes import WaitingBytes, footprint
from dataplane.table import requests as t
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from dataplane.wire.boundary import encoded
from dataplane.wire.client_messages import AnyRequest, decoder
from tests.cases import each_case

REQUESTS: dict[str, Callable[[], Any]] = {
    "a payload": lambda: sm.PutShard(1, bytes(1 << 20), b"", "", 1.0),
    "numbers": lambda: sm.PinShards(1, list(range(1000, 101_000)), 1.0),
    "large numbers": lambda: sm.PinShards(1, [(1 << 62) + i for i in range(100_000)], 1.0),
    "short names": lambda: rm.AskTable(1, "t", b"", t.FindReady(columns=[f"{i:05d}" for i in range(50_000)]), 1.0),
    "shards of others": lambda: sm.Prefetch(1, [], [(b"12345678", 300 + i, []) for i in range(50_000)], 1.0),
    "empty lists": lambda: sm.Prefetch(1, [], [(b"", 1, [([], (0, 1, b""))]) for _ in range(30_000)], 1.0),
    "numbers of rows": lambda: rm.AskTable(1, "t", b"", t.ClearRows(rows=np.arange(100_000)), 1.0),
    "tags": lambda: rm.AskTable(1, "t", b"", t.Upsert(tags=[{"a": i, f"b{i}": "x"} for i in range(20_000)])),
}


@each_case("what", REQUESTS)
def test_the_estimated_footprint_of_a_request_is_close_to_its_memory(what: str) -> None:
    """As it is decoded: too little would let clients use more than they may, too much would refuse them for nothing."""
    body = bytes(encoded(REQUESTS[what]()))
    requests = decoder(AnyRequest)
    gc.collect()
    tracemalloc.start()
    try:
        request = requests.decode(body)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken / 1.6 < footprint(request, 1 << 40) < 3 * taken


def test_clients_share_a_bound_and_each_has_a_guaranteed_share() -> None:
    waits = WaitingBytes(bound=1000, share=100)
    greedy, modest = waits.client(), waits.client()
    greedy.take(1000)
    with pytest.raises(LimitExceeded) as caught:
        greedy.take(1)
    assert (caught.value.asked, caught.value.limit) == (1001, 1000)
    modest.take(100)
    with pytest.raises(LimitExceeded):
        modest.take(1)
    assert (greedy.nbytes, modest.nbytes, waits.nbytes) == (1000, 100, 1100)
    greedy.give_back(500)
    modest.take(300)
    for client in (greedy, modest):
        client.give_back(client.nbytes)
    assert waits.nbytes == 0


def test_waiting_bytes_are_given_back_after_an_exception() -> None:
    waits = WaitingBytes()
    client = waits.client()
    with pytest.raises(ZeroDivisionError), client.keep(10):
        assert waits.nbytes == 10
        raise ZeroDivisionError
    assert waits.nbytes == 0

"""Nodes for users' tests: one in this process, and one that is killed."""

from __future__ import annotations

import os

import numpy as np
import pytest

import dataplane as dp
from dataplane import testing


def test_an_in_process_plane_behaves_like_a_plane() -> None:
    with testing.plane() as plane:
        ref = plane.put({"ids": [[1, 2], [3]], "pixels": np.ones((2, 1 << 18), np.float32)})
        assert plane.get(ref)["ids"].to_list() == [[1, 2], [3]]
        assert plane.get(ref)["pixels"].numpy().sum() == 1 << 19
        assert plane.stats().pid == os.getpid()
        rollouts = plane.stream("rollouts", tasks=["actor"])
        rollouts.append({"ids": [1, 2]})
        with rollouts.consume("actor", rows=2, columns=["ids"]) as delivery:
            assert delivery.get()["ids"].to_list() == [1, 2]
        table = plane.table("answers")
        table.upsert(["a"], {"answer": ["7"]})
        assert plane.get(table.read(["a"]))["answer"].to_list() == ["7"]


def test_a_lease_runs_out_when_the_clock_is_moved() -> None:
    with testing.node() as node, dp.connect() as plane:
        rollouts = plane.stream("rollouts", tasks=["actor"])
        rollouts.append({"x": [1, 2]})
        late = rollouts.consume("actor", rows=2, columns=["x"], lease=600)
        node.advance(599)
        with pytest.raises(dp.NotReady):
            rollouts.consume("actor", rows=2, columns=["x"], timeout=0)
        node.advance(2)
        with rollouts.consume("actor", rows=2, columns=["x"]) as again:
            assert len(again) == 2
        with pytest.raises(dp.LeaseExpired):
            late.ack()


def test_clients_of_a_stopped_node_get_peer_unavailable() -> None:
    node = testing.LocalNode()
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": [1]})
        node.stop()
        node.stop()
        with pytest.raises(dp.PeerUnavailable):
            plane.put({"x": [1]})
        del ref


def test_a_node_process_can_be_killed() -> None:
    with testing.NodeProcess(memory="8MiB") as node, dp.connect(node.address) as plane:
        ref = plane.put({"x": [1]})
        node.kill()
        node.kill()
        with pytest.raises((dp.PeerUnavailable, dp.OwnerDied)):
            plane.get(ref)

"""Nodes for users' tests: one in this process, and one that is killed."""

from __future__ import annotations

import os
import sys
import threading

import numpy as np
import pytest

import dataplane as dp
from dataplane import testing


def test_a_plane_in_this_process_does_what_a_plane_does() -> None:
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
        table.write(["a"], {"answer": ["7"]})
        assert plane.get(table.read(["a"]))["answer"].to_list() == ["7"]


def test_code_that_connects_by_itself_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_ADDRESS", "unix:///nowhere.sock")
    with testing.node() as node, dp.connect() as plane:
        assert plane.address == node.address == os.environ["DATAPLANE_ADDRESS"]
    assert os.environ["DATAPLANE_ADDRESS"] == "unix:///nowhere.sock"


def test_a_forked_child_that_leaves_the_block_ends_nothing() -> None:
    with testing.plane() as plane:
        ref = plane.put({"x": [1, 2]})
        child = -1
        try:
            with testing.LocalNode() as node:
                child = os.fork()
                if child == 0:
                    raise SystemExit
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
                with dp.connect(node.address) as other:
                    assert len(other.put({"x": [1]})) == 1
        finally:
            if child == 0:
                os._exit(0)
        assert plane.get(ref)["x"].to_list() == [1, 2]


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


def test_a_node_whose_settings_can_not_be_is_refused_and_leaves_nothing() -> None:
    threads = threading.active_count()
    with pytest.raises(ValueError, match="size"):
        testing.LocalNode(memory="-1")
    assert threading.active_count() == threads


def test_a_stopped_node_tells_its_clients() -> None:
    node = testing.LocalNode()
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": [1]})
        node.stop()
        node.stop()
        with pytest.raises(dp.PeerUnavailable):
            plane.put({"x": [1]})
        del ref


def test_a_retry_is_tested_by_a_call_that_fails() -> None:
    def append(stream: dp.Stream, rows: dict[str, list[int]]) -> None:
        while True:
            try:
                return stream.append(rows, keys=["a"])
            except dp.OutcomeUnknown:
                continue

    with testing.plane() as plane:
        rollouts = plane.stream("rollouts", tasks=["actor"])
        with testing.failing(dp.Stream, "append", dp.OutcomeUnknown("no answer"), times=2, done=True) as appends:
            append(rollouts, {"x": [1]})
        assert appends.calls == 3
        assert rollouts.stats()["appended"] == 1


def test_a_node_process_can_be_killed() -> None:
    with testing.NodeProcess(memory="8MiB") as node, dp.connect(node.address) as plane:
        ref = plane.put({"x": [1]})
        node.kill()
        node.kill()
        with pytest.raises((dp.PeerUnavailable, dp.OwnerDied)):
            plane.get(ref)


def test_a_frozen_node_answers_once_it_is_thawed() -> None:
    with testing.NodeProcess(memory="8MiB") as node, dp.connect(node.address) as plane:
        node.freeze()
        answered: list[bool] = []
        caller = threading.Thread(target=lambda: answered.append(plane.stats().shards == 0))
        caller.start()
        assert not answered
        node.thaw()
        caller.join(60)
        assert answered == [True]


def test_the_suites_alone_need_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    with testing.plane() as plane:
        assert len(plane.put({"x": [1]})) == 1
    for name in ("CoordinatorSuite", "SamplerSuite", "TransportSuite"):
        with pytest.raises(ImportError, match=r"rollout-dataplane\[testing\]"):
            getattr(testing, name)

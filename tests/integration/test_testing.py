"""Nodes for users' tests: one in this process, and one that is killed."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

import dataplane as dp
from dataplane import testing
from dataplane.client.embedded import ClusterNode, new_key
from dataplane.config import ClusterConfig, NodeConfig
from tests import etcd
from tests.cases import each_case
from tests.integration.test_hosts import ANY
from tests.processes import Worker, eventually, gone


def test_clients_of_a_stopped_node_get_peer_unavailable() -> None:
    node = testing.LocalNode()
    with dp.connect(node.address) as plane:
        ref = plane.put({"x": [1]})
        node.stop()
        node.stop()
        with pytest.raises(dp.PeerUnavailable):
            plane.put({"x": [1]})
        del ref


# Nodes that are some of several, started by a process, as Ray's actors do.


def clustered() -> ClusterConfig:
    return ClusterConfig(ANY, etcd.cluster())


def settings(directory: Path) -> NodeConfig:
    return NodeConfig(memory="16MiB", spill="16MiB", prewarm=0, spill_dir=directory)


@pytest.mark.long
def test_the_key_is_on_no_command_line(tmp_path: Path) -> None:
    key = new_key()
    with closing(ClusterNode(settings(tmp_path), clustered(), key)) as node, dp.connect(node.address) as plane:
        process = psutil.Process(plane.stats().pid)
        said = " ".join([*process.cmdline(), *process.environ().values()])
        assert not any(line.decode() in said for line in key.split()[3:])


def starting(pipe: Any, directory: str) -> None:
    node = ClusterNode(settings(Path(directory)), ClusterConfig(ANY, "etcd://127.0.0.1:1"), new_key())
    with dp.connect(node.address) as plane:
        pipe.send((plane.stats().pid, node.address))
        pipe.recv()


@each_case("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_cluster_node_ends_with_its_starter_and_leaves_no_files(tmp_path: Path, how: signal.Signals) -> None:
    with Worker(starting, str(tmp_path)) as starter:
        pid, address = starter.hear()
        node = psutil.Process(pid)
        assert node.ppid() != starter.pid, "who kills a process's children does not kill it"
        starter.kill(how)
    eventually(lambda: gone(pid), "it ends")
    assert not Path(address.removeprefix("unix://")).parent.exists()
    assert not list(tmp_path.glob("dataplane-spill-*"))

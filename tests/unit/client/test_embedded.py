"""The end of a node of a cluster that this process started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from dataplane.client.embedded import ClusterNode


def test_a_node_that_ends_just_before_it_is_killed_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    ours, theirs = socket.socketpair()
    node = ClusterNode.__new__(ClusterNode)
    node._open, node._process = ours, os.pidfd_open(process.pid)

    def late(timeout_s: float | None) -> bool:
        process.communicate()  # it is reaped, after the node's time had passed
        return False

    monkeypatch.setattr(node, "_ended", late)
    with theirs:
        node.close()
    assert node._process == -1
    assert ours.fileno() == -1

"""A node's place on its host: where it listens, what it removes, what it leaves."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from dataplane.config import NodeConfig
from dataplane.node.node import NodeServer
from tests.cases import each_case
from tests.processes import StandingNode, Worker


def config(directory: Path) -> NodeConfig:
    return NodeConfig(memory="1MiB", spill="1MiB", spill_dir=directory / "spill", prewarm=0)


async def once(node: NodeServer) -> str:
    """Serve, and stop at once."""
    stop = asyncio.Event()
    await node.serve(stop, ready=stop.set)
    return node.address


def test_a_node_leaves_no_files_when_one_of_its_parts_fails_to_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    node = NodeServer(config(tmp_path))
    monkeypatch.setattr(node._tables, "close", _refuse)
    with pytest.raises(OSError, match="refused"):
        asyncio.run(once(node))
    assert list(tmp_path.rglob("*")) == []


async def test_a_node_does_not_replace_a_running_node_at_its_address(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as living:
        with pytest.raises(FileExistsError, match="a node listens at"):
            NodeServer(NodeConfig(memory="1MiB", spill=0, prewarm=0), tmp_path / "node.sock")
        with dp.connect(living.address) as plane:
            assert plane.stats().pid == living.pid


async def test_a_node_does_not_replace_a_node_that_accepts_no_connection(tmp_path: Path) -> None:
    """Whoever connects to it would wait for ever."""
    path = tmp_path / "node.sock"
    with socket.socket(socket.AF_UNIX) as stopped, socket.socket(socket.AF_UNIX) as waiting:
        stopped.bind(str(path))
        stopped.listen(0)
        waiting.connect(str(path))
        with pytest.raises(FileExistsError, match="accepts no connection"):
            NodeServer(NodeConfig(memory="1MiB", spill=0, prewarm=0), path)
    assert path.is_socket()


def come_and_go(pipe: Any, directory: Path, rounds: int) -> None:
    os.environ["XDG_RUNTIME_DIR"] = str(directory)
    for _ in range(rounds):
        asyncio.run(once(NodeServer(config(directory))))
    pipe.send("done")


def test_nodes_start_and_stop_concurrently_in_one_directory(tmp_path: Path) -> None:
    """Each sweeps what the dead have left, and the directory they share goes and comes back with them."""
    workers = [Worker(come_and_go, tmp_path, 60) for _ in range(4)]
    try:
        assert [worker.hear(60) for worker in workers] == ["done"] * 4
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)
    left = [path.name for path in tmp_path.rglob("*")]
    assert left in ([], ["spill"]), "the directory stays where another was in it when the one that made it ended"


@each_case("fails", ["listen", "store"])
def test_a_node_that_fails_to_start_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "run").mkdir()
    if fails == "listen":
        monkeypatch.setattr(socket.socket, "bind", _refuse)
    else:
        monkeypatch.setattr("dataplane.store.store.Disk", _refuse)
    with pytest.raises(OSError, match="refused"):
        NodeServer(config(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.name not in ("run", "spill")]


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOMEM, "refused")

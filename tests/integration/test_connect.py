"""Connecting where nobody answers, where somebody else does, or with another version: typed errors, at once."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from dataplane.wire import messages as m
from tests.cases import each_case
from tests.integration.faces import FACES
from tests.processes import StandingNode, Worker

both_faces = each_case("face", FACES)


@both_faces
def test_a_connect_without_a_listening_node_raises_peer_unavailable(tmp_path: Path, face: str) -> None:
    address = f"unix://{tmp_path}/node.sock"
    with pytest.raises(dp.PeerUnavailable) as caught:
        FACES[face](address)
    assert caught.value.address == address
    assert address in str(caught.value)


def test_the_address_is_read_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_ADDRESS", f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(dp.PeerUnavailable, match="nobody"):
        dp.connect()
    with StandingNode(tmp_path) as node:
        monkeypatch.setenv("DATAPLANE_ADDRESS", node.address)
        with dp.connect() as plane:
            assert plane.address == node.address
        with dp.connect(config=dp.NodeConfig(memory="1MiB", spill=0)) as plane:  # a node of others keeps its settings
            assert plane.stats().memory_budget == 16 << 20
        assert os.environ["DATAPLANE_ADDRESS"] == node.address


def as_nobody(pipe: Any, address: str) -> None:
    path = Path(address.removeprefix("unix://"))
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    outcomes = []
    for _ in range(2):
        try:
            dp.connect(address)
        except dp.Unauthenticated as error:
            outcomes.append(str(error))
        pipe.send(outcomes)
        pipe.recv()
    pipe.send(oct(path.stat().st_mode))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_users_process_is_refused(tmp_path: Path) -> None:
    for part in (tmp_path, *tmp_path.parents):
        if part.is_relative_to(tempfile.gettempdir()) and part != Path(tempfile.gettempdir()):
            part.chmod(0o755)
    with StandingNode(tmp_path) as node, Worker(as_nobody, node.address) as other:
        path = tmp_path / "node.sock"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert len(other.hear()) == 1  # the socket itself keeps it out
        path.chmod(0o666)
        first, second = other.ask()  # and the peer's uid, where that fails
        assert "another user" in first
        assert "user 0" in second
        path.chmod(0o600)
        with dp.connect(node.address) as plane:
            assert plane.stats().clients == 1


def test_a_client_of_another_major_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StandingNode(tmp_path) as node:
        monkeypatch.setattr(m, "MAJOR", m.MAJOR + 1)
        with pytest.raises(dp.ProtocolMismatch) as caught:
            dp.connect(node.address)
        assert caught.value.ours == f"{m.MAJOR - 1}.{m.MINOR}"
        assert caught.value.theirs == f"{m.MAJOR}.{m.MINOR}"
        monkeypatch.undo()
        with dp.connect(node.address) as plane:
            assert plane.stats().clients == 1


@each_case(
    ("settings", "reason"),
    [
        ({"spill_dir": "file"}, "File exists"),
        ({"memory": "100TiB"}, "no shared memory"),
        ({"memory": "100TiB", "prewarm": 0}, "no shared memory"),
    ],
)
def test_a_failing_node_start_is_rejected_with_a_reason(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    (tmp_path / "file").write_text("x")
    before = os.environ.get("DATAPLANE_ADDRESS")
    settings = {"memory": "1MiB", "spill": "1MiB"} | settings
    config = dp.NodeConfig(**settings | {"spill_dir": tmp_path / settings.get("spill_dir", "")})
    with pytest.raises(dp.Rejected, match=f"did not start.*{reason}"):
        dp.connect(config=config)
    assert os.environ.get("DATAPLANE_ADDRESS") == before


def test_a_node_that_never_accepts_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.wire.local._CONNECT_S", 0.2)
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        other.connect(str(tmp_path / "s"))  # which fills the backlog
        with pytest.raises(dp.PeerUnavailable):
            dp.connect(f"unix://{tmp_path}/s")

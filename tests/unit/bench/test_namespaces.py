"""Nodes that benchmarks start end with what started them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import namespaces
from dataplane import cli
from dataplane.errors import PeerUnavailable


def test_a_node_that_can_not_be_connected_to_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[str]] = []

    class Kept(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **how: Any) -> None:
            super().__init__(*arguments, **how)
            started.append(self)

    def refuse(address: str) -> None:
        raise PeerUnavailable(f"nobody answers at {address}", address=address)

    assert cli.main(["keygen", str(tmp_path / "key")]) == 0
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(namespaces.subprocess, "Popen", Kept)
    monkeypatch.setattr(namespaces.dp, "connect", refuse)
    with pytest.raises(PeerUnavailable):
        namespaces.Host(end := ("", "127.0.0.1"), tmp_path / "key", namespaces.seeds_at([end]), memory="16MiB")
    (node,) = started
    assert node.poll() is not None

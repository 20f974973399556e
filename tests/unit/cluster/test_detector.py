"""The proof that a process has ended: its host refuses connections."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from dataplane.cluster.detector import refused


async def test_a_host_refuses_when_all_addresses_of_its_name_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        async def resolve(*_: Any, **__: Any) -> list[Any]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
        assert not await refused(f"tcp://trainer-3:{port}"), "one of them listens"
    assert await refused(f"tcp://trainer-3:{port}")


async def test_an_unresolvable_host_name_proves_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolve)
    assert not await refused("tcp://trainer-3:7000")

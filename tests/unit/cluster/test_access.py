"""An external etcd over TLS: whom it answers, whom a node believes, and files that are refused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dataplane.cluster.certificates import Certificates, certificates
from dataplane.cluster.cluster import access
from dataplane.cluster.server import EtcdServer, ServerAddress
from dataplane.config import ClusterConfig
from dataplane.coordinator.base import Unavailable
from dataplane.coordinator.etcd import EtcdCoordinator
from dataplane.wire import auth
from tests.etcd import needs_etcd, ports


def private(path: Path, content: bytes) -> Path:
    path.touch(0o600)
    path.write_bytes(content)
    return path


def files(directory: Path, made: Certificates) -> dict[str, Path]:
    """The settings of a node with these certificates."""
    directory.mkdir()
    content = {"etcd_ca": made.authority, "etcd_cert": made.own, "etcd_cert_key": made.private}
    return {name: private(directory / name, each) for name, each in content.items()}


def config(**settings: Path) -> ClusterConfig:
    return ClusterConfig("tcp://127.0.0.1:0", "etcd://127.0.0.1:1", **settings)


@needs_etcd
async def test_etcd_over_tls_answers_only_clients_with_a_certificate(tmp_path: Path) -> None:
    mine, others = (certificates(auth.generate(tmp_path / name), ["127.0.0.1"]) for name in ("key", "other"))
    [seed] = ports(1)
    host, _, port = seed.rpartition(":")
    place = ServerAddress(seed, seed, f"{host}:{int(port) + 1}")
    (tmp_path / "etcd").mkdir()
    server = EtcdServer(tmp_path / "etcd", place, "token", "127.0.0.1", mine)
    own = files(tmp_path / "mine", mine)
    stranger = files(tmp_path / "others", others)

    async def new() -> tuple[str, str]:
        return "new", place.listed

    running = asyncio.ensure_future(server.run(new))
    clients = [
        EtcdCoordinator([seed], "test", tls=access(config(**settings))[0])
        for settings in (
            own,
            {"etcd_ca": own["etcd_ca"]},  # shows nothing
            own | {"etcd_cert": stranger["etcd_cert"], "etcd_cert_key": stranger["etcd_cert_key"]},
            stranger,  # believes another
        )
    ]
    try:
        async with asyncio.timeout(40):
            while True:
                try:
                    assert await clients[0].swap("k", None, b"1") == b"1"
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
        for client in clients[1:]:
            with pytest.raises(Unavailable):
                await client.read("k")
    finally:
        for client in clients:
            await client.aclose()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_an_etcd_login_file_is_one_private_line(tmp_path: Path) -> None:
    ca = private(tmp_path / "ca", certificates(auth.generate(tmp_path / "key"), ["a"]).authority)
    login = private(tmp_path / "login", b"root:pass:word\n")
    assert access(config(etcd_ca=ca, etcd_login=login))[1] == ("root", "pass:word")
    assert access(config()) == (None, None)
    login.write_text("root")
    with pytest.raises(ValueError, match="USER:PASSWORD"):
        access(config(etcd_ca=ca, etcd_login=login))
    os.chmod(login, 0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        access(config(etcd_ca=ca, etcd_login=login))
    with pytest.raises(ValueError, match="no certificate"):
        access(config(etcd_ca=login))
    with pytest.raises(OSError, match="nowhere"):
        access(config(etcd_ca=tmp_path / "nowhere", etcd_login=tmp_path / "nowhere"))

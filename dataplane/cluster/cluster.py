"""Creates the coordinator of a node, which depends on the settings, and the membership, and runs both."""

from __future__ import annotations

import asyncio
import os
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from dataplane.cluster.detector import Detector
from dataplane.cluster.membership import Member, Membership
from dataplane.config import ClusterConfig
from dataplane.coordinator.base import Coordinator
from dataplane.wire.auth import Key
from dataplane.wire.peer import Peers

if TYPE_CHECKING:
    from dataplane.cluster.seeds import Seeds


class ClusterConnection:
    """A node's connection to etcd, its membership, and the server of etcd if the node is a seed."""

    def __init__(self, config: ClusterConfig, peers: Peers, me: str, member: Member, key: Key | None) -> None:
        """`peers` must have been started. Raises OSError; ValueError if a package or program is not installed;
        Rejected if this node's directory belongs to another cluster."""
        how = config.joined
        self._seeds: Seeds | None = None
        self.coordinator: Coordinator
        if how.engine == "seeds":
            from dataplane.cluster.certificates import check_installed
            from dataplane.cluster.seeds import Seeds

            check_installed()
            assert key is not None, "the settings were checked"
            self._seeds = Seeds(config, key)
            self.coordinator = self._seeds.coordinator
        else:
            from dataplane.coordinator.etcd import EtcdCoordinator  # imported late: few nodes need an HTTP client

            tls, login = access(config)
            self.coordinator = EtcdCoordinator(how.addresses, how.name, tls=tls, login=login)
        self.membership = Membership(self.coordinator, me, member, key=key)
        self.detector = Detector(peers, self.membership)

    async def run(self) -> None:
        """Be a member until cancelled, and then leave. Raises Rejected if this node is not admitted."""
        running = [asyncio.ensure_future(work) for work in (self.membership.run(), self.detector.run())]
        if self._seeds is not None:
            running.append(asyncio.ensure_future(self._seeds.run()))
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(running[:2])
            await self.membership.leave()  # before this node's etcd server ends
            await _ended(running[2:])
        for task in running:
            if not task.cancelled():
                task.result()

    async def aclose(self) -> None:
        """Release everything, after `run` has ended. Idempotent."""
        await self.coordinator.aclose()
        if self._seeds is not None:
            await self._seeds.aclose()


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel these tasks and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Reads the credentials of a node at an external etcd from files: TLS certificates and a login.
#
# Invariant: a file with a secret that other users can read is refused, as for the cluster's key.


def access(config: ClusterConfig) -> tuple[ssl.SSLContext | None, tuple[str, str] | None]:
    """The TLS context, and the login (user, password); each None if it is not configured. Raises OSError, and
    ValueError for invalid files."""
    return _tls(config), _login(config)


def _tls(config: ClusterConfig) -> ssl.SSLContext | None:
    if config.etcd_ca is None:
        return None
    for file in (config.etcd_ca, config.etcd_cert, config.etcd_cert_key):
        if file is not None:
            os.stat(file)  # its error names the file, unlike that of TLS
    try:
        tls = ssl.create_default_context(cafile=config.etcd_ca)
        if config.etcd_cert is not None:
            _check_private(Path(config.etcd_cert_key or config.etcd_cert))
            tls.load_cert_chain(config.etcd_cert, config.etcd_cert_key)
    except ssl.SSLError as error:
        raise ValueError(f"no certificate of etcd, or no key of it: {error}") from None
    return tls


def _login(config: ClusterConfig) -> tuple[str, str] | None:
    if config.etcd_login is None:
        return None
    path = Path(config.etcd_login)
    _check_private(path)
    user, colon, password = path.read_text().strip().partition(":")
    if not colon or not user or not password:
        raise ValueError(f"{path} is one line, USER:PASSWORD")
    return user, password


def _check_private(path: Path) -> None:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o077:
        raise ValueError(f"{path} may be read by others (mode {mode:04o}); chmod 600 it")

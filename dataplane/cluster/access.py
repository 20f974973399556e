"""Reads the credentials of a node at an external etcd from files: TLS certificates and a login.

Invariant: a file with a secret that other users can read is refused, as for the cluster's key.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

from dataplane.config import ClusterConfig


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

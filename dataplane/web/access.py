"""Access control: without a token every process of this host has access, with one only its holders.

Invariants: beyond loopback, only the form that asks for the token is shown without it; tokens are compared in
constant time, and are in no log and no URL; a browser keeps a code derived from the token, in a cookie that scripts
and other sites cannot use. Without a token, only requests that name this host by a loopback name are answered, so
another site's name cannot lead a browser here (DNS rebinding).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
from pathlib import Path

MIN_TOKEN = 16
"""The smallest length of a token."""

_MAX_TOKEN = 1024


class PageAccess:
    """Decides which requests are answered. `token`: None if no token is required."""

    def __init__(self, token: str | None) -> None:
        self._token = None if token is None else token.encode()
        self._code = b"" if self._token is None else hmac.digest(self._token, b"dataplane web", hashlib.sha256)

    @property
    def cookie(self) -> str:
        """The value of the cookie of a browser that has given the token."""
        return self._code.hex()

    @property
    def asks(self) -> bool:
        """Whether a token is required."""
        return self._token is not None

    def knows(self, token: str) -> bool:
        """Whether this is the token."""
        given = token.encode(errors="replace")[: _MAX_TOKEN + 1]
        return self._token is not None and hmac.compare_digest(given, self._token)

    def allows(self, *, host: str, authorization: str = "", cookie: str = "") -> bool:
        """Whether a request is answered. It needs the token or cookie or, if no token is required, a loopback name as
        `host`."""
        if self._token is None:
            return is_loopback(_without_port(host))
        kind, _, token = authorization.partition(" ")
        if kind.lower() == "bearer":
            return self.knows(token.strip())
        given = cookie.encode(errors="replace")[:_MAX_TOKEN]
        return hmac.compare_digest(given, self.cookie.encode())


def read_token(path: Path) -> tuple[str, bool]:
    """The token in a file of one line, and whether it is new: a missing file is created, readable by its owner only.
    Raises ValueError for an invalid token, OSError for an unusable file."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        token = path.read_text(errors="replace").strip()
        if not MIN_TOKEN <= len(token) <= _MAX_TOKEN or not token.isprintable() or not token.isascii():
            raise ValueError(f"{path}: a token is one line of {MIN_TOKEN} to {_MAX_TOKEN} characters") from None
        return token, False
    token = secrets.token_urlsafe(24)
    with os.fdopen(descriptor, "w") as file:
        file.write(token + "\n")
    return token, True


def host_and_port(listen: str) -> tuple[str, int]:
    """The host and port of HOST:PORT, or of PORT on 127.0.0.1. Raises ValueError for other text."""
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if colon else "127.0.0.1"
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"a page is served at HOST:PORT, not at {listen!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this host's own, without asking a resolver."""
    if host.lower() in ("localhost", "localhost."):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]

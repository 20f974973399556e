"""The authentication code of entries at a coordinator: HMAC-SHA256 with a key derived from the cluster's key.

The entries of a cluster without a key, which uses only loopback, have no code.
"""

from __future__ import annotations

import hashlib
import hmac

from dataplane.wire.auth import Key


class EntrySeal:
    """Adds the authentication code to entries, and checks it."""

    def __init__(self, key: Key | None) -> None:
        self._key = None if key is None else hashlib.blake2b(key.secret, person=b"dataplane member").digest()

    def sealed(self, name: str, entry: bytes) -> bytes:
        """The value to register under this name."""
        return entry if self._key is None else self._code(self._key, name, entry) + entry

    def opened(self, name: str, value: bytes) -> bytes:
        """The entry in a value under this name. Raises ValueError if the code is wrong."""
        if self._key is None:
            return value
        code, entry = value[:64], value[64:]
        if not hmac.compare_digest(code, self._code(self._key, name, entry)):
            raise ValueError("it was not written with the cluster's key")
        return entry

    @staticmethod
    def _code(key: bytes, name: str, entry: bytes) -> bytes:
        return hmac.new(key, name.encode() + b"\0" + entry, "sha256").hexdigest().encode()

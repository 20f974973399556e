"""Scopes that end with the process that put under them."""

from __future__ import annotations

import os
import secrets

from dataplane.wire.row_messages import STAGED

_TOKEN = secrets.token_hex(8)


def ending_scope(what: str) -> str:
    """This process's scope for `what`, a few letters. A node frees the rows left under it as soon as the client that
    put them closes or is killed. A forked child has another. Rows under it are freed one by one as others are."""
    return f"{STAGED}{what}-{os.getpid()}-{_TOKEN}"

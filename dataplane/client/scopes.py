"""Scopes whose rows are freed when the process that put them ends."""

from __future__ import annotations

import os
import secrets

from dataplane.wire.row_messages import STAGED

_TOKEN = secrets.token_hex(8)


def ending_scope(what: str) -> str:
    """The scope of this process for `what`, a few letters. A node frees the rows that are left under it as soon as the
    client that put them closes or is killed. A forked child has another scope. Rows under it can also be freed one by
    one, as all others."""
    return f"{STAGED}{what}-{os.getpid()}-{_TOKEN}"

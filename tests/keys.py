"""Keys of clusters, for tests that speak to nodes by sockets of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import zmq

from dataplane.config import environment
from dataplane.wire.auth import Key, own

KEY = Key(*zmq.curve_keypair())
"""One for nodes of one process."""


def of_this_user() -> Key:
    """That of nodes that are given none."""
    return own(Path(environment().state_dir))


def speak(socket: zmq.Socket[Any], key: Key, own: Key | None = None) -> None:
    """Have a socket connect as who has this key of a cluster, or, knowing its public half, one of its `own`."""
    mine = own or key
    socket.curve_serverkey = key.public
    socket.curve_publickey, socket.curve_secretkey = mine.public, mine.secret

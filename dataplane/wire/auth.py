"""The key that the nodes of a cluster share, in a file.

The key is one CURVE key pair (https://rfc.zeromq.org/spec/26/). Every node presents the public half to the nodes to
which it connects, and only nodes with the same key answer it. Any process that can read the file can act as a member,
so only the file's owner may read it, as with an SSH key. Nodes without a configured key listen only on loopback, and
use a key that all nodes of the user on this host share (`own`).
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_LENGTH = 40  # characters of a key in Z85


@dataclass(frozen=True, slots=True)
class Key:
    """A CURVE key pair, each half 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def new() -> bytes:
    """The content of a key file, with a new key."""
    import zmq  # as everywhere here: not needed on one host

    public, secret = zmq.curve_keypair()
    return b"dataplane key 1\n" + public + b"\n" + secret + b"\n"


def generate(path: Path) -> Key:
    """Write a new key to a file that must not exist. Raises OSError."""
    content = new()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    _, public, secret, _ = content.split(b"\n")
    return Key(public, secret)


def own(directory: Path) -> Key:
    """The key of this user's nodes on this host, which is in a directory of the user. The first node creates it. Raises
    OSError; ValueError if the directory is another user's or open to others, and as `load`."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(
            f"{directory} is another user's, or open to others, and the key of this user's nodes is not safe there: set"
            " XDG_STATE_HOME to a directory of yours, or give the nodes a key (dataplane keygen FILE)"
        )
    path = directory / "key"
    if not path.exists():
        made = directory / f"key-{secrets.token_hex(4)}"
        generate(made)
        try:
            with suppress(FileExistsError):  # another node has created it first
                os.link(made, path)
        finally:
            made.unlink()
    return load(path)


def load(path: Path) -> Key:
    """The key in a file. Raises OSError, and ValueError if it is invalid, or others can read it."""
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ValueError(f"{path} may be read by others (mode {mode:04o}); chmod 600 it, or make a new key")
        content = file.read(1024)
    try:
        return parse(content)
    except ValueError:
        raise ValueError(f"{path} is no key; `dataplane keygen FILE` makes one") from None


def parse(content: bytes) -> Key:
    """The key in the content of a key file. Raises ValueError if it has none."""
    import zmq  # as above

    head, public, secret, *more = [*content.split(b"\n"), b"", b""]
    sound = head == b"dataplane key 1" and len(public) == len(secret) == _LENGTH and not any(more)
    try:
        sound = sound and zmq.curve_public(secret) == public
    except (ValueError, zmq.ZMQError):  # not Z85
        sound = False
    if not sound:
        raise ValueError("this is no key")
    return Key(public, secret)

"""One system a module, each used through its own public calls as its own examples use them.

A module has a `Server`, of which one is made first (`address` is what the others are told; `close()`), and a `Door`,
of which each producer and consumer has one: `put` gives a token for each consumer's part, `get` the columns of a
token, `drop` forgets what it put. Tokens are text. A door's `put` has ended when others can get what was put.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from bench.peers.work import Columns


class Server(Protocol):
    """What has to run before a door opens."""

    address: dict[str, Any]

    def __init__(self, told: dict[str, Any]) -> None: ...
    def close(self) -> None:
        """End everything that was started."""


class Door(Protocol):
    """A process's way in."""

    def __init__(self, address: dict[str, Any]) -> None: ...
    def put(self, name: str, columns: Columns, parts: int) -> Sequence[str]:
        """Store the rows; a token for each of so many consecutive parts."""

    def get(self, token: str) -> Columns:
        """The rows of a part, as arrays that can be read."""

    def drop(self, tokens: Sequence[str]) -> None:
        """Forget what `put` gave these tokens for."""

    def close(self) -> None:
        """Leave."""


@runtime_checkable
class Shares(Protocol):
    """A door that gives parts of rows; of others all is had, and cut."""

    def share(self, token: str, rank: int, ranks: int) -> Columns:
        """The tokens of each row that a context-parallel rank has: see `work.shared`."""


@dataclass(frozen=True)
class System:
    """A system and how to get it."""

    name: str
    title: str
    module: str
    #: What is installed into its environment, beside NumPy, xxhash and psutil; none for the benchmark's own.
    packages: tuple[str, ...]
    #: Debian packages whose libraries are unpacked into the environment.
    libraries: tuple[str, ...] = ()
    #: Of the environment of its processes.
    env: tuple[tuple[str, str], ...] = ()
    #: How many times less seconds a step of the video task is to take with us.
    bound: float = 1.0

    @property
    def how(self) -> str:
        """What to type to have it."""
        pip = f"pip install {' '.join(self.packages)}" if self.packages else ""
        apt = f"apt-get install {' '.join(self.libraries)}" if self.libraries else ""
        return "; ".join(filter(None, [pip, apt]))


#: A cluster of this host alone, while it is measured: its drivers need no token.
_ALONE = (("RAY_AUTH_MODE", "disabled"), ("RAY_DEDUP_LOGS", "0"))
_IBVERBS = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
_TRANSFER_QUEUE = ("TransferQueue==0.1.11", "torch==2.13.0", "tensordict==0.10.0", "ray==2.60.0")

SYSTEMS = {
    system.name: system
    for system in (
        System("dataplane", "dataplane", "ours", ()),
        System("transferqueue", "TransferQueue", "transferqueue", _TRANSFER_QUEUE, env=_ALONE, bound=10),
        System("ray", "Ray", "ray_objects", ("ray==2.60.0",), env=_ALONE, bound=2),
        System("mooncake", "Mooncake Store", "mooncake_store",
               ("mooncake-transfer-engine-non-cuda==0.3.13.post1",), _IBVERBS, bound=5),
        System("flight", "Arrow Flight", "flight", ("pyarrow>=18",)),
        System("controller", "single controller", "controller", (), bound=50),
    )
}  # fmt: skip


def server(name: str, told: dict[str, Any]) -> Server:
    """The system's server, started."""
    made: Server = importlib.import_module(f"bench.peers.systems.{SYSTEMS[name].module}").Server(told)
    return made


def door(name: str, address: dict[str, Any]) -> Door:
    """A door to it."""
    made: Door = importlib.import_module(f"bench.peers.systems.{SYSTEMS[name].module}").Door(address)
    return made

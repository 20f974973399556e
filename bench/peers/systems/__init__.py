"""The systems, one a module, each used by its public calls like in its own examples.

A module has a `Server`, which is started first and whose `address` is sent to the other processes, and a `Door`, the
connection of a producer or consumer. `put` returns a token, a text, for each consumer's part; then others can `get` its
columns. `drop` removes the rows of tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from bench.peers.work import Columns


class Server(Protocol):
    """The part of a system that must run before a `Door` connects."""

    address: dict[str, Any]

    def __init__(self, told: dict[str, Any]) -> None: ...
    def close(self) -> None:
        """End everything that the server started."""


class Door(Protocol):
    """The connection of one process to the system."""

    def __init__(self, address: dict[str, Any]) -> None: ...
    def put(self, name: str, columns: Columns, parts: int) -> Sequence[str]:
        """Store the rows. Returns a token for each of `parts` consecutive parts."""

    def get(self, token: str) -> Columns:
        """The rows of a part, as readable arrays."""

    def drop(self, tokens: Sequence[str]) -> None:
        """Remove the rows for which `put` returned these tokens."""

    def close(self) -> None:
        """Close the connection."""


@runtime_checkable
class Shares(Protocol):
    """A `Door` that can read parts of rows. With other doors, whole rows are read and cut."""

    def share(self, token: str, rank: int, ranks: int) -> Columns:
        """The share of each row that a context-parallel rank reads; see `work.shared`."""


@dataclass(frozen=True)
class System:
    """A system, and how it is installed."""

    name: str
    title: str
    module: str
    #: Packages of its environment, beside NumPy, xxhash and psutil; none: it runs in the benchmark's environment.
    packages: tuple[str, ...]
    #: Debian packages whose libraries are unpacked into the environment.
    libraries: tuple[str, ...] = ()
    #: Environment variables of its processes.
    env: tuple[tuple[str, str], ...] = ()
    #: The target for the ratio of its seconds of put and get to ours.
    bound: float = 1.0

    @property
    def how(self) -> str:
        """The commands that install it."""
        pip = f"pip install {' '.join(self.packages)}" if self.packages else ""
        apt = f"apt-get install {' '.join(self.libraries)}" if self.libraries else ""
        return "; ".join(filter(None, [pip, apt]))


#: For a Ray cluster on this host during a measurement, whose drivers need no token.
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
    """Start the server of a system."""
    made: Server = importlib.import_module(f"bench.peers.systems.{SYSTEMS[name].module}").Server(told)
    return made


def door(name: str, address: dict[str, Any]) -> Door:
    """Connect to a system."""
    made: Door = importlib.import_module(f"bench.peers.systems.{SYSTEMS[name].module}").Door(address)
    return made

"""The interface of a transport: one side offers a range of memory, the other reads it, once.

The offer is a ticket, a few bytes that the control channel carries. A transport knows nothing of shards and decides
nothing: it reports errors, and the control channel knows which peers are alive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class TransportError(Exception):
    """The read failed, perhaps after a part of the bytes; the contents of the target are invalid."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A range of a file in memory: a readable descriptor, an offset and a size in bytes."""

    fd: int
    offset: int
    size: int


@runtime_checkable
class SendsFiles(Protocol):
    """A transport that also sends files from disk."""

    def offer_file(self, file: Memory) -> bytes:
        """As `Transport.offer`. The file may be deleted meanwhile, and its contents may be damaged: the reader has
        to check them."""


class Transport(ABC):
    """One way to move bytes. Created and used in one event loop; blocking work runs in its own threads."""

    #: Its name in settings and messages.
    name: str

    @property
    @abstractmethod
    def address(self) -> str:
        """Its address, in its own form; the control channel passes it to other nodes."""

    @abstractmethod
    async def start(self) -> None:
        """Begin to serve. Raises OSError."""

    @abstractmethod
    def offer(self, memory: Memory) -> bytes:
        """A ticket to read this memory once. The memory must not change until the offer is withdrawn."""

    @abstractmethod
    async def withdraw(self, ticket: bytes) -> None:
        """End the offer. When this returns, no reader reads the memory any more. An unknown ticket is ignored."""

    @abstractmethod
    async def read(
        self,
        address: str,
        ticket: bytes,
        into: memoryview,
        timeout_s: float,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Fill `into`, which is as long as the memory offered at that address, or these ranges of it, (start, stop),
        ascending and disjoint. Raises TransportError. When this returns, raises or is cancelled, nothing writes there
        any more."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop serving; readers get TransportError. Idempotent."""

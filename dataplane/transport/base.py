"""What moves bytes between hosts: one side offers a stretch of memory, the other reads it, once.

The offer is a ticket, a few bytes that the control channel carries. A transport knows no shards and decides nothing: it
reports errors, and who is alive is for the control channel to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


class TransportError(Exception):
    """The bytes did not come. Which of them did is not known; what was written of the target is worthless."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A stretch of a file in memory: a descriptor that can be read, an offset and a size in bytes."""

    fd: int
    offset: int
    size: int


@runtime_checkable
class SendsFiles(Protocol):
    """A transport that reads files on disk for others as well as memory."""

    def offer_file(self, file: Memory) -> bytes:
        """As `Transport.offer`. The file may be deleted meanwhile, and what is on the disk may be wrong: to compare it
        with what was written is the reader's part."""


class Transport(ABC):
    """One way to move bytes. Made and used in one event loop; what blocks runs in threads of its own."""

    #: What it is called in settings and messages.
    name: str

    @property
    @abstractmethod
    def address(self) -> str:
        """Where others find it, in a form of its own; told to them by the control channel."""

    @abstractmethod
    async def start(self) -> None:
        """Begin to serve. Raises OSError."""

    @abstractmethod
    def offer(self, memory: Memory) -> bytes:
        """A ticket to read this memory once. The memory must stay as it is until the offer is withdrawn."""

    @abstractmethod
    async def withdraw(self, ticket: bytes) -> None:
        """The offer ends. When this returns nobody reads the memory any more. A ticket that is not there is passed
        over."""

    @abstractmethod
    async def read(
        self,
        address: str,
        ticket: bytes,
        into: memoryview,
        timeout_s: float,
        stretches: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Fill `into`, which is as long as what was offered at that address, or these stretches of it, (start, stop),
        ascending and apart. Raises TransportError. When this returns, raises or is cancelled, nothing writes there any
        more."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop serving; readers get TransportError. Idempotent."""

"""Shared types of the modules of a transport: the offered memory, and the errors of reads."""

from __future__ import annotations

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

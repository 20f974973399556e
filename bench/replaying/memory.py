"""Samples of the memory of a replay's processes: pages of shared memory, and each process's private pages.

A shared page counts once, whatever the number of processes that map it. Private pages are those without a file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Memory:
    """The peaks of all samples, in bytes."""

    #: Of all processes together in one sample.
    total: int = 0
    #: Of shared memory.
    shared: int = 0
    #: Of each process's own pages.
    own: dict[str, int] = field(default_factory=dict)
    #: Of each process's resident set, shared pages that it has mapped included.
    resident: dict[str, int] = field(default_factory=dict)

    def sample(self, node: int, processes: Mapping[str, int]) -> None:
        """Take a sample of the node and these processes. Ended processes are skipped."""
        shared = _segments(node)
        own = 0
        for name, pid in {"node": node, **processes}.items():
            with suppress(FileNotFoundError, ProcessLookupError, ValueError):
                resident, mapped = _resident(pid)
                own += resident - mapped
                self.own[name] = max(self.own.get(name, 0), resident - mapped)
                self.resident[name] = max(self.resident.get(name, 0), resident)
        self.shared = max(self.shared, shared)
        self.total = max(self.total, shared + own)


def _resident(pid: int) -> tuple[int, int]:
    """Resident bytes, and those of them that are of files or shared memory."""
    _, resident, mapped, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return int(resident) * _PAGE, int(mapped) * _PAGE


def _segments(node: int) -> int:
    """Allocated bytes of the shared memory of the node, which has all of its descriptors open."""
    found: dict[int, int] = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        for descriptor in Path(f"/proc/{node}/fd").iterdir():
            with suppress(FileNotFoundError):
                if "memfd:dataplane" in os.readlink(descriptor):
                    status = os.stat(descriptor)
                    found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())

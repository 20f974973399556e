"""What the processes of a replay use, sampled: the pages of shared memory, and what each process has for itself.

Shared pages count once, however many processes have mapped them; a process's own are those that no file is behind.
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
    """The most that was seen, in bytes."""

    #: Of all together at one moment.
    total: int = 0
    #: Of shared memory.
    shared: int = 0
    #: Of each process's own pages.
    own: dict[str, int] = field(default_factory=dict)
    #: Of each process's resident set, shared pages that it has mapped included.
    resident: dict[str, int] = field(default_factory=dict)

    def sample(self, node: int, processes: Mapping[str, int]) -> None:
        """Look at the node and these processes; those that have ended are passed over."""
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
    """Bytes that are resident, and how many of those are of files or shared memory."""
    _, resident, mapped, *_ = Path(f"/proc/{pid}/statm").read_text().split()
    return int(resident) * _PAGE, int(mapped) * _PAGE


def _segments(node: int) -> int:
    """Bytes that have pages in the shared memory of the node, to which it holds all descriptors."""
    found: dict[int, int] = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        for descriptor in Path(f"/proc/{node}/fd").iterdir():
            with suppress(FileNotFoundError):
                if "memfd:dataplane" in os.readlink(descriptor):
                    status = os.stat(descriptor)
                    found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())

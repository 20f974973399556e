"""One memfd of the node's shared memory, protected against writes of processes that may only read it.

A segment has one writer besides the node: the process it was created for, or none. The kernel keeps others from
writing:

- its size is sealed (`F_SEAL_SHRINK`, `F_SEAL_GROW`), so no process can remove pages that others map;
- readers receive a descriptor of another open file, which is read-only;
- a read lease (fcntl(2), `F_SETLEASE`) is broken by a process that opens the file for writing, for example through
  /proc. That `open` waits until the node answers, up to /proc/sys/fs/lease-break-time. The answer is
  `F_SEAL_FUTURE_WRITE`: from then on no process can write the file or map it for writing; existing mappings stay.

`F_SEAL_FUTURE_WRITE` also prevents punching holes, by which the arena returns memory, so it is only set when needed.
Not covered between processes of one user: ptrace(2) and /proc/PID/mem if the system allows them, a node that is
stopped for longer than the lease-break-time, and a writer that changes its own bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import ExitStack, suppress

from dataplane.store.extents import FreeList, RangeSet

_FUTURE_WRITE = getattr(fcntl, "F_SEAL_FUTURE_WRITE", 0x10)  # linux/fcntl.h, since Linux 5.1


class ArenaSegment:
    """A sparse memfd of `size` bytes, mapped here for writing. `fd` may write, `readonly_fd` may not."""

    def __init__(self, number: int, size: int) -> None:
        """Raises OSError if the system refuses; then nothing is left behind."""
        self.number = number
        self.size = size
        with ExitStack() as undo:
            self.fd = os.memfd_create(f"dataplane-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            undo.callback(os.close, self.fd)
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.readonly_fd = self._reopened()
            undo.callback(os.close, self.readonly_fd)
            os.fchmod(self.fd, 0o400)
            self.memory = mmap.mmap(self.fd, size)
            undo.pop_all()
        for advice in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
            with suppress(AttributeError, OSError):  # huge pages are only where the kernel offers them
                self.memory.madvise(getattr(mmap, advice))
        self.free = FreeList(size)
        self.warm = RangeSet()
        self.extents = 0
        """The number of its extents, punched ones included."""
        self.retired = False
        """Whether it gets no new extents: its owner has gone, or it cannot give memory back."""
        self._lease: int | None = None

    def _reopened(self) -> int:
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)

    def guard(self) -> bool:
        """Take the lease. Returns whether the system grants one. When a process breaks it, the system sends SIGIO, for
        which this process needs a handler. The lease has a descriptor of its own, because another owner of the same
        open file could end it."""
        if self._lease is None:
            with suppress(OSError):
                lease = self._reopened()
                try:
                    fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                    self._lease = lease
                except OSError:
                    os.close(lease)
        return self._lease is not None

    @property
    def opened(self) -> bool:
        """Whether a process is waiting to open the segment for writing."""
        return self._lease is not None and fcntl.fcntl(self._lease, fcntl.F_GETLEASE) != fcntl.F_RDLCK

    def harden(self) -> None:
        """Prevent all writes except through existing mappings, and then end the lease."""
        with suppress(OSError):  # its writer has set F_SEAL_SEAL
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _FUTURE_WRITE | fcntl.F_SEAL_SEAL)
        self._end_lease()

    def _end_lease(self) -> None:
        if self._lease is not None:
            with suppress(OSError):
                fcntl.fcntl(self._lease, fcntl.F_SETLEASE, fcntl.F_UNLCK)  # a fork may have the descriptor too
            os.close(self._lease)
            self._lease = None

    def punch(self, start: int, end: int) -> bool:
        """Return the pages of a range to the host; it then reads as zeros. Returns whether the system did so: it
        refuses after `harden`, and after seals that the writer added."""
        try:
            self.memory.madvise(mmap.MADV_REMOVE, start, end - start)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Close the descriptors. The mapping ends with its last view."""
        self._end_lease()
        os.close(self.fd)
        os.close(self.readonly_fd)
        with suppress(BufferError):  # an abandoned view; the process is ending
            self.memory.close()

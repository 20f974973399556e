"""A segment of shared memory: what the kernel keeps processes from that only read it, or wrote to it once."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dataplane.config import PAGE
from dataplane.store.arena import Arena
from dataplane.store.segment import ArenaSegment
from tests.cases import each_case
from tests.processes import WAIT_S

SIZE = 64 * PAGE


@pytest.fixture
def segment() -> Iterator[ArenaSegment]:
    made = ArenaSegment(0, SIZE)
    yield made
    made.close()


@pytest.fixture
def opened() -> Iterator[list[int]]:
    """The signals that came of processes that opened a segment for writing."""
    if not int(Path("/proc/sys/fs/leases-enable").read_text()):
        pytest.skip("leases are disabled on this system")
    heard: list[int] = []
    before = signal.signal(signal.SIGIO, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGIO, before)


def in_child(work: Callable[[], None]) -> int:
    """A forked process that ends with 0 if the work raises nothing, and with 1 if it raises OSError."""
    pid = os.fork()
    if pid:
        return pid
    code = 2
    try:
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        signal.alarm(int(WAIT_S))
        work()
        code = 0
    except OSError:
        code = 1
    finally:
        os._exit(code)


def open_to_write(segment: ArenaSegment) -> int:
    """As its owner can who is not root: the mode says that nobody may."""
    os.fchmod(segment.readonly_fd, 0o600)
    return os.open(f"/proc/self/fd/{segment.readonly_fd}", os.O_RDWR)


def outcome(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@each_case("size", [0, PAGE, 2 * SIZE])
@each_case("which", ["fd", "readonly_fd"])
def test_the_size_of_a_segment_cannot_be_changed(segment: ArenaSegment, which: str, size: int) -> None:
    """Not its writer either: to cut pages away ends all who map them with SIGBUS."""
    with pytest.raises(OSError, match=r"not permitted|Invalid argument"):
        os.ftruncate(getattr(segment, which), size)
    assert os.fstat(segment.fd).st_size == SIZE


def test_a_readers_descriptor_can_not_write(segment: ArenaSegment) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(segment.readonly_fd, SIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(segment.readonly_fd, b"x")
    with pytest.raises(PermissionError):
        fcntl.fcntl(segment.readonly_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    segment.memory[:3] = b"abc"
    with mmap.mmap(segment.readonly_fd, SIZE, prot=mmap.PROT_READ) as reading:
        assert reading[:3] == b"abc"


def test_a_reader_descriptor_cannot_end_the_file_lease(segment: ArenaSegment, opened: list[int]) -> None:
    assert segment.guard()
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        fcntl.fcntl(segment.readonly_fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    again = os.open(f"/proc/self/fd/{segment.readonly_fd}", os.O_RDONLY)
    os.close(again)
    assert not segment.opened


def test_a_hardened_segment_returns_its_pages_only_when_closed(opened: list[int]) -> None:
    """It can not give memory back any more, so nothing new goes there, and what it holds still counts."""
    arena = Arena(64 * PAGE)
    try:
        arena.guard()
        kept, freed = arena.allocate("a", 16 * PAGE), arena.allocate("a", 32 * PAGE)
        segment = arena[kept.segment]
        arena.release(freed)
        child = in_child(lambda: os.close(open_to_write(segment)))
        deadline = time.monotonic() + WAIT_S
        while not opened:
            assert time.monotonic() < deadline
        arena.harden_opened()
        assert outcome(child) == 0
        assert (arena.used, arena.resident) == (16 * PAGE, 48 * PAGE)
        other = arena.allocate("a", 16 * PAGE)
        assert other.segment != kept.segment
        with pytest.raises(OSError, match="does not take free pages back"):
            arena.allocate("b", PAGE)
        assert (arena.used, arena.resident) == (32 * PAGE, 64 * PAGE)
        arena.release(kept)
        assert (arena.used, arena.resident) == (16 * PAGE, 16 * PAGE)
        assert arena.allocate("b", 48 * PAGE).size == 48 * PAGE
    finally:
        arena.close()


def test_a_writer_that_seals_its_segment_does_not_affect_other_segments() -> None:
    """With the descriptor that it may write by, it keeps the node from punching holes."""
    arena = Arena(64 * PAGE)
    try:
        mine = arena.allocate("a", 32 * PAGE)
        arena.release(arena.allocate("a", 16 * PAGE))
        fcntl.fcntl(arena[mine.segment].fd, fcntl.F_ADD_SEALS, 0x10 | fcntl.F_SEAL_SEAL)
        with pytest.raises(OSError, match="does not take free pages back"):
            arena.allocate("b", 32 * PAGE)
        assert arena.allocate("b", 16 * PAGE).size == 16 * PAGE
        arena.punch(mine, 0, mine.size, mine.size)
        assert arena.used == 16 * PAGE
        arena.readmit(mine)
        arena.depart("a")
        assert arena.resident == arena.used == 16 * PAGE
    finally:
        arena.close()

"""This process's mappings of the node's segments, and views of them that keep their pins.

A whole segment is mapped at most once for reading and at most once for writing, so that its pages stay in this
process's page tables. A torch tensor has no read-only flag, so it gets a private copy-on-write mapping of its extent.
Writes to the tensor reach no other process.

Invariants: an array keeps its mapping and the pin of its bytes. Both are dropped with the last array, tensor or Arrow
buffer made from the array, whether or not the plane is still open. Views need no file descriptors. A segment keeps at
most one descriptor for reading and one for writing.

A forked child must not write to memory that its parent may write, because it would overwrite columns that the parent
has sealed. Drafts become private in the child (`unshare`). Views stay readable if the child has pins.

mmap is called by ctypes because Python's `mmap` module duplicates the descriptor for each mapping.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.errors import Corrupt, Forked, LimitExceeded, Rejected

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_FAILED = ctypes.c_void_p(-1).value
_MADV_POPULATE_WRITE = 23  # linux/mman.h, since Linux 5.14
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_PROT_NONE = 0


class _Span:
    """The base object of a NumPy array: it owns the mapping and the pin that the array needs."""

    __slots__ = ("__array_interface__", "keeps")

    def __init__(self, address: int, size: int, writable: bool, keeps: Any) -> None:
        self.__array_interface__ = {"data": (address, not writable), "shape": (size,), "typestr": "|u1", "version": 3}
        self.keeps = keeps


def _require(offset: int, nbytes: int, size: int) -> None:
    """Raises ValueError if these bytes are not within the given size."""
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise ValueError(f"bytes {offset} to {offset + nbytes} of {size}")


class Mapping:
    """Addresses of this process that map a range of a file. Unmapped with the last array of the mapping."""

    __slots__ = ("__weakref__", "address", "shared", "size", "writable")

    def __init__(self, fd: int, offset: int, size: int, protection: int, flags: int) -> None:
        """Map the range. Raises LimitExceeded if this process cannot map that size, Rejected if the file is sealed."""
        self.address = _mapped(None, size, protection, flags, fd, offset)
        self.size = size
        self.writable = bool(protection & mmap.PROT_WRITE)
        self.shared = self.writable and bool(flags & mmap.MAP_SHARED)
        """Whether other processes see writes to the mapping."""
        weakref.finalize(self, _libc.munmap, self.address, size).atexit = False

    def array(self, offset: int, size: int, keeps: Any = None) -> Bytes:
        """An array of `size` bytes from `offset`, writable if the mapping is. Keeps the mapping, and `keeps`, alive."""
        _require(offset, size, self.size)
        return np.asarray(_Span(self.address + offset, size, self.writable, (self, keeps)))

    def populate(self, offset: int, size: int) -> bool:
        """Allocate the pages of the range now, in the file and in this mapping. Returns whether the kernel has done
        so."""
        result: int = _libc.madvise(self.address + offset, size, _MADV_POPULATE_WRITE)
        return result == 0

    def make_private(self, fd: int, offset: int) -> None:
        """Map the same file from `offset` at the same addresses, copy-on-write. Afterwards, this process's writes to
        arrays that it already has are not visible to other processes."""
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        _mapped(self.address, self.size, protection, flags, fd, offset)
        self.shared = False

    def forbid(self) -> None:
        """Make all accesses fail with SIGSEGV from now on."""
        _libc.mprotect(self.address, self.size, _PROT_NONE)


def _mapped(where: int | None, size: int, protection: int, flags: int, fd: int, offset: int) -> int:
    address: int = _libc.mmap(where, size, protection, flags, fd, offset)
    if address != _FAILED:
        return address
    code = ctypes.get_errno()
    if code == errno.EPERM:
        raise Rejected(
            "a process opened this segment for writing, so it was sealed; the next is another one: try again"
        )
    raise LimitExceeded(
        f"this process can not map {size} bytes: {os.strerror(code)}; see ulimit -v and vm.max_map_count",
        what="addresses of this process",
        asked=size,
    )


class MappingAccess:
    """The mappings of one connection of this process, and whether it may map more."""

    __slots__ = ("mappings", "readable")

    def __init__(self) -> None:
        self.mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
        self.readable = True

    def after_fork_in_child(self, *, readable: bool) -> None:
        """In a forked child: forbid all writes to memory of the parent and, unless `readable`, all reads."""
        self.readable = readable
        for mapping in list(self.mappings):
            if mapping.shared or not readable:
                mapping.forbid()


class _Descriptor:
    """An open descriptor, closed with its last user."""

    __slots__ = ("__weakref__", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False


class NodeSegment:
    """One segment of the node's arena, with the descriptors that the node has sent to this process."""

    def __init__(self, number: int, size: int, access: MappingAccess | None = None) -> None:
        self.number = number
        self.size = size
        self._access = access or MappingAccess()
        self._descriptors: dict[bool, _Descriptor] = {}
        self._mappings: dict[bool, Mapping] = {}

    def grant(self, fd: int, *, writable: bool) -> None:
        """Own a descriptor that the node has sent."""
        self._descriptors[writable] = _Descriptor(fd)

    def mapping(self, *, writable: bool) -> Mapping:
        """The mapping of the whole segment. Raises KeyError if the node has sent no such descriptor."""
        mapping = self._mappings.get(writable)
        if mapping is None:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            mapping = self._map(self._descriptors[writable], 0, self.size, protection, mmap.MAP_SHARED)
            self._mappings[writable] = mapping
        return mapping

    def _map(self, descriptor: _Descriptor, offset: int, size: int, protection: int, flags: int) -> Mapping:
        if not self._access.readable:
            raise Forked("the node gave this child no pins of its own, so what its parent got can not be read here")
        mapping = Mapping(descriptor.fd, offset, size, protection, flags)
        self._access.mappings.add(mapping)
        return mapping

    def private(self, offset: int, size: int) -> Mapping:
        """The range, writable, each page copied when it is first written."""
        flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
        return self._map(self._readable, offset, size, mmap.PROT_READ | mmap.PROT_WRITE, flags)

    def shared(self, offset: int, size: int) -> Mapping:
        """A new shared mapping of the range. Other processes see writes to it."""
        return self._map(self._descriptors[True], offset, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)

    def unshare(self, mapping: Mapping, offset: int) -> None:
        """Make a mapping from `shared` private. `offset`: its offset in the segment."""
        mapping.make_private(self._readable.fd, offset)

    @property
    def _readable(self) -> _Descriptor:
        return self._descriptors.get(False) or self._descriptors[True]


class HeldShard:
    """The bytes of a pinned shard (`batch.stored_column.ExtentMemory`): read-only in place, or writable as a private
    copy whose pages are copied when they are first written."""

    __slots__ = ("_extent", "_pin", "_private", "_segment", "_view")

    def __init__(self, segment: NodeSegment, offset: int, size: int, pin: object, view: Bytes | None = None) -> None:
        """`view`: the bytes as a read-only array that keeps the pin; None: made at the first use."""
        self._segment = segment
        self._extent = (offset, size)
        self._pin = pin
        self._private: Mapping | None = None
        self._view = view

    def read(self, offset: int, nbytes: int) -> Bytes:
        """`nbytes` of the shard from `offset`, read-only, without a copy."""
        _require(offset, nbytes, self._extent[1])
        if self._view is None:
            self._view = self._segment.mapping(writable=False).array(*self._extent, self._pin)
        return self._view[offset : offset + nbytes]

    def private(self, offset: int, nbytes: int) -> Bytes:
        """`nbytes` of the shard from `offset`, writable. All calls return parts of one private copy."""
        start, size = self._extent
        _require(offset, nbytes, size)
        before = start % mmap.PAGESIZE  # bytes of other shards in the same page
        if self._private is None:
            self._private = self._segment.private(start - before, before + size)
        return self._private.array(before + offset, nbytes, self._pin)

    def own(self, offset: int, nbytes: int) -> Bytes:
        """`nbytes` of the shard from `offset`, writable, in a separate mapping. No other view sees writes."""
        _require(offset, nbytes, self._extent[1])
        start = self._extent[0] + offset
        first = start - start % mmap.PAGESIZE
        return self._segment.private(first, start + nbytes - first).array(start - first, nbytes, self._pin)


class CarriedShard:
    """The bytes of a shard that was sent in a message, or to this process only (`batch.stored_column.ExtentMemory`).
    The payload is read-only."""

    __slots__ = ("_bytes", "_private")

    def __init__(self, payload: bytes | memoryview, offset: int, size: int) -> None:
        """Raises Corrupt if the payload has less than `size` bytes from `offset` on."""
        if not 0 <= offset <= offset + size <= len(payload):
            raise Corrupt(f"bytes {offset} to {offset + size} of {len(payload)} that came")
        self._bytes = np.frombuffer(payload, np.uint8, size, offset)
        self._private: Bytes | None = None

    def read(self, offset: int, nbytes: int) -> Bytes:
        """`nbytes` of the shard from `offset`, read-only."""
        return self._part(self._bytes, offset, nbytes)

    def private(self, offset: int, nbytes: int) -> Bytes:
        """`nbytes` of the shard from `offset`, writable. All calls return parts of one copy."""
        if self._private is None:
            self._private = self._bytes.copy()
        return self._part(self._private, offset, nbytes)

    def own(self, offset: int, nbytes: int) -> Bytes:
        """A writable copy of `nbytes` of the shard from `offset`. No other view sees writes."""
        return self.read(offset, nbytes).copy()

    def _part(self, whole: Bytes, offset: int, nbytes: int) -> Bytes:
        _require(offset, nbytes, len(whole))
        return whole[offset : offset + nbytes]

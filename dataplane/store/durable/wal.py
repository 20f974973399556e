"""Checks SQLite's write-ahead log before SQLite opens it: was it cut by a crash, or changed?

SQLite reads the log up to the first frame with a wrong checksum and drops the rest silently. After a crash that is
right: the end of the last transaction had not been synced, so no caller had an answer. A changed byte further ahead
would drop committed transactions. The two cases can be distinguished: a transaction is written only after the previous
one was synced. So a transaction that is followed by another one was synced, and a wrong frame of it is Corrupt.

A wrong byte in the last transaction of the log cannot be distinguished from its torn end. SQLite drops that one.

The format: https://www.sqlite.org/fileformat2.html#walformat. Its checksum is a linear recurrence over pairs of
32-bit words, (a, b) -> (a + b + x, a + 2 b + x + y) modulo 2**32, so that of a frame is a product with fixed powers.
"""

from __future__ import annotations

import struct
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataplane.errors import Corrupt

_HEADER = struct.Struct(">8I")  # magic, format, page size, checkpoint, salt, salt, checksum, checksum
_MAGIC = 0x377F0682  # the lowest bit says whether words are big-endian
_FRAME = 24  # bytes before each page: page, database's size or 0, salt, salt, checksum, checksum
_SECTOR = 512

Words = npt.NDArray[np.uint32]


def check(path: Path) -> None:
    """Raises Corrupt if committed transactions would be dropped, OSError if the file cannot be read."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    if len(data) < _HEADER.size:
        return
    magic, _, page_size, _, salt1, salt2, *last = _HEADER.unpack_from(data)
    order = ">u4" if magic & 1 else "<u4"
    if magic & ~1 != _MAGIC or page_size & (page_size - 1) or not 512 <= page_size <= 65536:
        if any(data[_HEADER.size :]):
            raise _corrupt(path, "its header is wrong")
        return
    if _sums(np.frombuffer(data[:24], order)[None], np.array([[0, 0]], np.uint32)).tolist()[0] != last:
        raise _corrupt(path, "its header is wrong")
    size = _FRAME + page_size
    count = (len(data) - _HEADER.size) // size
    frames = np.frombuffer(data, np.uint8, count * size, _HEADER.size).reshape(count, size)
    heads = np.ascontiguousarray(frames[:, :_FRAME]).view(">u4").astype(np.uint32)
    summed = np.concatenate([frames[:, :8], frames[:, _FRAME:]], axis=1).view(order)
    before = np.concatenate([np.array([last], np.uint32), heads[:-1, 4:]])
    ours = (heads[:, 2] == salt1) & (heads[:, 3] == salt2)
    sound = ours & (_sums(summed, before) == heads[:, 4:]).all(axis=1)
    wrong = np.flatnonzero(~sound)
    if not len(wrong):
        return
    # A sector's end between a header's size and salts may show an older size beside newer salts.
    cut = (_HEADER.size + size * np.arange(count) + 8) % _SECTOR == 0
    ends = np.flatnonzero(ours & (heads[:, 1] != 0) & ~cut)
    ends = ends[ends >= wrong[0]]
    if len(ends) and sound[ends[0] + 1 :].any():
        raise _corrupt(path, f"its frame {wrong[0]} of {count} is wrong, and what follows was synced after it")


def _corrupt(path: Path, what: str) -> Corrupt:
    return Corrupt(f"the write-ahead log {path} is not as it was written: {what}", path=str(path))


@cache
def _powers(pairs: int) -> tuple[Words, Words]:
    """[pairs, 2] each: the contributions of a pair's words to the two sums, `x` and `y`; and the matrix for the sums
    before."""
    step = np.array([[1, 1], [1, 2]], np.uint64)
    power, mask = np.eye(2, dtype=np.uint64), np.uint64(0xFFFFFFFF)
    of_x, of_y = np.zeros((pairs, 2), np.uint32), np.zeros((pairs, 2), np.uint32)
    for i in range(pairs - 1, -1, -1):
        of_x[i] = (power @ np.array([1, 1], np.uint64)) & mask
        of_y[i] = (power @ np.array([0, 1], np.uint64)) & mask
        power = (power @ step) & mask
    return np.stack([of_x, of_y], axis=1).reshape(2 * pairs, 2), power.astype(np.uint32)


def _sums(words: npt.NDArray[np.generic], before: Words) -> Words:
    """The checksums [frame, 2] of words [frame, word], each after the previous one."""
    powers, power = _powers(words.shape[1] // 2)
    native = words.astype(np.uint32)
    sums = np.empty_like(before)
    for i in range(2):
        sums[:, i] = (native * powers[:, i]).sum(axis=1, dtype=np.uint32)
        sums[:, i] += (before * power[i]).sum(axis=1, dtype=np.uint32)
    return sums

"""The bytes of rows: made from the row's number, and checked by checksum at each read.

Invariants: two prompts, and two responses, have different bytes; all bytes that are read are checked. Filling costs
only a copy, so that the replay measures the plane and not a random generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

import dataplane as dp
from bench.replaying.plan import COLUMNS

_BLOCK = 1 << 20
_TOKENS = 150_000


class Differs(Exception):
    """A row was not read as it was written."""


@cache
def _block() -> npt.NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(0).bytes(2 * _BLOCK), np.uint8)


@cache
def _tokens() -> npt.NDArray[np.int64]:
    return np.random.default_rng(1).integers(0, _TOKENS, _BLOCK // 4, dtype=np.int64)


def fill(out: npt.NDArray[Any], number: int) -> None:
    """Write the bytes of prompt or row `number` over a contiguous array."""
    flat = out.reshape(-1).view(np.uint8)
    begin = number * 4096 % _BLOCK
    for at in range(0, len(flat), _BLOCK):
        part = flat[at : at + _BLOCK]
        part[:] = _block()[begin : begin + len(part)]
    head = np.frombuffer(np.int64(number).tobytes(), np.uint8)
    flat[: len(head)] = head[: len(flat)]


def tokens(count: int, number: int) -> npt.NDArray[np.int64]:
    """`count` token ids of prompt or row `number`."""
    begin = number * 977 % (len(_tokens()) // 2)
    made = np.take(_tokens(), np.arange(begin, begin + count), mode="wrap")
    made[:1] = number
    return made


def floats(count: int, number: int) -> npt.NDArray[np.float32]:
    """`count` log-probabilities of row `number`."""
    made = np.empty(count, np.float32)
    fill(made, number)
    return made


def checksum(array: npt.NDArray[Any]) -> int:
    """The xxh3 checksum of an array's bytes, as a signed 64-bit integer."""
    value = xxhash.xxh3_64_intdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return int(np.uint64(value).astype(np.int64))


def check(batch: dp.Batch, columns: Sequence[str]) -> int:
    """Compare each row's columns with its checksums. Returns the number of bytes. Raises Differs."""
    size = 0
    numbers, sums = batch["row"].numpy(), batch["sums"].numpy()
    for column in columns:
        known: dict[tuple[int, int], int] = {}  # siblings share what is their prompt's
        for i, array in enumerate(batch[column].numpy()):
            place = array.__array_interface__["data"][0], array.nbytes
            if place not in known:
                known[place] = checksum(array)
            if known[place] != sums[i, COLUMNS.index(column)]:
                raise Differs(f"{column} of row {numbers[i]} is not what was written")
            size += array.nbytes
    return size


def check_stages(batch: dp.Batch) -> None:
    """Check the columns that the reward stage and the reference added. Raises Differs."""
    brought = zip(
        batch["row"].numpy(), batch["reward"].numpy(), batch["ref_log_probs"].numpy(), batch["response_ids"].numpy(),
        strict=True,
    )  # fmt: skip
    for row, reward, ref_log_probs, response in brought:
        if reward != reward_of(int(row)):
            raise Differs(f"reward of row {row} is {reward}, not {reward_of(int(row))}")
        if not np.array_equal(ref_log_probs.view(np.uint8), reference_of(int(row), len(response)).view(np.uint8)):
            raise Differs(f"ref_log_probs of row {row} is not what was written")


def reward_of(row: int) -> float:
    """The reward of a row."""
    return float(row % 4096)


def reference_of(row: int, count: int) -> npt.NDArray[np.float32]:
    """The reference's log-probabilities of a row."""
    return floats(count, ~row & 0xFFFF)

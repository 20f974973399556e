"""What the layouts of many shards have in common, apart from their numbers: names, fields, how columns are nested.

An encoded layout is an outline, which is that, and the numbers one after another: of each column its rows, those it
stores, the offset and bytes of each buffer, then its children's. Shards that are put a row at a time differ in their
numbers alone, so an outline is taken apart once, and the numbers of many layouts are read as one table.

Invariants: nothing here is checked but that outline and numbers belong together; `batch.layout` and
`batch.alike` do the rest.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.field import Field
from dataplane.errors import ProtocolMismatch

Numbers = npt.NDArray[np.int64]

_CODES = {"H": 1 << 16, "I": 1 << 32, "q": 1 << 63}
_HEAD = struct.Struct("<cI")
_SMALL = 8 << 10  # bytes of an outline that is remembered


class Form(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A column without its numbers: its field, how many buffers it has, its children, and whether it is indexed."""

    field: Field
    buffers: int
    children: tuple[Form, ...] = ()
    indexed: bool = False


class Outline:
    """The columns of a shard without their numbers: where those of each begin, and how many they are. `sound`: nothing
    in it is false, whatever the numbers are; `small`: so few bytes that it may be remembered; `kinds`: of each column
    what is the same for one that lies alike in numbers of another outline, whatever is beside it."""

    __slots__ = ("columns", "kinds", "small", "sound", "starts", "width")

    columns: tuple[tuple[str, Form], ...]
    kinds: list[object]
    small: bool
    sound: bool
    starts: list[int]
    width: int

    def __init__(self, columns: tuple[tuple[str, Form], ...]) -> None:
        self.columns = columns
        self.small = self.sound = False
        *self.starts, self.width = accumulate((width(form) for _, form in columns), initial=0)
        beside = zip(columns, self.starts, strict=True)
        self.kinds = [_kind(form, start, self.width) for (_, form), start in beside]


@lru_cache(maxsize=1 << 12)
def _kind(form: Form, start: int, width: int) -> object:
    return object()


def width(form: Form) -> int:
    """How many numbers a column of this form has, its children's included."""
    if form.buffers < 0:
        raise ProtocolMismatch(f"a column with {form.buffers} buffers")
    return 2 + 2 * form.buffers + sum(map(width, form.children))


def join(columns: Sequence[tuple[str, Form]], numbers: Iterable[int]) -> bytes:
    """The columns and their numbers as bytes. Raises OverflowError for a number beyond 63 bits."""
    outline, table = _encoder.encode(columns), list(numbers)
    low, high = min(table, default=0), max(table, default=0)
    code = "q" if low < 0 else next((code for code, bound in _CODES.items() if high < bound), "q")
    try:
        packed = struct.pack(f"<{len(table)}{code}", *table)
    except struct.error as error:
        raise OverflowError(str(error)) from None
    return _HEAD.pack(code.encode(), len(outline)) + outline + packed


def split(encoded: bytes | bytearray | memoryview) -> tuple[Outline, Numbers]:
    """What `join` was given. Raises ProtocolMismatch where it was given nothing of the kind."""
    encoded = bytes(encoded)
    try:
        code, size = _HEAD.unpack_from(encoded)
        end = _HEAD.size + size
        part = encoded[_HEAD.size : end]
        if len(part) != size or code.decode() not in _CODES:
            raise ValueError("it is cut, or begins with something else")
        outline = _known(part) if size <= _SMALL else _outline(part)
        outline.small = size <= _SMALL
        numbers = np.frombuffer(encoded, f"<{code.decode()}", offset=end).astype(np.int64)
    except (msgspec.MsgspecError, RecursionError, ValueError, struct.error) as error:
        raise ProtocolMismatch(f"not the layout of a shard: {error}") from error
    if len(numbers) != outline.width:
        raise ProtocolMismatch(f"not the layout of a shard: {len(numbers)} numbers, not {outline.width}")
    return outline, numbers


def buffers(numbers: Sequence[int], start: int, count: int) -> tuple[tuple[int, int], ...]:
    """The buffers, as (offset, bytes), of the column whose numbers begin at `start`."""
    at: Iterator[int] = iter(numbers[start + 2 : start + 2 + 2 * count])
    return tuple(zip(at, at, strict=True))


def _outline(encoded: bytes) -> Outline:
    return Outline(_decoder.decode(encoded))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[tuple[str, Form], ...])
_known = lru_cache(maxsize=256)(_outline)

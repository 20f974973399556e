"""The file of a checkpoint: a chain of frames, each with its length and checksum, and an empty one at the end.

    magic (16 bytes) | frame | frame | ... | the end
    frame: kind (8 bytes) | bytes of the payload (8) | checksum (8) | payload
    checksum: xxh3-64 of: number of the frame (8) | checksum of the frame before (8) | kind | bytes of the payload |
        payload

Numbers are little-endian. The first frame has the file's id, 16 random bytes. A checksum covers the checksum of the
previous frame, and so the id and all previous frames. The first frame's checksum covers the number of the format
instead. A frame of kind `TABLE` is an Arrow IPC stream, which other programs can read. The other frames are
MessagePack; a frame of kind `BLOCK` is a `snapshot_format.RowsState`. Nothing is ever unpickled.

Invariants: a frame is valid only at its place in its file. A frame that was moved, left out, repeated or taken from
another file (such as an older checkpoint) raises `Corrupt`. The file gets its name once all of it is on disk. An older
file of that name stays until then. A writer that dies leaves nothing, if the file system supports unnamed files
(O_TMPFILE; NFS does not).
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import xxhash

from dataplane.batch.batch import Batch
from dataplane.batch.values import Values
from dataplane.errors import Corrupt, SchemaMismatch
from dataplane.file_errors import file_errors

MAGIC = b"dataplane/strm\x03\n"
_FORMAT = 3
START, HEAD, BLOCK, COLUMNS, TABLE, END = range(6)

_FRAME = struct.Struct("<QQQ")
_LINK = struct.Struct("<QQQQ")
_ID = 16


class _Chain:
    """The checksums of the frames of one file, in their order."""

    def __init__(self) -> None:
        self.frames = 0
        self._last = _FORMAT

    def checksum(self, kind: int, payload: memoryview) -> int:
        """The checksum that this frame has if it is the next one."""
        state = xxhash.xxh3_64(_LINK.pack(self.frames, self._last, kind, len(payload)))
        state.update(payload)
        return state.intdigest()

    def add(self, checksum: int) -> None:
        """Append a frame with this checksum to the chain."""
        self.frames, self._last = self.frames + 1, checksum


class CheckpointWriter:
    """Writes one file. A `with` block without a `commit` leaves no file. Must be used by one thread at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises Misuse if no file can be written there."""
        self.path = Path(path)
        self._name: Path | None = None  # the temporary name, if the file has one
        with file_errors(self.path):
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._file = self._open()
            self._file.write(MAGIC)
        self._chain = _Chain()
        self.id = secrets.token_bytes(_ID)
        """The file's random id."""
        self.frame(START, self.id)

    def _open(self) -> BinaryIO:
        try:
            return os.fdopen(os.open(self.path.parent, os.O_TMPFILE | os.O_WRONLY, 0o600), "wb")
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
        self._name = self._beside()
        return open(self._name, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))

    def _beside(self) -> Path:
        return self.path.with_name(f".{secrets.token_hex(8)}.checkpoint")

    def frame(self, kind: int, payload: Any) -> None:
        """Add a frame; `payload` is a bytes-like object. Raises LimitExceeded if the disk is full."""
        view = memoryview(payload).cast("B")
        checksum = self._chain.checksum(kind, view)
        with file_errors(self.path):
            self._file.write(_FRAME.pack(kind, len(view), checksum))
            self._file.write(view)
        self._chain.add(checksum)

    def table(self, batch: Batch) -> None:
        """Add these rows as a frame of `TABLE`. Raises as `frame`."""
        self.frame(TABLE, encoded_table(batch))

    def commit(self) -> None:
        """Write all of the file to disk, and then give it its name. Raises as `frame`."""
        with file_errors(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if self._name is None:
                    name = self._beside()
                    # Python lets linkat follow the link in /proc only if a directory's descriptor is given.
                    os.link(
                        f"/proc/self/fd/{self._file.fileno()}", name.name, dst_dir_fd=directory, follow_symlinks=True
                    )
                    self._name = name
                os.replace(self._name, self.path)
                self._name = None
                os.fsync(directory)
            finally:
                os.close(directory)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the disk may still be full
            self._file.close()
        if self._name is not None:
            self._name.unlink(missing_ok=True)


def encoded_table(batch: Batch) -> Any:
    """The payload of a frame of `TABLE` with these rows."""
    from dataplane.batch import arrow_in  # pyarrow is heavy, and needed only for tables

    return arrow_in.encode_table(batch.to_arrow())


class CheckpointReader:
    """Reads one file. A context manager. Must be used by one thread at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open the file. Raises Misuse if it cannot be read, Corrupt if it is no checkpoint of this format."""
        self.path = Path(path)
        with file_errors(self.path):
            self._file = open(self.path, "rb")  # noqa: SIM115 closed by this object's own `__exit__`
            self._left = os.fstat(self._file.fileno()).st_size
            self.size = self._left
        try:
            self._begin()
        except BaseException:
            self._file.close()
            raise

    def _begin(self) -> None:
        if self.size < len(MAGIC) or self._read(len(MAGIC)) != MAGIC:
            raise self.corrupt("is no checkpoint, or one of another version", 0)
        self._chain = _Chain()
        kind, self.id = self.frame()
        if kind != START or len(self.id) != _ID:
            raise self.corrupt("does not begin with its id", len(MAGIC))

    @property
    def offset(self) -> int:
        """The offset of the next unread byte."""
        return self.size - self._left

    def corrupt(self, what: str, offset: int | None = None) -> Corrupt:
        """The error about this file, at this offset, or at the end of the part read so far."""
        at = self.offset if offset is None else offset
        return Corrupt(f"{self.path} {what} (at byte {at})", path=str(self.path))

    def _read(self, count: int) -> bytes:
        if count > self._left:
            raise self.corrupt("was cut short")
        with file_errors(self.path):
            data = self._file.read(count)
        if len(data) != count:
            raise self.corrupt("was cut short")
        self._left -= count
        return data

    def frame(self) -> tuple[int, bytes]:
        """Read the next frame. Returns its kind and payload. Raises Corrupt."""
        begin, number = self.offset, self._chain.frames
        kind, nbytes, checksum = _FRAME.unpack(self._read(_FRAME.size))
        payload = self._read(nbytes)
        if self._chain.checksum(kind, memoryview(payload)) != checksum:
            raise self.corrupt(f"was changed: its frame {number} is not the one that was written there", begin)
        self._chain.add(checksum)
        return kind, payload

    def table(self) -> Any:
        """Read the next frame as an Arrow table. Raises Corrupt, also if it is no `TABLE`."""
        from dataplane.batch import arrow_in  # as in `encoded_table`

        at = self.offset
        kind, payload = self.frame()
        if kind != TABLE:
            raise self.corrupt("lacks a table", at)
        try:
            return arrow_in.decode_table(payload)
        except Corrupt as error:
            raise self.corrupt(f"has {error}", at) from error

    def columns(self) -> dict[str, Values]:
        """Read the next frame as columns by name. Raises Corrupt, also if it is no `TABLE`."""
        from dataplane.batch import arrow_in  # as in `encoded_table`

        try:
            return dict(arrow_in.columns_of(self.table(), checked=True))
        except SchemaMismatch as error:
            raise self.corrupt(f"has an invalid table of rows: {error}") from error

    @property
    def ended(self) -> bool:
        """Whether all frames have been read."""
        return not self._left

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

"""The file of a checkpoint: frames, each with its length and checksum, and one at the end that says all are there.

    magic (16 bytes) | frame | frame | ... | the end
    frame: kind (8 bytes) | bytes of the payload (8) | xxh3-64 of kind and payload (8) | payload

Numbers are little-endian. A frame of `TABLE` is an Arrow IPC stream, which other programs can read; the others are
MessagePack. Nothing in it is ever unpickled.

What always holds: the file is under its name once all of it is on the disk, and not before; what takes its place stays
until then; a writer that dies leaves nothing, where the file system has files without names (O_TMPFILE; NFS has not).
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import xxhash

from dataplane.errors import Corrupt, LimitExceeded, Misuse

MAGIC = b"dataplane/strm\x01\n"
HEAD, BLOCK, COLUMNS, TABLE, END = range(1, 6)

_FRAME = struct.Struct("<QQQ")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointWriter:
    """Writes one file. A context manager: left without `commit`, nothing is there. For one thread at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises Misuse where no file can be written there."""
        self.path = Path(path)
        self._name: Path | None = None  # of a file that has one, before it gets its own
        with _typed(self.path):
            if self.path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            self._file = self._open()
            self._file.write(MAGIC)

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
        """Add a frame; `payload` is bytes, or what has them. Raises LimitExceeded where the disk is full."""
        view = memoryview(payload).cast("B")
        with _typed(self.path):
            self._file.write(_FRAME.pack(kind, len(view), _checksum(kind, view)))
            self._file.write(view)

    def commit(self) -> None:
        """Put the file on the disk and under its name. Raises as `frame`."""
        with _typed(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())
            directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if self._name is None:
                    name = self._beside()
                    # With a directory's descriptor, since only then Python has the link followed to the file.
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
        with suppress(OSError):  # of a disk that is full, again
            self._file.close()
        if self._name is not None:
            self._name.unlink(missing_ok=True)


class CheckpointReader:
    """Reads one file. A context manager. For one thread at a time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises Misuse where there is no file to be read, Corrupt where it is no checkpoint."""
        self.path = Path(path)
        with _typed(self.path):
            self._file = open(self.path, "rb")  # noqa: SIM115 it is this object's, which is a context manager
            self._left = os.fstat(self._file.fileno()).st_size
            self.size = self._left
        try:
            if self._read(len(MAGIC)) != MAGIC:
                raise self.corrupt("is no checkpoint of a stream, or one of another version")
        except BaseException:
            self._file.close()
            raise

    def corrupt(self, what: str) -> Corrupt:
        """The error that says so of this file."""
        return Corrupt(f"{self.path} {what}", path=str(self.path))

    def _read(self, count: int) -> bytes:
        if count > self._left:
            raise self.corrupt("was cut short")
        with _typed(self.path):
            data = self._file.read(count)
        if len(data) != count:
            raise self.corrupt("was cut short")
        self._left -= count
        return data

    def frame(self) -> tuple[int, bytes]:
        """The next frame: its kind and payload. Raises Corrupt."""
        kind, nbytes, checksum = _FRAME.unpack(self._read(_FRAME.size))
        payload = self._read(nbytes)
        if _checksum(kind, memoryview(payload)) != checksum:
            raise self.corrupt(f"was changed, in the {nbytes} bytes before {self.size - self._left}")
        return kind, payload

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return not self._left

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _checksum(kind: int, payload: memoryview) -> int:
    state = xxhash.xxh3_64(kind.to_bytes(8, "little"))
    state.update(payload)
    return state.intdigest()


@contextmanager
def _typed(path: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # a name that no system has
        raise Misuse(f"{str(path)!r} can not be a file: {error}") from None
    except OSError as error:
        if error.errno in _FULL:
            what = f"bytes on the disk of {path}"
            raise LimitExceeded(f"the checkpoint {path} does not fit: {error.strerror}", what=what) from None
        if error.errno == errno.EIO:
            raise Corrupt(f"{path} can not be read or written: {error.strerror}", path=str(path)) from None
        raise Misuse(f"{path} can not be read or written: {error.strerror}") from None

"""Errors of the file system as those of this package."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dataplane.errors import Corrupt, LimitExceeded, Misuse

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Raises LimitExceeded if the disk is full, Corrupt if it fails, and Misuse if there can be no such file."""
    try:
        yield
    except ValueError as error:  # an invalid name
        raise Misuse(f"{str(path)!r} can not be a file: {error}") from None
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in _FULL:
            raise LimitExceeded(f"{path} does not fit: {why}", what=f"bytes on the disk of {path}") from None
        if error.errno == errno.EIO:
            raise Corrupt(f"{path} can not be read or written: {why}", path=str(path)) from None
        if error.errno == errno.ENOENT and not path.parent.exists():
            why = f"there is no directory {path.parent}"
        raise Misuse(f"{path} can not be read or written: {why}") from None

"""A directory that belongs to one living process, and is removed by the next one once that process is dead.

The claim is a lock on the directory itself (flock on its descriptor), which the kernel drops however the process
ends. What always holds: a directory whose lock can be had belongs to nobody. Making one and sweeping the dead ones
beside it happen under a lock on their parent, so that no sweep meets a directory which is not locked yet. No lock
files, so nothing is left that somebody would have to know about.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from pathlib import Path

_ATTEMPTS = 100


class Claim:
    """A claimed directory. `release` removes it with all that is in it."""

    def __init__(self, parent: Path, prefix: str) -> None:
        """Claim a new directory `parent/prefix-...`, mode 0700, and remove those of dead processes beside it.

        Raises OSError where the parent cannot be made or written.
        """
        self.reclaimed = 0
        """How many directories of dead processes were removed."""
        self._lock: int | None = None
        self.path = parent / f"{prefix}-{secrets.token_hex(4)}"
        for attempt in range(_ATTEMPTS):
            try:
                parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._claim(parent, prefix)
                break
            except (FileNotFoundError, FileExistsError):
                # The parent went with the last that used it, as we came; `mkdir` calls what has gone since a file.
                if attempt == _ATTEMPTS - 1:
                    raise
        if self._lock is None:
            raise OSError(f"{self.path} was locked by another process as it was made")

    def _claim(self, parent: Path, prefix: str) -> None:
        gate = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(gate, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(gate), os.stat(parent)):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(parent))
            self._sweep(parent, prefix)
            self.path.mkdir(mode=0o700)
            self._lock = _try_lock(self.path)
        finally:
            os.close(gate)

    def _sweep(self, parent: Path, prefix: str) -> None:
        for path in parent.glob(f"{prefix}-*"):
            try:
                if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
                    continue
                lock = _try_lock(path)
            except FileNotFoundError:  # its owner has just released it
                continue
            if lock is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
                self.reclaimed += 1

    def release(self) -> None:
        """Remove the directory and let go of it. Idempotent."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = None


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor

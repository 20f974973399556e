"""A directory that belongs to one living process. Once that process is dead, the next claim beside it removes it.

The claim is a lock on the directory itself (flock on its descriptor), which the kernel releases however the process
ends. Invariants:

- a directory whose lock is free has no owner;
- nothing blocks: the only lock taken is on a directory of mode 0700 that this user owns, and without waiting. Every
  user may be able to write to the parent, as to /var/tmp, so it is neither locked nor trusted: its entries are opened
  relative to a descriptor, without following links, and checked before they are touched;
- a directory that was just created and is not locked yet may be removed like that of a dead process. Its creator finds
  the directory locked or gone, and creates another;
- parent directories that had to be created are removed with the directory, if nothing else is in them.

There are no lock files, so nothing is left behind. Rejected: a lock on the parent during the creation, which any user
of the host could hold forever.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

_ATTEMPTS = 1000  # each concurrent claim can fail one attempt
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryClaim:
    """A claimed directory. `release` removes it with its content."""

    def __init__(self, parent: Path, prefix: str, *, remedy: str = "choose another directory") -> None:
        """Claim a new directory `parent/prefix-...`, mode 0700, and remove those of dead processes beside it.

        Raises OSError, with the advice `remedy`, if the parent cannot be created or written.
        """
        self._lock: int | None = None
        self._parent: int | None = None
        self._above: list[Path] = []  # parents created for the directory, the innermost first
        self._prefix = prefix
        self._names = re.compile(re.escape(prefix) + "-[0-9a-f]{8}")
        try:
            opened, name, self._lock = self._made(parent)
        except OSError as error:
            if self._parent is not None:
                os.close(self._parent)
            self._remove_above()
            why = f"{error.strerror}{_owner(parent)}; {remedy}"
            raise OSError(error.errno, f"no directory can be made in {parent}: {why}") from None
        self.path = parent / name
        mode = os.fstat(opened).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            log.warning("any user can delete files in %s: set its sticky bit (chmod +t), or %s", parent, remedy)

    @property
    def descriptor(self) -> int:
        """The descriptor of the open directory. Names relative to it are found even if the directory was moved."""
        assert self._lock is not None, "it was released"
        return self._lock

    def _made(self, parent: Path) -> tuple[int, str, int]:
        """The opened parent, created if necessary, and the name and lock of a new directory in it."""
        for _ in range(_ATTEMPTS):
            self._above += [path for path in _missing(parent) if path not in self._above]
            try:
                _make_parent(parent)
                opened = self._parent = os.open(parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
                self._sweep(opened)
                return opened, *self._make(opened)
            except FileNotFoundError:  # the process that made the parent has removed it meanwhile
                if self._parent is not None:
                    os.close(self._parent)
                self._parent = None
        raise FileNotFoundError(errno.ENOENT, f"it was removed {_ATTEMPTS} times as it was made")

    def _make(self, parent: int) -> tuple[str, int]:
        """A new directory in the parent, locked. Raises FileNotFoundError if the parent is gone."""
        for _ in range(_ATTEMPTS):
            name = f"{self._prefix}-{secrets.token_hex(4)}"
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
                lock = _try_lock(parent, name)
            except FileNotFoundError:
                if not os.fstat(parent).st_nlink:
                    raise
                continue  # a sweep was quicker
            except FileExistsError:
                continue
            except OSError:
                with suppress(OSError):
                    os.rmdir(name, dir_fd=parent)
                raise
            if lock is not None:
                if _is(lock, parent, name):
                    return name, lock
                os.close(lock)
        raise FileExistsError(errno.EEXIST, f"{_ATTEMPTS} of them were removed as they were made")

    def _sweep(self, parent: int) -> None:
        """Remove the directories of dead processes. Failures are left to the next process."""
        try:
            listing = os.open(".", _OPEN, dir_fd=parent)
        except OSError:  # writable but not readable
            return
        try:
            names = [name for name in os.listdir(listing) if self._names.fullmatch(name)]
        except OSError:
            return
        finally:
            os.close(listing)
        for name in names:
            try:
                lock = _try_lock(parent, name)
            except OSError:  # its owner has just released it, or it is no directory, or another user's
                continue
            if lock is not None:
                shutil.rmtree(name, ignore_errors=True, dir_fd=parent)
                os.close(lock)

    def release(self) -> None:
        """Remove the directory and release the lock. Idempotent. Files that cannot be removed are left to the next
        process."""
        lock, parent = self._lock, self._parent
        self._lock = self._parent = None
        if lock is None or parent is None:
            return
        try:
            _empty(lock)
            if _is(lock, parent, self.path.name):
                os.rmdir(self.path.name, dir_fd=parent)
        except OSError as error:
            log.warning("removing %s failed: %s; the next node that starts there removes it", self.path, error.strerror)
        finally:
            os.close(lock)
            os.close(parent)
        self._remove_above()

    def _remove_above(self) -> None:
        """Remove the parent directories that were created together with this directory and are empty."""
        above, self._above = self._above, []
        with suppress(OSError):
            for path in above:
                path.rmdir()


def _make_parent(parent: Path) -> None:
    """Create the directory and its parents unless it exists. Raises FileNotFoundError if another process removed it
    meanwhile."""
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:  # also raised if it is removed between the attempt and a second look
        mode = os.lstat(parent).st_mode
        if not stat.S_ISDIR(mode) and not (stat.S_ISLNK(mode) and parent.is_dir()):
            raise
        raise FileNotFoundError(errno.ENOENT, "it was removed and made again") from None


def _missing(directory: Path) -> list[Path]:
    """The directory and its parents, as far as they do not exist, the innermost first."""
    return [path for path in (directory, *directory.parents) if not os.path.lexists(path)]


def _try_lock(parent: int, name: str) -> int | None:
    """Open and lock the directory. Returns its descriptor; None if another process has the lock. Raises OSError, and
    changes nothing, if `name` is no directory of this user."""
    descriptor = os.open(name, _OPEN, dir_fd=parent)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(f"{name} is another user's")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _is(descriptor: int, parent: int, name: str) -> bool:
    """Whether `name` in the directory `parent` is the directory that is open as `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(name, dir_fd=parent, follow_symlinks=False))
    except OSError:
        return False


def _empty(directory: int) -> None:
    for name in os.listdir(directory):
        try:
            os.unlink(name, dir_fd=directory)
        except IsADirectoryError:
            shutil.rmtree(name, ignore_errors=True, dir_fd=directory)
        except FileNotFoundError:
            pass


def _owner(parent: Path) -> str:
    """The owner of the directory, if the ownership is probably the reason why it cannot be written."""
    try:
        owner = os.stat(parent).st_uid
    except OSError:
        return ""
    return "" if owner in (0, os.geteuid()) else f" (it is user {owner}'s)"

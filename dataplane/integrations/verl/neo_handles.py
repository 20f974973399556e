"""`Handle`: where a value of a NeoProto is, and which process frees it. It is the `dataptr` of verl's `Ref`.

The trainer's process owns each value that it has a handle of. Another process owns what it put until it passes the
handle on, which is how the value comes to the trainer; what it was passed itself, it borrows. An owner frees the value
once its last handle of it is gone. So what the trainer has dropped is free, wherever it was put, and no process counts
what others have.

Invariants: a process has one handle of a value; a handle that borrows frees nothing.

Rejected: Ray's references as the handles' owners, since Ray does not tell a process outside its own object store when
the last one goes; links of the plane for each process (`Plane.retain`), a message for each that passes a batch on.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.integrations.freeing import Watch
from dataplane.integrations.process import plane as plane_of_process
from dataplane.integrations.verl.columns import Columns, Kind

_lock = threading.RLock()  # a finalizer may run where it is held
_known: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
_home = 0
"""The process that owns what it has: this one, or a parent of it that this one was forked from."""


def make_home() -> None:
    """This process is the trainer's."""
    global _home
    _home = os.getpid()


def is_home() -> bool:
    """Whether this process is the trainer's."""
    return _home == os.getpid()


@dataclass(frozen=True, slots=True)
class Form:
    """How a value is made of what is stored: the one column, or, where `single`, the one row of it."""

    name: str
    kind: Kind
    single: bool


class Handle:
    """Where one value is: rows of one column. Make one with `own`."""

    __slots__ = ("__weakref__", "_watch", "form", "ref", "uid")

    def __init__(self, uid: str, ref: BatchRef, form: Form) -> None:
        self.uid = uid
        self.ref = ref
        self.form = form
        self._watch: Watch | None = None

    @property
    def columns(self) -> Columns:
        """What is stored, as `storing.load` takes it."""
        kind = self.form.kind
        return Columns(self.ref, {self.form.name: kind}, len(self.ref), kind == "tensor")

    @property
    def owned(self) -> bool:
        """Whether this process frees the value."""
        return self._watch is not None

    def own(self) -> Handle:
        """Free the value once this handle is gone. Idempotent."""
        with _lock:
            _known[self.uid] = self
            if self._watch is None:
                self._watch = Watch(self.ref, [self])
        return self

    def disown(self) -> None:
        """The value is another process's to free."""
        with _lock:
            if self._watch is not None:
                self._watch.cancel()
            self._watch = None

    def release(self) -> None:
        """Free the value now, for all that have it, if this process owns it. Raises PeerUnavailable."""
        with _lock:
            owned = self.owned
            self.disown()
        if owned:
            plane_of_process().free(self.ref)

    def __deepcopy__(self, memo: Any) -> Handle:
        return self

    def __copy__(self) -> Handle:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if not is_home():
            self.disown()
        return _received, (self.uid, self.ref.encode(), self.form.name, self.form.kind, self.form.single)


def _received(uid: str, ref: bytes, name: str, kind: Kind, single: bool) -> Handle:
    from dataplane.integrations.verl import neo

    neo.attach()
    with _lock:
        handle = _known.get(uid)
        if handle is None:
            handle = _known[uid] = Handle(uid, BatchRef.decode(ref), Form(name, kind, single))
    return handle.own() if is_home() else handle

"""`Handle`: the location of a value of a NeoProto, and the process that frees it. It is the `dataptr` of verl's `Ref`.

The trainer's process owns each value that it has a handle of. Another process owns what it put until it passes the
handle on, by which the value reaches the trainer; a handle that it got is borrowed. An owner frees the value when its
last handle of it is gone. So values that the trainer has dropped are freed, wherever they were put, and no process
counts the handles of others.

Invariants: a process has one handle of a value; a borrowed handle frees nothing.

Rejected: Ray's references as the owners of handles, because Ray does not tell a process outside its own object store
when the last one is gone; a link of the plane for each process (`Plane.retain`), which costs a message for each
process that passes a batch on.
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
"""The process that owns its values: this one, or the parent that it was forked from."""


def make_home() -> None:
    """Make this process the trainer's."""
    global _home
    _home = os.getpid()


def is_home() -> bool:
    """Whether this process is the trainer's."""
    return _home == os.getpid()


@dataclass(frozen=True, slots=True)
class Form:
    """How a value is made of stored rows: the one column, or, with `single`, the one row of it."""

    name: str
    kind: Kind
    single: bool


class Handle:
    """The location of one value: rows of one column. Create it with `own`."""

    __slots__ = ("__weakref__", "_watch", "form", "ref", "uid")

    def __init__(self, uid: str, ref: BatchRef, form: Form) -> None:
        self.uid = uid
        self.ref = ref
        self.form = form
        self._watch: Watch | None = None

    @property
    def columns(self) -> Columns:
        """The stored columns, as `proto_columns.load` takes them."""
        kind = self.form.kind
        return Columns(self.ref, {self.form.name: kind}, len(self.ref), kind == "tensor")

    @property
    def owned(self) -> bool:
        """Whether this process frees the value."""
        return self._watch is not None

    def own(self) -> Handle:
        """Free the value when this handle is gone. Idempotent."""
        with _lock:
            _known[self.uid] = self
            if self._watch is None:
                self._watch = Watch(self.ref, [self])
        return self

    def disown(self) -> None:
        """Leave the value to another process."""
        with _lock:
            if self._watch is not None:
                self._watch.cancel()
            self._watch = None

    def release(self) -> None:
        """Free the value now, for all processes, if this process owns it. Raises PeerUnavailable."""
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

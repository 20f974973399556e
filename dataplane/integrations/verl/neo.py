"""`DataplaneStorageEngine`: the storage engine of verl's NeoProto on the plane. Needs verl's `neo` branch.

    set_default_storage_engine(DataplaneStorageEngine())

A value is the rows of one column. Rows are selected before they are read, so a rank receives only its share. Slices of
tokens and verl's own operations (`Ref.apply_funcs`) are applied to the rows after the read. Values with the same number
of rows that are put together are one put.

Invariants: a value is returned as it was put, on the CPU; later writes to it, or to a copy that was read, do not change
what other readers get. Nothing is pickled: an unsupported value raises SchemaMismatch with the name of its field. A
process has one `Handle` of a value, the `dataptr` of verl's `Ref`; a borrowed handle frees nothing.

The trainer's process owns each value of which it has a handle. Any other process owns a value that it has put until it
passes the handle on, by which the value reaches the trainer; a handle that it received is borrowed. An owner frees the
value when its last handle of the value is gone. So values that the trainer has dropped are freed, no matter where they
were put, and no process counts the handles of others.

Rejected: Ray's references as the owners of handles, because Ray reports the end of the last one only within its own
object store; an owner for each process (`Plane.retain`), which costs a message for each process that passes a batch on.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from verl.experimental.neoproto import neo as theirs
from verl.experimental.neoproto.storage import default as defaults
from verl.experimental.neoproto.storage.engine import Ref, _BaseStorageEngine, _infer_dtype, _infer_shape

from dataplane.batch.ref import BatchRef
from dataplane.batch.tensors import is_tensor
from dataplane.client.ownership import ending_scope
from dataplane.errors import Misuse
from dataplane.integrations.process import Watch
from dataplane.integrations.process import plane as plane_of_process
from dataplane.integrations.verl.columns import Kind, ProtoColumns, concatenated, load, store

BACKEND = "dataplane"

_TIMEOUT_S = 60.0


class DataplaneStorageEngine(_BaseStorageEngine):  # type: ignore[misc]  # verl has no types
    """The engine of a process; all engines of one process are equal."""

    backend = BACKEND

    def __init__(self, *, home: bool = True) -> None:
        """home: whether this process is the trainer's, which owns the values that it gets; other processes own the
        values they put until they pass them on."""
        if home:
            make_home()
        self._local = defaults.InMemoryStorageEngine()
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    # Putting

    def put(self, value: Any, *, key_hint: str | None = None, spec: Any = None, backend: str | None = None) -> Ref:
        """Store a value; `backend="local"`: in the reference itself.

        Raises SchemaMismatch for an unsupported value, Misuse if no node is known, and as `Plane.put`.
        """
        if backend == "local":
            return self._local.put(value, key_hint=key_hint, spec=spec)
        (ref,) = self._put([value], key_hint, spec)
        return ref

    def put_many(self, values: Iterable[Any], *, key_hint: str | None = None, spec: Any = None) -> list[Ref]:
        """As `put`, for several values: all or none. Values of equal length are one put."""
        return self._put(list(values), key_hint, spec)

    def _put(self, values: Sequence[Any], key_hint: str | None, spec: Any) -> list[Ref]:
        groups: dict[int, list[int]] = {}
        rows = [_rows(value) for value in values]
        for at, (count, _) in enumerate(rows):
            groups.setdefault(count, []).append(at)
        refs: list[Any] = [None] * len(values)
        made: list[Handle] = []
        try:
            for count, places in groups.items():
                stored = self._store([(values[at], rows[at][1]) for at in places], count, key_hint or "value")
                made += stored
                for at, handle in zip(places, stored, strict=True):
                    refs[at] = self._ref(handle, values[at], spec)
        except BaseException:
            for handle in made:
                handle.release()
            raise
        return refs

    def _store(self, values: Sequence[tuple[Any, bool]], rows: int, hint: str) -> list[Handle]:
        """One put of values of this many rows, each with a flag for a value that is one row."""
        names = [hint] if len(values) == 1 else [f"{hint}/{number}" for number in range(len(values))]
        tensors, others = {}, {}
        for name, (value, single) in zip(names, values, strict=True):
            if is_tensor(value):
                tensors[name] = value.detach()[None] if single else value.detach()
            else:
                others[name] = _one(value) if single else value
        scope = ending_scope("neo") if is_home() else None  # the trainer's puts are freed with it
        columns = store(plane_of_process(), tensors, others, rows, scope=scope, timeout=_TIMEOUT_S)
        handles = []
        for name, (_, single) in zip(names, values, strict=True):
            own = columns.select([name])
            assert own.ref is not None, "it has a column"
            handles.append(Handle(secrets.token_hex(16), own.ref, Form(name, own.kinds[name], single)).own())
        return handles

    def _ref(self, handle: Handle, value: Any, spec: Any) -> Ref:
        shape = (len(value), *[None] * (value.dim() - 1)) if _is_nested(value) else _infer_shape(value, spec)
        return Ref(self.backend, handle.uid, handle, _infer_dtype(value, spec), shape)

    # Getting

    def get(self, ref: Ref) -> Any:
        """Read the value. Returns it after the slices and operations of the reference. Raises as `Plane.get`."""
        if ref.backend == "local":
            return self._local.get(ref)
        (value,) = self._get([ref], None, ops=True)
        return value

    def get_many(self, refs: list[Ref], apply_ops: bool = True) -> list[Any]:
        """As `get`, for several; None for None. `apply_ops`: whether slices and operations are applied.

        References to one row each are read together.
        """
        values: list[Any] = [None] * len(refs)
        there = [at for at, ref in enumerate(refs) if ref is not None and ref.backend != "local"]
        for at, value in zip(there, self._get([refs[at] for at in there], None, ops=apply_ops), strict=True):
            values[at] = value
        for at, ref in enumerate(refs):
            if ref is not None and ref.backend == "local":
                values[at] = self._local.get(ref)
        return values

    def get_rows(self, ref: Ref, rows: Any) -> Any:
        """These rows of the value; only they are read. Raises as `Plane.get`."""
        (value,) = self.get_rows_many([ref], rows)
        return value

    def get_rows_many(self, refs: list[Ref], rows: Any) -> list[Any]:
        """As `get_rows`, for several values."""
        taken = [None if ref.backend == "local" else ref for ref in refs]
        values = self._get([ref for ref in taken if ref is not None], np.asarray(rows), ops=True)
        found = iter(values)
        return [_index(self._local.get(ref), rows) if ref.backend == "local" else next(found) for ref in refs]

    def _get(self, refs: Sequence[Ref], rows: Any, *, ops: bool) -> list[Any]:
        plans = [_Plan(ref, rows, ops=ops) for ref in refs]
        return [plan.finish(value) for plan, value in zip(plans, _read(plans), strict=True)]

    # Stored values, and their lifetimes

    def consolidate(self, old_engine: Any, refs: list[Ref]) -> Ref:
        """Store one value with the rows of several values in this engine. Raises as `get` and `put`."""
        return self.put(theirs._concat_if_possible(old_engine.get_many(refs)))

    def release(self, refs: Ref | list[Ref]) -> None:
        """Drop one count of each value, and free the values whose count is 0. A borrowed value is freed by its
        owner."""
        for ref in [refs] if isinstance(refs, Ref) else refs:
            if ref is None:
                continue
            if ref.backend == "local":
                self._local.release(ref)
                continue
            with self._lock:
                count = self._counts.pop(ref.uid, 0)
                if count > 1:
                    self._counts[ref.uid] = count - 1
            if not count:
                ref.dataptr.release()

    discard = release

    def add_ref_counts(self, refs: list[Ref]) -> None:
        """Add one count to each value."""
        self._local.add_ref_counts([ref for ref in refs if ref is not None and ref.backend == "local"])
        with self._lock:
            for ref in refs:
                if ref is not None and ref.backend != "local":
                    self._counts[ref.uid] = self._counts.get(ref.uid, 0) + 1

    def to_wire(self, value: Any) -> Any:
        """The value unchanged: a put takes tensors."""
        return value

    def from_wire(self, value: Any) -> Any:
        """The value unchanged: a get returns tensors."""
        return value


class _Plan:
    """The rows to read of a value, and the operations to apply then."""

    def __init__(self, ref: Ref, rows: Any, *, ops: bool) -> None:
        handle = ref.dataptr
        if not isinstance(handle, Handle):
            raise Misuse(f"a reference of backend {ref.backend!r} is none of the plane's: {type(handle).__name__}")
        self._ref = ref
        self._ops = ops
        self._slices: tuple[Any, ...] = _narrowed(ref) if ops else ()
        self._rows = rows
        self.form = handle.form
        self.columns = handle.columns
        if not self.form.single:
            self._push()

    def _push(self) -> None:
        """Select rows by the reference rather than of the value. Selections of rows and of other axes commute."""
        if self._slices and isinstance(self._slices[0], slice) and (self._slices[0].step or 1) > 0:
            first, *rest = self._slices
            self.columns, self._slices = self.columns.take(first), (None, *rest)
        whole = not self._slices or self._slices[0] is None
        if self._rows is not None and whole and not (self._ops and self._ref.apply_funcs):
            self.columns, self._rows = self.columns.take(self._rows), None

    def finish(self, value: Any) -> Any:
        """The requested value, from the rows that were read."""
        if self.form.single:
            value = value[0]
        if self._ops:
            if any(each is not None for each in self._slices):
                value = _BaseStorageEngine.apply_slice(value, self._slices)
            value = self._ref.apply_ops(value)
        return value if self._rows is None else _index(value, self._rows)


def _read(plans: Sequence[_Plan]) -> list[Any]:
    """The rows of each value, as they were put. Single rows of alike columns, as those of samples, are one read, and
    so are values with the same number of rows."""
    values: list[Any] = [None] * len(plans)
    samples: dict[Any, list[int]] = {}
    several: dict[int, list[int]] = {}
    for at, plan in enumerate(plans):
        ref, form = plan.columns.ref, plan.form
        if plan.columns.rows == 1 and ref is not None:
            samples.setdefault((form.kind, repr(ref.schema[form.name])), []).append(at)
        else:
            several.setdefault(plan.columns.rows, []).append(at)
    for places, read in [
        *((places, _one_below) for places in samples.values()),
        *((p, _beside) for p in several.values()),
    ]:
        for at, value in zip(places, read([plans[at].columns for at in places]), strict=True):
            values[at] = value
    return values


def _one_below(several: Sequence[ProtoColumns]) -> list[Any]:
    """The one row of each, read as rows of one column."""
    value = _load(concatenated([each.rename(dict.fromkeys(each.kinds, "value")) for each in several]))["value"]
    return [value[row : row + 1] for row in range(len(several))]


def _beside(several: Sequence[ProtoColumns]) -> list[Any]:
    """The one column of each, read as columns of one batch."""
    beside = ProtoColumns(rows=several[0].rows, tensors=several[0].tensors)
    for number, each in enumerate(several):
        beside = beside.beside(each.rename({name: str(number) for name in each.kinds}))
    found = _load(beside)
    return [found[str(number)] for number in range(len(several))]


def _load(columns: ProtoColumns) -> dict[str, Any]:
    tensors, others = load(plane_of_process(), columns, timeout=_TIMEOUT_S)
    return {**({} if tensors is None else dict(tensors.items())), **others}


def _narrowed(ref: Ref) -> tuple[Any, ...]:
    """The selectors of the reference, None for each that selects a whole axis, which `Ref` stores as a full slice."""
    selectors = tuple(ref.slice_spec or ())
    shape = tuple(ref.shape or ()) if len(ref.shape or ()) == len(selectors) else (None,) * len(selectors)
    return tuple(None if _is_full(one, length) else one for one, length in zip(selectors, shape, strict=True))


def _is_full(selector: Any, length: int | None) -> bool:
    if not isinstance(selector, slice):
        return selector is None
    return selector.start in (None, 0) and selector.step in (None, 1) and selector.stop in (None, length)


def _is_nested(value: Any) -> bool:
    return is_tensor(value) and bool(value.is_nested)


def _rows(value: Any) -> tuple[int, bool]:
    """The number of rows that the value is stored as, and whether it is itself one row."""
    if (is_tensor(value) or isinstance(value, np.ndarray)) and value.ndim:
        return len(value), False
    return 1, True


def _one(value: Any) -> Any:
    """An array with this value as its one row."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return np.asarray(value)[None]
    rows = np.empty(1, object)
    rows[0] = value
    return rows


def _index(value: Any, rows: Any) -> Any:
    """These rows of the value that was read."""
    if is_tensor(value) or isinstance(value, np.ndarray):
        return value[np.asarray(rows)]
    return [value[int(row)] for row in rows]


def attach() -> None:
    """Make the plane the storage engine of this process, unless it has chosen one. Idempotent."""
    if BACKEND in theirs.GLOBAL_ENGINE_DICT:
        return
    engine = DataplaneStorageEngine(home=False)
    chosen = theirs.GLOBAL_ENGINE_DICT.get("default") or defaults._DEFAULT
    if chosen is None or type(chosen) is defaults.DefaultStorageEngine:
        defaults.set_default_storage_engine(engine)
    theirs.GLOBAL_ENGINE_DICT[BACKEND] = engine


_lock = threading.RLock()  # a finalizer may run where it is held
_known: weakref.WeakValueDictionary[str, Handle] = weakref.WeakValueDictionary()
_home = 0
"""The process that owns its values: this one, or the parent that it was forked from."""


def make_home() -> None:
    global _home
    _home = os.getpid()


def is_home() -> bool:
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
    def columns(self) -> ProtoColumns:
        """The stored columns, as `columns.load` takes them."""
        kind = self.form.kind
        return ProtoColumns(self.ref, {self.form.name: kind}, len(self.ref), kind == "tensor")

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
    attach()
    with _lock:
        handle = _known.get(uid)
        if handle is None:
            handle = _known[uid] = Handle(uid, BatchRef.decode(ref), Form(name, kind, single))
    return handle.own() if is_home() else handle

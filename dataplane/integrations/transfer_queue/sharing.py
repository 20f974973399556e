"""Columns into a table, large values that this process has written before as references to what is there.

A table keeps what its rows refer to for as long as one of them needs it, so rows that share a value need no more than
the same reference. What was cleared meanwhile is written anew.

What always holds: a column is a reference as a whole, or stored as a whole: of one some of whose rows are new, equal
rows are stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.batch.values import Values
from dataplane.errors import Freed, OwnerDied
from dataplane.integrations.sharing import Known, keys_of

R = TypeVar("R")

_known: Known[BatchRef] = Known()
_LONGEST_S = 60.0  # that a value is waited for which another thread writes


def write(call: Callable[..., R], columns: Mapping[str, Values] | None) -> R:
    """What `call(columns, dedupe=, stored=)` gives, which writes them to a table. Raises as it does."""
    keys: dict[str, list[bytes | None]] = {}
    seen: dict[int, list[bytes | None] | None] = {}
    for name, values in (columns or {}).items():
        if id(values) not in seen:  # fields may be the same
            seen[id(values)] = keys_of(values, tensors=_tensors(values.field))
        found = seen[id(values)]
        if found is not None:
            keys[name] = found
    if columns is None or not keys:
        return call(columns)
    wanted = [key for several in keys.values() for key in several if key is not None]
    while True:
        with _known.claim(wanted, _LONGEST_S) as known:
            shared = {name: each for name, several in keys.items() if (each := _shared(several, known)) is not None}
            try:
                return _write(call, {**columns, **shared}, keys)
            except (Freed, OwnerDied):
                if not shared:
                    raise
                _known.forget(known)


def _tensors(field: Field) -> bool:
    """Whether each row of such a field is a tensor; see `values`."""
    return all(kind.startswith(("=even", "=ragged")) for kind, _ in field.children)


def _shared(keys: Sequence[bytes | None], known: Mapping[bytes, BatchRef]) -> BatchRef | None:
    """The rows of these values, if all of them are known."""
    refs = [known[key] for key in keys if key is not None and key in known]
    return concat(refs) if len(refs) == len(keys) else None


def _write(call: Callable[..., R], columns: Mapping[str, Any], keys: Mapping[str, Sequence[bytes | None]]) -> R:
    def stored(ref: BatchRef) -> None:
        for name, several in keys.items():
            if not isinstance(columns[name], BatchRef):
                one = ref.select(name).rename({name: "value"})
                _known.learn({key: one[row] for row, key in enumerate(several) if key is not None})

    if all(isinstance(columns[name], BatchRef) for name in keys):
        return call(columns)
    dedupe = [name for name, several in keys.items() if _repeat(several) and not isinstance(columns[name], BatchRef)]
    return call(columns, dedupe=dedupe, stored=stored)


def _repeat(keys: Sequence[bytes | None]) -> bool:
    """Whether two rows have the same value."""
    looked_up = [key for key in keys if key is not None]
    return len(set(looked_up)) < len(looked_up)

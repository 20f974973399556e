"""Columns into a table, large values that this process has written before as references to what is there.

A table keeps what its rows refer to for as long as one of them needs it, so rows that share a value need no more than
the same reference. What was cleared meanwhile is written anew.

Invariants: a column is a reference as a whole, or stored as a whole: of one some of whose rows are new, equal
rows are stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.batch.values import Values
from dataplane.errors import Freed, OwnerDied, PeerUnavailable
from dataplane.integrations.sharing import Known, keys_of

R = TypeVar("R")

Keys = Mapping[str, Sequence[bytes | None]]
"""By field, the key of each row's value, None where it is not looked up; only of fields that have one."""

_known: Known[BatchRef] = Known()
_LONGEST_S = 60.0  # that a value is waited for which another thread writes


def keys(columns: Mapping[str, Values]) -> dict[str, list[bytes | None]]:
    """What the columns' rows are looked up by."""
    found: dict[str, list[bytes | None]] = {}
    seen: dict[int, list[bytes | None] | None] = {}
    for name, values in columns.items():
        if id(values) not in seen:  # fields may be the same
            seen[id(values)] = keys_of(values, tensors=_tensors(values.field))
        own = seen[id(values)]
        if own is not None:
            found[name] = own
    return found


def write(call: Callable[..., R], columns: Mapping[str, Values] | None, known_keys: Keys | None = None) -> R:
    """What `call(columns, dedupe=, stored=)` gives, which writes them to a table. `known_keys`: the columns' `keys`,
    where the caller has them. Raises as it does."""
    if columns is None:
        return call(columns)
    own = keys(columns) if known_keys is None else known_keys
    if not own:
        return call(columns)
    wanted = [key for several in own.values() for key in several if key is not None]
    while True:
        with _known.claim(wanted, _LONGEST_S) as known:
            shared = {name: each for name, several in own.items() if (each := _shared(several, known)) is not None}
            try:
                return _write(call, {**columns, **shared}, own)
            except (Freed, OwnerDied, PeerUnavailable):  # also where who has them is away
                if not shared:
                    raise
                _known.forget(known)


def with_known(call: Callable[[dict[str, BatchRef]], R], keys_: Keys) -> R | None:
    """What `call` gives of references to these columns' rows, if all of their values were written before; None, and it
    was not called, or in vain, where they were not, or are gone."""
    if not keys_:
        return call({})
    wanted = [key for several in keys_.values() for key in several if key is not None]
    with _known.claim(wanted, _LONGEST_S) as known:
        shared: dict[str, BatchRef] = {}
        for name, several in keys_.items():
            found = _shared(several, known)
            if found is None:
                return None
            shared[name] = found
        try:
            return call(shared)
        except (Freed, OwnerDied, PeerUnavailable):
            _known.forget(known)
            return None


def _tensors(field: Field) -> bool:
    """Whether each row of such a field is a tensor; see `values`."""
    return all(kind.startswith(("=even", "=ragged")) for kind, _ in field.children)


def _shared(keys: Sequence[bytes | None], known: Mapping[bytes, BatchRef]) -> BatchRef | None:
    """The rows of these values, if all of them are known."""
    refs = [known[key] for key in keys if key is not None and key in known]
    return concat(refs) if len(refs) == len(keys) else None


def _write(call: Callable[..., R], columns: Mapping[str, Any], keys: Keys) -> R:
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

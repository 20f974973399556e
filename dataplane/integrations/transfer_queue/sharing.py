"""Writes columns to a table; large values that this process has written before become references to the stored rows.

A table keeps the shards that its rows refer to for as long as one of them needs it, so rows that share a value only
need the same reference. Values that were cleared meanwhile are written again.

Invariants: a column is a reference as a whole or stored as a whole; if some of its rows are new, equal rows are
stored once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.batch.values import Values
from dataplane.errors import Freed, OwnerDied, PeerUnavailable
from dataplane.integrations.transfer_queue.known_values import LocationCache, keys_of, keys_of_columns

R = TypeVar("R")

Keys = Mapping[str, Sequence[bytes | None]]
"""For each field the key of each row's value, None for values that are not looked up; only for fields with a key."""

_known: LocationCache[BatchRef] = LocationCache()
_LONGEST_S = 60.0  # the longest wait for another thread's put of a value


def keys(columns: Mapping[str, Values]) -> dict[str, list[bytes | None]]:
    """The keys under which the rows of the columns are looked up."""
    return keys_of_columns(columns, lambda _, values: keys_of(values, tensors=_tensors(values.field)))


def write(call: Callable[..., R], columns: Mapping[str, Values] | None, known_keys: Keys | None = None) -> R:
    """The result of `call(columns, dedupe=, stored=)`, which writes the columns to a table. `known_keys`: the
    columns' `keys` if the caller has them. Raises as `call`."""
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
            except (Freed, OwnerDied, PeerUnavailable):  # also if their holder is away
                if not shared:
                    raise
                _known.forget(known)


def with_known(call: Callable[[dict[str, BatchRef]], R], keys_: Keys) -> R | None:
    """The result of `call` with references for the rows of these columns, if all of their values were written
    before. None if they were not, or are gone: then `call` was not called, or changed nothing."""
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
    """Whether each row of the field is a tensor; see `values`."""
    return all(kind.startswith(("=even", "=ragged")) for kind, _ in field.children)


def _shared(keys: Sequence[bytes | None], known: Mapping[bytes, BatchRef]) -> BatchRef | None:
    """The stored rows of these values, if all of them are known."""
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

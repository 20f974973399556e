"""What goes wrong here, as errors of `dataplane.errors` that code written for TransferQueue catches too.

Each is caught by the name that TransferQueue's own is: ValueError for what is not there, RuntimeError for what did not
come in time, StorageKeyNotFoundError (a KeyError) for rows that were cleared between a look and a read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dataplane.errors import Freed, Misuse, NotReady


class _Whole:
    """An error that comes out of a pickle as the class that went in: `dataplane.errors` knows only its own."""

    fields: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.fields), (Exception.__str__(self),)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return Exception.__str__(self)  # type: ignore[arg-type]  # KeyError's would put it in quotes


class NotThere(_Whole, Misuse, ValueError):
    """A partition, a key or a field that nobody has put."""


class NotStarted(_Whole, Misuse, AssertionError, RuntimeError):
    """`init()` has not been called in this process."""


class NoSampleInTime(_Whole, NotReady, RuntimeError):
    """`get_meta` found too few rows, or its sampler none that it wanted, before the deadline."""


class NoKey(_Whole, Misuse, RuntimeError):
    """A global index that has no key of the user's."""


class StorageKeyNotFoundError(_Whole, Freed, KeyError):
    """Rows were cleared after they had been looked up."""

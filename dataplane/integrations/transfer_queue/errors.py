"""Errors of `dataplane.errors` that code written for TransferQueue catches too.

Each has the base class of its counterpart in TransferQueue: ValueError for a missing partition, key, field or setting;
RuntimeError for a timeout; StorageKeyNotFoundError (a KeyError) for rows that were cleared between a lookup and a
read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from dataplane.errors import Freed, Misuse, NotReady


class _Whole:
    """An error that keeps its class when it is unpickled: `dataplane.errors` knows only its own classes."""

    fields: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self.fields), (Exception.__str__(self),)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return Exception.__str__(self)  # type: ignore[arg-type]  # KeyError's would put it in quotes


class NotThere(_Whole, Misuse, ValueError):
    """A partition, a key or a field that does not exist."""


class InvalidSetting(_Whole, Misuse, ValueError):
    """A setting that does not exist, or whose value is invalid."""


class NotStarted(_Whole, Misuse, AssertionError, RuntimeError):
    """`init()` has not been called in this process."""


class NoSampleInTime(_Whole, NotReady, RuntimeError):
    """Before the deadline, `get_meta` found too few rows, or its sampler selected none."""


class NoKey(_Whole, Misuse, RuntimeError):
    """A global index of a row without a key of the user's."""


class StorageKeyNotFoundError(_Whole, Freed, KeyError):
    """Rows were cleared after they had been looked up."""

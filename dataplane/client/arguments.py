"""Checks arguments and converts them to the form of messages. An invalid argument raises `Misuse` with its name. If it
were sent, the node would refuse the message and close the connection."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.batch.field import is_text
from dataplane.config import parse_size
from dataplane.errors import Misuse, SchemaMismatch
from dataplane.stream.settings import MAX_REPLICAS, StreamSettings

TAG_KINDS = (str, int, float, bool, type(None))
GROUP_KINDS = (str, int, type(None))


def seconds(value: Any, default: float | None = None, what: str = "a timeout") -> float:
    """A duration in seconds; 0 for a negative one, `default` for None. Raises Misuse."""
    if type(value) is float and value >= 0.0:
        return value
    if value is None and default is not None:
        return default
    fits = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not fits or (isinstance(value, int) and abs(value) >= 1 << 1023) or math.isnan(value):
        raise Misuse(f"{what} is a number of seconds, not {value!r:.100}; leave it out for the default")
    return max(0.0, float(value))


def is_int64(value: Any) -> bool:
    """Whether it is a whole number that a message can hold."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def whole(what: str, value: Any) -> int:
    """The value as an integer of 64 bits. Raises Misuse."""
    value = value.item() if isinstance(value, np.integer) else value
    if not is_int64(value):
        raise Misuse(f"{what} is a whole number, not {value!r}")
    return int(value)


def positive(what: str, value: Any) -> int:
    """A whole number of 1 or more. Raises Misuse."""
    count = whole(what, value)
    if count < 1:
        raise Misuse(f"{what} is 1 or more, not {count}")
    return count


def text(what: str, value: Any) -> str:
    """The value as text of one character or more that a message can hold. Raises Misuse."""
    if not is_text(value) or not value:
        raise Misuse(f"{what} is text of one character or more, not {value!r}")
    return str(value)


def node(value: Any) -> bytes:
    """The id of a member from its name, 16 hexadecimal digits; b"" for None, this host's node. Raises Misuse."""
    if value is None:
        return b""
    try:
        named = bytes.fromhex(text("a node", value))
    except ValueError:
        named = b""
    if len(named) != 8:
        raise Misuse(f"a node is named by 16 hexadecimal digits, which plane.members() lists, not {value!r:.80}")
    return named


def names(what: str, values: Any) -> list[str]:
    """The values as a list of texts. Raises Misuse."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise Misuse(f"{what} is a list of names, not {values!r}")
    return [text(f"each name in {what}", value) for value in values]


def listed(what: str, values: Any) -> list[Any]:
    """Several values as a list. Raises Misuse."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise Misuse(f"{what} are a list, not {values!r}")
    return list(values)


def keys_of(values: Sequence[str] | None, rows: int) -> list[str]:
    """The keys of rows, one text for each row; empty if none are given. Raises Misuse."""
    if values is None:
        return []
    listed = _each("keys", values if not isinstance(values, str) else [values], rows)
    for value in listed:
        if not is_text(value):
            raise Misuse(f"keys are texts, one a row, not {value!r}")
    return listed


def plain(what: str, values: Any, rows: int, kinds: tuple[type, ...]) -> list[Any]:
    """One value a row, each of one of these kinds and such that a message can hold it. Raises Misuse."""
    if is_int64(values) and int in kinds:
        return [values] * rows
    listed = _each(what, values, rows)
    found = set(map(type, listed))
    if not found <= set(kinds):
        odd = next(value for value in listed if type(value) not in kinds)
        named = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise Misuse(f"{what} is {named}, one value for all rows or a list with one a row; not {odd!r:.80}")
    for kind, fits in ((int, is_int64), (str, is_text)):
        for value in listed if kind in found and kind in kinds else ():
            if type(value) is kind and not fits(value):
                raise Misuse(f"{what} can not be {value!r}: it fits no message")
    return listed


def groups_of(values: Any, rows: int) -> list[Any]:
    """The groups of rows, None for a row without one; empty if no row has one. Raises Misuse."""
    if values is None:
        return []
    listed = plain("group", values, rows, GROUP_KINDS)
    return listed if any(each is not None for each in listed) else []


def tagged(tags: Any, rows: int) -> dict[str, list[Any]]:
    """By tag, a value a row. Raises Misuse."""
    if tags is None:
        return {}
    if not isinstance(tags, Mapping):
        raise Misuse(
            "tags are a dict by name, with one value for all rows or a list with one a row, such as"
            f" {{'hard': [True, False]}}; not {type(tags).__name__}"
        )
    for name in tags:
        text("a tag's name", name)
    return {name: plain(f"tag {name!r}", values, rows, TAG_KINDS) for name, values in tags.items()}


def _each(what: str, values: Any, rows: int) -> list[Any]:
    """One value for each row: the given ones, or a single value repeated. Raises Misuse."""
    if isinstance(values, str | int | float | np.generic):
        return [values.item() if isinstance(values, np.generic) else values] * rows
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise Misuse(f"{what} is one value a row or one for all, not {type(values).__name__}")
    listed = [value.item() if isinstance(value, np.generic) else value for value in values]
    if len(listed) != rows:
        raise Misuse(f"{len(listed)} values of {what} for {rows} rows")
    return listed


def settings(
    tasks: Sequence[str] | None,
    max_bytes: int | str | None,
    max_rows: int | None,
    max_lag: int | None,
    max_deliveries: int | None,
    copies: int | None,
    group_size: int | None,
    durable: bool | None,
) -> StreamSettings | None:
    """The settings of a new stream; None to open an existing one only. Raises Misuse."""
    if tasks is None:
        made = (max_bytes, max_rows, max_lag, max_deliveries, copies, group_size, durable)
        if any(each is not None for each in made):
            raise Misuse("name the tasks too: a stream is made with tasks and limits, and found by its name alone")
        return None
    for what, value, least in (("max_rows", max_rows, 1), ("max_lag", max_lag, 0), ("group_size", group_size, 1)):
        if value is not None and whole(what, value) < least:
            raise Misuse(f"{what} is {least} or more, or None where there is none; not {value!r}")
    size = 0 if max_bytes is None else capacity(max_bytes)
    return StreamSettings(
        tuple(names("tasks", tasks)),
        size,
        0 if max_rows is None else whole("max_rows", max_rows),
        -1 if max_lag is None else whole("max_lag", max_lag),
        5 if max_deliveries is None else whole("max_deliveries", max_deliveries),
        1 if copies is None else replicas(copies),
        0 if group_size is None else whole("group_size", group_size),
        durable=bool(durable),
    )


def check_rows(found: int, rows: int, column: str = "", *, piece: bool = False) -> None:
    """Raise SchemaMismatch if columns with `found` rows are given for `rows` rows. `piece`: whether the columns are a
    piece of an unfinished row."""
    if found != rows:
        if piece:
            message = f"a piece is one row, and these columns have {found} rows: pass the tokens [1, 2] as [[1, 2]]"
        else:
            message = f"the columns have {found} rows, and {rows} {'row is' if rows == 1 else 'rows are'} named"
        raise SchemaMismatch(message, column=column, expected=f"{rows} rows", found=f"{found} rows")


def replicas(value: Any) -> int:
    """The number of hosts that are to store something. Raises Misuse."""
    count = whole("replicas", value)
    if not 1 <= count <= MAX_REPLICAS:
        raise Misuse(f"replicas is the number of hosts that store the rows, 1 to {MAX_REPLICAS}; not {count}")
    return count


def capacity(value: int | str) -> int:
    """The `max_bytes` of a stream or history in bytes. Raises Misuse."""
    try:
        size = parse_size(value, "max_bytes")
    except (ValueError, TypeError) as error:
        raise Misuse(str(error)) from None
    if not 0 < size < 1 << 62:
        raise Misuse(f"max_bytes is a byte or more, not {value!r}")
    return size

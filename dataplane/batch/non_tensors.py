"""NonTensorStacks as tensordict's own constructors make them, each row a copy of one that they made.

`NonTensorData(value)` takes 10 microseconds, and a get of verl's makes thousands. What it makes is a dict of
attributes, the same for every value but the value itself, so one is made by tensordict and the others are copies of its
attributes.

Invariants: a copy has the attributes of what tensordict makes of the same value, and shares nothing that can be
written to; where what tensordict makes is not seen to be so simple, its constructors are called for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

_DATA, _OWN, _OTHERS, _ROWS, _SIZE = "data", "_tensordict", "_non_tensordict", "tensordicts", "_batch_size"


def stack(rows: Sequence[Any]) -> Any:
    """A NonTensorStack of a value a row. Imports tensordict."""
    return _maker()(rows)


def rows_of(stacked: Any) -> list[Any]:
    """The values of a NonTensorStack, a row each, as its `tolist` gives them."""
    if _maker().__name__ == _COPYING:
        own = vars(stacked)
        rows = [vars(each) for each in own[_ROWS]] if own["stack_dim"] == 0 else []
        if rows and all(row.keys() == _named().keys() and not vars(row[_OWN])[_SIZE] for row in rows):
            return [row[_OTHERS][_DATA] for row in rows]
    listed: list[Any] = stacked.tolist()
    return listed


@lru_cache(maxsize=1)
def _named() -> dict[str, Any]:
    """The attributes of a NonTensorData."""
    from tensordict import NonTensorData

    return vars(NonTensorData(None))


_COPYING = "by_copying"


@lru_cache(maxsize=1)
def _maker() -> Callable[[Sequence[Any]], Any]:
    from tensordict import NonTensorData, NonTensorStack

    def by_constructors(rows: Sequence[Any]) -> Any:
        return NonTensorStack(*map(NonTensorData, rows))

    one, several = NonTensorData(None), by_constructors([None, None])
    return _copying(one, several) if _is_simple(one, several) else by_constructors


def _copying(one: Any, several: Any) -> Callable[[Sequence[Any]], Any]:
    """Makes stacks like `several`, of rows like `one`."""
    import torch

    new, kind, inner_kind, stack_kind = object.__new__, type(one), type(vars(one)[_OWN]), type(several)
    of_one, of_inner, of_stack = dict(vars(one)), dict(vars(vars(one)[_OWN])), dict(vars(several))
    others = of_one[_OTHERS]

    def row(value: Any) -> Any:
        inner, made = new(inner_kind), new(kind)
        own = inner.__dict__
        own.update(of_inner)
        own[_OWN] = {}
        own = made.__dict__
        own.update(of_one)
        own[_OWN] = inner
        own[_OTHERS] = {**others, _DATA: value}
        return made

    def make(rows: Sequence[Any]) -> Any:
        made = new(stack_kind)
        own = made.__dict__
        own.update(of_stack)
        own[_ROWS] = list(map(row, rows))
        own[_SIZE] = torch.Size([len(rows)])
        return made

    def by_copying(rows: Sequence[Any]) -> Any:
        return make(rows) if len(rows) else stack_kind()

    return by_copying


def _is_simple(one: Any, several: Any) -> bool:
    """Whether all that these have is what a copy is given, or can not be written to."""
    try:
        of_one, of_stack = vars(one), vars(several)
        inner, others, rows = of_one[_OWN], of_one[_OTHERS], of_stack[_ROWS]
        rest = [value for name, value in of_one.items() if name not in (_OWN, _OTHERS)]
        rest += [value for name, value in of_stack.items() if name != _ROWS]
        rest += [value for name, value in vars(inner).items() if name != _OWN]
        rest += [value for name, value in others.items() if name != _DATA]
        known = vars(inner)[_OWN] == {} and type(rows) is list and len(rows) == 2 and of_stack[_SIZE] == (2,)
        plain = all(value is None or isinstance(value, bool | int | str | tuple) for value in rest)
        alike = all(vars(row).keys() == of_one.keys() and vars(row)[_OTHERS] == others for row in rows)
        return known and plain and alike and others[_DATA] is None and not _has_slots(one, inner, several)
    except (AttributeError, KeyError, TypeError):
        return False


def _has_slots(*values: Any) -> bool:
    """Whether one of them has attributes that are not in its dict."""
    kinds = [kind for value in values for kind in type(value).__mro__ if kind is not object]
    return any(name != "__dict__" and name != "__weakref__" for kind in kinds for name in _slots(kind))


def _slots(kind: type) -> Sequence[str]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)

"""Requests of every kind with whatever in their fields: values that their types allow, extreme ones, and wrong ones."""

from __future__ import annotations

import random
import types
import typing
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

INTEGERS = [0, 1, 2, 7, 100, 4096, 1 << 31, (1 << 32) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -2, -(1 << 63)]
FLOATS = [0.0, 0.001, -1.0, 1e300, -1e300, 1e-320, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "s", "a task", "\0staged", "é" * 50, "x" * 1025, "y" * 70_000]
WRONG = [None, True, -1, 1.5, "", b"", [], {}, [[]], {"x": 1}, [None] * 9, 1 << 63, float("nan"), "z" * 300]


class Frames:
    """Bodies of random requests, the same for the same seed. `tokens`: names of what is there, to be asked about."""

    def __init__(self, seed: int, requests: Any, tokens: list[bytes]) -> None:
        self._chance = random.Random(seed)
        self._kinds = get_args(requests)
        self._tokens = tokens

    @property
    def kinds(self) -> list[Any]:
        """Those that have a number."""
        return [kind for kind in self._kinds if kind.__struct_fields__[:1] == ("id",)]

    def body(self, kind: Any, number: int) -> bytes:
        values = [self._value(hint) for hint in self._hints(kind)[1:]]
        for _ in range(self._chance.choice([0, 0, 1, 2])):
            if values:
                values[self._chance.randrange(len(values))] = self._chance.choice(WRONG)
        values = self._chance.choice([values] * 9 + [values[:-1], [*values, 1], [*values, *values]])
        return msgspec.msgpack.encode([kind.__struct_config__.tag, number, *values])

    def _hints(self, kind: Any) -> list[Any]:
        hints = get_type_hints(kind)
        return [hints[name] for name in kind.__struct_fields__]

    def _value(self, hint: Any) -> Any:
        chance, origin, inner = self._chance, get_origin(hint), get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._value(chance.choice(inner))
        if origin is list:
            return [self._value(inner[0]) for _ in range(chance.choice([0, 1, 1, 2, 5]))]
        if origin is tuple and inner[1:] == (...,):
            return [self._value(inner[0]) for _ in range(chance.choice([0, 1, 2, 70]))]
        if origin is tuple:
            return [self._value(each) for each in inner]
        if origin is dict:
            return {self._value(inner[0]): self._value(inner[1]) for _ in range(chance.choice([0, 1, 2]))}
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            values = [self._value(each) for each in self._hints(hint)]
            config = hint.__struct_config__
            tagged = [config.tag, *values] if config.tag is not None else values
            return tagged if config.array_like else dict(zip(hint.__struct_fields__, values, strict=True))
        return self._plain(hint)

    def _plain(self, hint: Any) -> Any:
        chance = self._chance
        if hint is bool:
            return chance.random() < 0.5
        if hint is int:
            return chance.choice(INTEGERS)
        if hint is float:
            return chance.choice(FLOATS)
        if hint is str:
            return chance.choice(TEXTS)
        if hint is bytes:
            sizes = [0, 1, 8, 16, 64, 4096]
            return chance.choice(
                [*self._tokens, chance.randbytes(chance.choice(sizes)), bytes(8 * chance.choice(sizes))]
            )
        return None if hint is type(None) else chance.choice(WRONG)

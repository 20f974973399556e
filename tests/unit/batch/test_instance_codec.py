from __future__ import annotations

import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from dataplane.batch.object_codec import decode_row, encode_rows
from dataplane.errors import Corrupt, SchemaMismatch
from tests.cases import each_case

_CLASS = 7  # the extension


class Colour(enum.Enum):
    RED = "red"
    CRIMSON = "red"  # noqa: PIE796  # another name of the same
    BLUE = ("b", 2)


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "y"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    A = 1
    B = 2


class Point(NamedTuple):
    x: int
    y: Any = None


@dataclasses.dataclass
class Reward:
    score: float
    parts: dict[str, Any] = dataclasses.field(default_factory=dict)
    made: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    a: int
    b: Any = None


@dataclasses.dataclass(frozen=True)
class Key:
    a: int

    class Inner(enum.Enum):
        ONE = 1


@dataclasses.dataclass
class Child(Reward):
    extra: str = ""


class Text(str):
    def __str__(self) -> str:
        raise AssertionError("nothing of users runs")


class Sum(int):
    pass


class Box(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise AssertionError("nothing of users runs")

    def items(self) -> Any:
        raise AssertionError("nothing of users runs")


class Chain(list[Any]):
    __slots__ = ("label",)


def _word() -> Text:
    word = Text("word")
    word.note = [1]  # type: ignore[attr-defined]
    return word


def _chain() -> Chain:
    chain = Chain([1, Point(1)])
    chain.label = "x"
    return chain


def _changed() -> Reward:
    reward = Reward(0.5, {"a": Point(1, Colour.RED)})
    reward.made = 7
    reward.__dict__["other"] = (1,)
    return reward


@each_case(
    "value",
    [
        *Colour, Colour.CRIMSON, Level.LOW, Word.YES, Access.READ, Access.READ | Access.WRITE, Access(0),
        Bits.A | Bits.B, Bits(8), Key.Inner.ONE, Point(1), Point(1, Point(2)), Reward(1.5), _changed(),
        Slotted(1, (2,)), {Key(1): Key(2)}, Child(1.0, {"a": 1}, "x"), _word(), Sum(1 << 80), Box(a=1),
        _chain(), [Reward(1.0, {"c": {Level.LOW: {Point(0)}}})],
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_of_a_user_class_round_trips(value: Any) -> None:
    [row] = encode_rows("x", [value])
    back = decode_row("x", row)
    assert type(back) is type(value)
    assert back == value
    assert getattr(back, "__dict__", None) == getattr(value, "__dict__", None) or isinstance(value, enum.Enum)
    assert getattr(back, "label", None) == getattr(value, "label", None)
    if isinstance(value, enum.Enum) and len(value.__class__.__members__) != 2:
        assert back is value


class Closing:
    def __del__(self) -> None:
        pass


@dataclasses.dataclass
class Deleted(Closing):
    path: str = ""


@dataclasses.dataclass
class Error(Exception):
    a: int = 1


class Plain:
    pass


class Pair(tuple[int, int]):
    pass


def _local() -> Any:
    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()


@each_case("value", [Deleted(), Error(), Plain(), Pair((1, 2)), _local(), Reward, lambda: 1])
def test_a_value_of_an_unsupported_class_is_refused_by_name(value: Any) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        encode_rows("x", [None, (value,)])
    assert caught.value.row == 1
    name = getattr(value, "__qualname__", type(value).__qualname__)
    assert caught.value.found.rpartition(".")[2] in (name.rpartition(".")[2], "function", "type")


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """A module of a user, imported here until it is deleted."""
    made = types.ModuleType("users_own")
    source = """
import dataclasses, enum

@dataclasses.dataclass
class R:
    a: int

class E(enum.Enum):
    A = 1
    B = 2
"""
    sys.modules["users_own"] = made
    exec(compile(source, "users_own", "exec"), made.__dict__)
    yield made
    sys.modules.pop("users_own", None)


def test_a_value_whose_module_is_not_imported_is_refused_by_name(module: Any) -> None:
    rows = encode_rows("x", [module.R(1), module.E.A])
    assert [decode_row("x", row) for row in rows] == [module.R(1), module.E.A]
    del sys.modules["users_own"]
    for row in rows:
        with pytest.raises(SchemaMismatch, match=r"column 'x'.*import users_own") as caught:
            decode_row("x", row)
        assert caught.value.column == "x"
    assert "users_own" not in sys.modules


@each_case(
    "parts",
    [
        [], ["member"], ["member", "os", "system", "RED"], ["member", "subprocess", "Popen", "RED"],
        ["member", __name__, "Colour", ["RED"]], ["flags", __name__, "Colour", 1],
        ["member", __name__, "Reward", "RED"], ["member", __name__, "_CLASS", "RED"],
        ["instance", "subprocess", "Popen", "object", None, {"args": "x"}, {}],
        ["instance", "tempfile", "TemporaryDirectory", "object", None, {"name": "/"}, {}],
        ["instance", __name__, "Deleted", "object", None, {"path": "/"}, {}],
        ["instance", __name__, "Plain", "object", None, {}, {}],
        ["instance", __name__, "Reward", "str", "x", {}, {}],
        ["instance", __name__, "Text", "object", None, {}, {}],
        ["instance", __name__, "Text", "str", "x", {}, {"a": 1}],
        ["instance", __name__, "Text", "str", ["x"], [], {}], ["instance", __name__, "Sum", "int", [], {}, {}],
        ["instance", __name__, "Reward", "object", None, [], {}],
        ["instance", __name__, "Box", "dict", [1], {}, {}],
        ["instance", __name__, "Box", "dict", [[], 1], {}, {}],
        ["instance", __name__, "Chain", "list", 1, {}, {}], ["instance", "builtins", "str", "str", "x", {}, {}],
        ["instance", __name__, "Colour", "object", None, {}, {}], ["instance", 1, 2, 3],
        ["instance", [], "Text", "str", "x", {}, {}],
    ],
    ids=repr,
)  # fmt: skip
def test_encoded_parts_that_form_no_instance_are_refused(parts: list[Any]) -> None:
    forged = msgspec.msgpack.encode(msgspec.msgpack.Ext(_CLASS, msgspec.msgpack.encode(parts)))
    with pytest.raises((Corrupt, SchemaMismatch)):
        decode_row("x", forged)


_KIND = 6  # the extension


@each_case(
    "parts",
    [
        [], ["no such kind"], [1], [["int"]], ["set", []], ["set", {}], ["Fraction", 1, 0], ["Decimal", "x"],
        ["Decimal", "1E+9999999999999999999"], ["UUID", b"1"], ["date", 1, 2], ["date", 0, 1, 1],
        ["datetime", 1, 1, 1, 1, 1, 1, 1, 0], ["datetime", 1, 1, 1, 1, 1, 1, 1, 0, "UTC"],
        ["datetime", 1, 1, 1, 1, 1, 1, 1, 7, None], ["time", 25, 0, 0, 0, 0, None],
        ["ZoneInfo", "../../etc/passwd"], ["ZoneInfo", "/etc/passwd"], ["ZoneInfo", "No/Where"],
        ["timezone", 1], ["defaultdict", "print"], ["defaultdict", "int", 1], ["OrderedDict", 1], ["deque", -1],
        ["range", 1, 2, 0], ["slice", 1], ["complex", "1", "2"], ["timedelta", 10**10, 0, 0],
        ["WindowsPath", "a"],
    ],
    ids=repr,
)  # fmt: skip
def test_encoded_parts_that_form_no_value_are_corrupt(parts: list[Any]) -> None:
    forged = msgspec.msgpack.encode(msgspec.msgpack.Ext(_KIND, msgspec.msgpack.encode(parts)))
    with pytest.raises(Corrupt):
        decode_row("x", forged)

"""Inputs for fields of TransferQueue, and a description of what comes back, to compare storages with.

A case is a list of puts into one field and, where this package is meant to differ from TransferQueue's own storage,
how. There is no complex128 among the tensors: TransferQueue 0.1.11 reads them where they lie in a message, which may be
unaligned, and its process then ends by SIGSEGV.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import pathlib
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
    tensorclass,
)

Put = tuple[Sequence[int] | None, Callable[[], Any]]
"""Which rows (None: each by itself, with `kv_put`), and the entry of a TensorDict (the value of one row)."""

stack = NonTensorStack


class Case(NamedTuple):
    """`keeps`: the rows as this package gives them back, where TransferQueue changes them or fails (`alike`: or does
    not). `refused`: what the error says that this package raises."""

    name: str
    puts: Sequence[Put]
    rows: int = 3
    keeps: Callable[[], list[Any]] | None = None
    refused: str = ""
    alike: bool = False


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Verdict:
    score: float
    notes: list[str]


@tensorclass
class Scored:
    a: torch.Tensor
    s: str


def jagged(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def strided(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.strided)


def counted(*shape: int, dtype: str = "float32") -> torch.Tensor:
    return torch.arange(int(np.prod(shape))).view(shape).to(getattr(torch, dtype))


def _one(name: str, entry: Callable[[], Any], **more: Any) -> Case:
    return Case(name, [(range(more.get("rows", 3)), entry)], **more)


def _single(name: str, value: Callable[[], Any], **more: Any) -> Case:
    """The same value for each row, put by itself."""
    return Case(f"kv_put of {name}", [(None, value)], **more)


def _shared(name: str, data: Any) -> Case:
    """A NonTensorData of one value, which TransferQueue's storage can not cut into rows."""
    return _one(name, lambda: NonTensorData(data=data, batch_size=(3,)), keeps=lambda: [data] * 3)


LENGTH = r"2 values for 3 rows: give one for each row, or NonTensorStack\(\*\[value\] \* 3\)"

#: The kinds of values that functions of rewards return, and what they hold.
EXTRAS: dict[str, Callable[[], Any]] = {
    "np.str_": lambda: np.str_("a"),
    "np.bytes_": lambda: np.bytes_(b"a"),
    "np.float32": lambda: np.float32(0.5),
    "np.bool_": lambda: np.bool_(True),
    "np.datetime64": lambda: np.datetime64("2020-01-01T01:02"),
    "array": lambda: np.arange(3),
    "array of text": lambda: np.array(["a", "bc"]),
    "array of bytes": lambda: np.array([b"a", b"bc"]),
    "array of objects": lambda: np.array([None, "x", 1], object),
    "set": lambda: {1, 2},
    "frozenset": lambda: frozenset(("a",)),
    "tuple": lambda: (1, "a"),
    "complex": lambda: 1j,
    "large int": lambda: 2**70,
    "bytearray": lambda: bytearray(b"a"),
    "datetime": lambda: datetime.datetime(2020, 1, 2, 3, 4, 5, 6),
    "datetime with a zone": lambda: datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
    "date": lambda: datetime.date(2020, 1, 2),
    "time": lambda: datetime.time(1, 2),
    "timedelta": lambda: datetime.timedelta(days=1, microseconds=2),
    "enum": lambda: Color.RED,
    "enum of ints": lambda: Level.LOW,
    "dataclass": lambda: Verdict(0.5, ["a"]),
    "defaultdict": lambda: collections.defaultdict(list, {"a": [1]}),
    "OrderedDict": lambda: collections.OrderedDict(b=1, a=2),
    "Counter": lambda: collections.Counter("aab"),
    "deque": lambda: collections.deque([1, 2]),
    "Decimal": lambda: decimal.Decimal("1.50"),
    "Fraction": lambda: fractions.Fraction(1, 3),
    "UUID": lambda: uuid.UUID(int=5),
    "path": lambda: pathlib.PurePosixPath("/a/b"),
    "nested": lambda: {"a": [{"b": (1, {2}), "c": np.array(["x"])}], "t": torch.ones(2), 3: Color.RED},
}

_DTYPES = ("bool", "int64", "uint16", "bfloat16", "complex64", "float8_e4m3fn")
_ARRAYS = ("bool", "int64", "float16", "complex128", "datetime64[ns]")


def _without_stacks() -> Iterator[Case]:
    """What tensordict keeps as NonTensorData, which has a value a row or one value for all."""
    lists: dict[str, list[Any]] = {
        "lists": [[1], [2, 3], []],
        "tensors": [counted(n) for n in (1, 2, 3)],
        "dicts of tensors": [{"p": counted(n)} for n in (1, 2, 3)],
        "mixed": [1, None, "x"],
    }
    for name, values in lists.items():
        yield _one(f"data of {name}", lambda values=values: NonTensorData(data=values, batch_size=(3,)))
    yield _one("data without a batch size", lambda: NonTensorData(data=[1, 2, 3]))
    yield _one("data in two dimensions", lambda: NonTensorData(data=[[1, 2], [3, 4], [5, 6]], batch_size=(3, 2)))
    yield _one("data of an array", lambda: NonTensorData(data=np.arange(6).reshape(3, 2), batch_size=(3,)))
    yield _one("data of a tensor", lambda: NonTensorData(data=counted(3, 2), batch_size=(3,)))
    for name, short in (("list", [1, 2]), ("array", np.arange(2)), ("tensor", counted(2))):
        yield _one(f"short {name}", lambda short=short: NonTensorData(data=short, batch_size=(3,)), refused=LENGTH)
    yield _shared("one text", "abc")
    yield _shared("one None", None)
    yield _shared("one tuple", (1, 2, 3))
    yield _one("one text as it is", lambda: "abc", keeps=lambda: ["abc"] * 3)
    yield _one("metadata", lambda: MetaData("abc", batch_size=[3]), keeps=lambda: ["abc"] * 3)
    yield _one("array of text", lambda: np.array(["a", "bcd", ""]))
    yield _one("array in two dimensions of bytes", lambda: np.array([[b"a", b"bcd"], [b"b", b"c"], [b"", b""]]))
    yield _one("array of objects", lambda: np.array([{"a": 1}, None, "c"], object))
    yield _one("list of text", lambda: ["a", "b", "c"])
    yield _one("tuple of floats", lambda: (1.0, 2.0, 3.0))


def _stacks() -> Iterator[Case]:
    values: dict[str, list[Any]] = {
        "text": ["a", "ä", ""],
        "ints": [1, 2, 3],
        "floats": [1.0, float("nan"), -0.0],
        "ints and bools": [1, True, 0],
        "large ints": [2**63, 2**64 - 1, -(2**63)],
        "rectangles": [[[1, 2], [3, 4]], [[5, 6]], []],
        "lists of tensors": [[counted(2)], [counted(1), counted(3)], []],
        "dicts by number": [{1: 2}, {3: 4}, {}],
        "dicts of tensors": [{"p": counted(n, 3), "grid": counted(1, 3)} for n in (1, 2, 3)],
        "dicts of tensors in any order": [{"a": counted(1), "b": counted(2)}, {"b": counted(1), "a": counted(2)}, {}],
        "dicts of several dtypes": [{"p": counted(2)}, {"p": counted(2, dtype="int32")}, {"p": "x"}],
        "dicts with odd keys": [{"a/b": counted(2)}, {"": counted(1)}, {"/": counted(1), ".": 1}],
        "dicts and None": [{"p": counted(2)}, None, {"p": counted(3)}],
        "dicts of dicts": [{"p": [counted(n)], "q": {"r": counted(1)}} for n in (1, 2, 3)],
        "tensors": [counted(n) for n in (1, 2, 3)],
        "equal tensors": [counted(2)] * 3,
        "tensors of several dimensions": [counted(2), counted(2, 2), torch.tensor(1.0)],
        "tensors in which two dimensions vary": [counted(2, 3), counted(1, 2), counted(4, 1)],
        "tensors and None": [counted(2), None, counted(3)],
        "arrays of several dtypes": [np.ones(2), np.ones(2, np.int32), np.array("x")],
        "arrays in Fortran's order": [np.asfortranarray(np.arange(6).reshape(2, 3))] * 3,
        "arrays of the other byte order": [np.arange(6).astype(">f4")] * 3,
        "records": list(np.array([(1, 2.0)] * 3, [("a", "i4"), ("b", "f8")])),
    }
    for name, rows in values.items():
        yield _one(f"stack of {name}", lambda rows=rows: stack(*rows))
    yield _one("stack of stacks", lambda: stack(stack("a", "b"), stack("c", "d"), stack("e", "f")))
    yield _one("stack of data", lambda: stack(*[NonTensorData([n]) for n in range(3)]))
    tuples = [(1, 2), (counted(3), "a"), ()]
    yield _one("stack of tuples", lambda: stack(*tuples), keeps=lambda: tuples)
    several = [counted(2), counted(2, dtype="int64"), counted(2, dtype="bfloat16")]
    yield _one("stack of tensors of several dtypes", lambda: stack(*several), keeps=lambda: several)
    yield _one("stack of text that is none", lambda: stack("\ud800", "a", "b"), refused="lone surrogate: encode it")
    table = TensorDict({"a": counted(2)}, [])
    yield _one(
        "stack of tables", lambda: stack(*[NonTensorData(table)] * 3), refused="TensorDict: convert it to a dict"
    )
    nested = {"p": jagged([counted(2), counted(3)])}
    yield _one("stack of dicts of nested tensors", lambda: stack(nested, {}, {}), refused="nested tensor")


def _of_dtypes(tensors: Sequence[str], arrays: Sequence[str]) -> Iterator[Case]:
    for dtype in tensors:
        yield _one(f"2-d {dtype}", lambda dtype=dtype: counted(3, 2, dtype=dtype))
        rows = [counted(n, dtype=dtype) for n in (1, 2, 3)]
        yield _one(f"jagged {dtype}", lambda rows=rows: jagged(rows))
        yield _one(f"stack of tensors of {dtype}", lambda rows=rows: stack(*rows))
    for dtype in arrays:
        yield _one(f"array of {dtype}", lambda dtype=dtype: np.arange(3).astype(dtype))
        yield _one(f"array in two dimensions of {dtype}", lambda dtype=dtype: np.arange(6).reshape(3, 2).astype(dtype))
        yield _one(f"stack of scalars of {dtype}", lambda dtype=dtype: stack(*np.arange(3).astype(dtype)))
        yield _one(f"stack of arrays of {dtype}", lambda dtype=dtype: stack(*np.arange(6).reshape(3, 2).astype(dtype)))


def _tensors() -> Iterator[Case]:
    several: dict[str, Callable[[], Any]] = {
        "1-d": lambda: counted(3),
        "no columns": lambda: torch.ones(3, 0),
        "jagged with empty rows": lambda: jagged([counted(n) for n in (0, 2, 0)]),
        "jagged of equal lengths": lambda: jagged([counted(2)] * 3),
        "jagged in two dimensions": lambda: jagged([counted(n, 4) for n in (1, 2, 3)]),
        "jagged in the last dimension": lambda: jagged([counted(3, n) for n in (1, 2, 3)]),
        "strided": lambda: strided([counted(n) for n in (1, 2, 3)]),
        "strided in both dimensions": lambda: strided([counted(n, n + 1) for n in (1, 2, 3)]),
        "strided of equal shapes": lambda: strided([counted(2, 2)] * 3),
        "narrowed": lambda: torch.nested.narrow(
            counted(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 1]), layout=torch.jagged
        ),
        "transposed": lambda: counted(4, 3).t(),
        "expanded": lambda: counted(3).expand(3, 3),
        "gradient": lambda: torch.ones(3, 2, requires_grad=True),
        "odd NaN": lambda: torch.full((3, 1), 0x7FC00001, dtype=torch.int32).view(torch.float32),
    }
    for name, entry in several.items():
        yield _one(name, entry)
    yield _one("many jagged rows", lambda: jagged([counted(n % 5) for n in range(20)]), rows=20)
    conjugate = torch.tensor([[1 + 2j], [3j], [4]])
    yield _one("conjugate", lambda: conjugate.conj(), keeps=lambda: list(conjugate.conj().resolve_conj()))
    quantized = torch.ones(3, 2)
    refused = "quantized tensor .* pass tensor.int_repr"
    yield _one("quantized", lambda: torch.quantize_per_tensor(quantized, 0.1, 0, torch.quint8), refused=refused)
    yield _one("sparse", lambda: torch.eye(3).to_sparse(), refused="pass tensor.to_dense")


def _tables() -> Iterator[Case]:
    """TensorDicts in TensorDicts, which TransferQueue's storage takes, and can not give back."""
    tables: dict[str, tuple[Callable[[], Any], Callable[[], list[Any]]]] = {
        "table": (
            lambda: TensorDict({"a": counted(3, 2), "b": stack("x", "y", "z")}, [3]),
            lambda: [{"a": row, "b": each} for row, each in zip(counted(3, 2), "xyz", strict=True)],
        ),
        "table in a table": (
            lambda: TensorDict({"a": TensorDict({"b": counted(3, 2)}, [3])}, [3]),
            lambda: [{"a": {"b": row}} for row in counted(3, 2)],
        ),
        "jagged table": (
            lambda: TensorDict({"a": jagged([counted(n) for n in (1, 2, 3)])}, [3]),
            lambda: [{"a": counted(n)} for n in (1, 2, 3)],
        ),
        "lazy table of several keys": (
            lambda: LazyStackedTensorDict(*[TensorDict({key: counted(1)}, []) for key in "aab"]),
            lambda: [{key: counted(1)} for key in "aab"],
        ),
        "tensorclass": (
            lambda: Scored(counted(3), "x", batch_size=[3]),
            lambda: [{"a": each, "s": "x"} for each in counted(3)],
        ),
    }
    for name, (entry, rows) in tables.items():
        yield _one(name, entry, keeps=rows)


def _updates() -> Iterator[Case]:
    """Rows of one field that several puts brought."""

    def case(name: str, *puts: Put, **more: Any) -> Case:
        return Case(name, list(puts), **more)

    ones, some = torch.ones, (0, 1)
    three = jagged([ones(n) for n in (1, 2, 3)])
    yield case("dense, then longer", (some, lambda: ones(2, 3)), ([2], lambda: ones(1, 5)))
    yield case("dense, then jagged", (some, lambda: ones(2, 3)), ([2], lambda: jagged([ones(5)])))
    yield case("jagged, then dense", (some, lambda: jagged([ones(2), ones(4)])), ([2], lambda: ones(1, 5)))
    yield case("jagged, one replaced", (range(3), lambda: three), ([1], lambda: jagged([ones(7)])))
    yield case("dense, all replaced by jagged", (range(3), lambda: ones(3, 3)), (range(3), lambda: three))
    yield case("1-d, then 2-d", (some, lambda: ones(2)), ([2], lambda: ones(1, 2)))
    yield case("3-d, then both", (some, lambda: ones(2, 3, 2)), ([2], lambda: ones(1, 4, 5)))
    yield case("longer one by one", *[([n], lambda n=n: ones(1, n + 1)) for n in range(3)])
    yield case("strided, then dense", (some, lambda: strided([ones(1, 2), ones(2, 1)])), ([2], lambda: ones(1, 3, 3)))
    yield case("nothing, then some", (some, lambda: ones(2, 0)), ([2], lambda: ones(1, 3)))
    yield case("tensors, then text", (some, lambda: ones(2, 3)), ([2], lambda: stack("a")))
    yield case("bytes, then text", (some, lambda: stack(b"a", b"b")), ([2], lambda: stack("x")))
    stacked = (some, lambda: stack(ones(1), ones(2)))
    yield case("stacked tensors, then more", stacked, ([2], lambda: stack(ones(3))))
    yield case("stacked tensors, then dense", stacked, ([2], lambda: ones(1, 3)))
    yield case("stacked tensors, then two dimensions", stacked, ([2], lambda: stack(ones(5, 5))))
    for name, first in (("stacked tensors", stacked), ("text", (some, lambda: stack("a", "b")))):
        rows = [*first[1]().tolist(), ones(4)]
        puts = (first, ([2], lambda: jagged([ones(4)])))
        yield case(f"{name}, then jagged", *puts, keeps=lambda rows=rows: rows, alike=True)
    yield case("stack, then data", (range(3), lambda: stack(*"abc")), ([1, 2], lambda: NonTensorData(["x", "y"], [2])))
    both = lambda: stack({"p": ones(1)}, {"p": ones(2)})  # noqa: E731
    yield case("dicts of tensors, then other keys", (some, both), ([2], lambda: stack({"q": ones(3)})))
    yield case(
        "stacked tensors, then other dtypes",
        (some, lambda: stack(ones(1), ones(2))),
        ([2], lambda: stack(counted(5, dtype="int64"))),
        keeps=lambda: [ones(1), ones(2), counted(5, dtype="int64")],
    )
    yield case(
        "float32, then int64",
        (some, lambda: ones(2, 3)),
        ([2], lambda: ones(1, 3, dtype=torch.int64)),
        keeps=lambda: [ones(3), ones(3), ones(3, dtype=torch.int64)],
    )


def _singles() -> Iterator[Case]:
    values: dict[str, Callable[[], Any]] = {
        "a scalar": lambda: torch.tensor(1.0),
        "a tensor": lambda: counted(3),
        "text": lambda: "abc",
        "None": lambda: None,
        "a list": lambda: [1, 2],
        "a dict of tensors": lambda: {"p": counted(2)},
        "an array": lambda: np.ones(2),
        "data": lambda: NonTensorData("x"),
        "a stack": lambda: stack("x"),
        "a stack of two": lambda: stack("x", "y"),
    }
    for name, value in values.items():
        yield _single(name, value)


#: What TransferQueue's MessagePack makes something else of: for each kind, whether it comes back as another.
CHANGED = frozenset(
    {
        *("set", "frozenset", "tuple", "bytearray", "datetime", "date", "time", "timedelta", "enum", "enum of ints"),
        *("dataclass", "defaultdict", "OrderedDict", "Counter", "Decimal", "UUID", "nested"),
    }
)


def _extras() -> Iterator[Case]:
    """A row of each kind in one field: of those that TransferQueue keeps, and of those that it changes."""
    kept = [value for name, value in EXTRAS.items() if name not in CHANGED]
    changed = [EXTRAS[name] for name in sorted(CHANGED)]
    yield _one("extras", lambda: stack(*[value() for value in kept]), rows=len(kept))
    rows = lambda: [value() for value in changed]  # noqa: E731
    yield _one("extras that change", lambda: stack(*rows()), rows=len(changed), keeps=rows)
    nested = EXTRAS["nested"]
    yield _single("an extra", EXTRAS["np.datetime64"])
    yield _single("an extra that changes", nested, keeps=lambda: [nested() for _ in range(3)])


def pixels(size: int = 6, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)


def file(format: str = "PNG", size: int = 6, seed: int = 0) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels(size, seed)).save(out, format)
    return out.getvalue()


def opened(data: bytes) -> Any:
    """An image of a file, no pixel of which was looked at."""
    return Image.open(io.BytesIO(data))


def messages(image: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "what is it?"}]
    return [{"role": "system", "content": "look"}, {"role": "user", "content": parts}]


def _media() -> Iterator[Case]:
    def loaded() -> Any:
        image = opened(file())
        image.load()
        return image

    images: dict[str, Callable[[], Any]] = {
        "PNG": lambda: opened(file()),
        "JPEG": lambda: opened(file("JPEG")),
        "decoded": loaded,
        "made": lambda: Image.fromarray(pixels(64)),
    }
    odd: list[Callable[[], Any]] = [
        lambda: opened(file("WEBP")),
        lambda: Image.fromarray(pixels()).convert("L"),
        lambda: Image.fromarray(pixels()).convert("P"),
        lambda: Image.fromarray(pixels()).convert("RGBA"),
        lambda: Image.fromarray(pixels()[..., 0].astype(np.float32)),
        lambda: opened(file(size=9)).crop((1, 2, 5, 7)),
    ]
    yield _one("images of other formats and modes", lambda: stack(*[make() for make in odd]), rows=len(odd))
    for name, make in images.items():
        yield _one(f"stack of images: {name}", lambda make=make: stack(make(), make(), make()))
        yield _one(f"prompts: {name}", lambda make=make: stack(*[messages(make()) for _ in range(3)]))
        data = lambda make=make: {"image": [make(), make()], "n": 2}  # noqa: E731
        yield _one(f"multi_modal_data: {name}", lambda data=data: stack(data(), {}, data()))
        yield _single(f"multi_modal_data: {name}", data)
    one = opened(file(size=64))
    yield _one("one image of all rows", lambda: stack(one, one, one))
    yield _one("prompts of one image", lambda: stack(*[messages(one)] * 3))
    video = {"video": [np.stack([pixels(8, n) for n in range(4)]), torch.from_numpy(pixels(8))]}
    yield _one("videos", lambda: stack(video, {}, {"video": [list(video["video"][0])]}))
    sound = {"audio": [(np.arange(2000, dtype=np.float32), 16000)]}
    yield _one("sounds", lambda: stack(sound, {}, sound), keeps=lambda: [sound, {}, sound])
    inputs = [{"pixel_values": counted(n * 4, 1176), "image_grid_thw": counted(n, 3, dtype="int64")} for n in (1, 2)]
    yield _one("multi_modal_inputs", lambda: stack(inputs[0], {}, inputs[1]))
    yield Case(
        "prompts, then text",
        [((0, 1), lambda: stack(messages(one), messages(one))), ([2], lambda: stack(messages("x")))],
    )


def _named(*groups: Iterator[Case]) -> dict[str, Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of prototypes
        return {case.name: case for group in groups for case in group}


CASES = _named(
    _without_stacks(),
    _stacks(),
    _of_dtypes(_DTYPES, _ARRAYS),
    _tensors(),
    _tables(),
    _updates(),
    _singles(),
    _extras(),
    _media(),
)


def keys(case: Case) -> list[str]:
    return [f"k{number:02}" for number in range(case.rows)]


def put(queue: Any, case: Case, partition: str) -> None:
    """Put a case by the calls of a module `transfer_queue`."""
    for rows, entry in case.puts:
        if rows is None:
            for key in keys(case):
                queue.kv_put(key, partition, fields={"x": entry()})
        else:
            fields = TensorDict({"x": entry()}, batch_size=[len(rows)])
            queue.kv_batch_put([keys(case)[row] for row in rows], partition, fields=fields)


def reads(case: Case) -> dict[str, list[int]]:
    """What is read of a case: all rows, in another order, some, and each."""
    every = list(range(case.rows))
    several = {"all": every, "backwards": every[::-1], "some": [2, 0]}
    return several | {f"row {row}": [row] for row in every[:5]}


def seen(queue: Any, case: Case, partition: str) -> dict[str, Any]:
    """What of a case comes back, by how it was read; or under "error" what the put raised, or a get."""
    try:
        put(queue, case, partition)
        return {
            name: look(queue.kv_batch_get([keys(case)[row] for row in rows], partition).get("x"))
            for name, rows in reads(case).items()
        }
    except Exception as error:  # of TransferQueue, whatever it is
        return {"error": error}
    finally:
        queue.get_client().clear_partition(partition)


def look(value: Any) -> Any:
    """A description that is equal for values of one kind, dtype, shape and content, to the last bit."""
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            at = value._ragged_idx if value.layout == torch.jagged else None
            return "nested", str(value.layout), at, str(value.dtype), [look(row) for row in value.unbind()]
        plain = value.detach().resolve_conj().resolve_neg().contiguous()
        bits = plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad, bits
    if is_tensor_collection(value):
        rows = value.tolist() if isinstance(value, NonTensorStack) else [value.to_dict()]
        return type(value).__name__, [look(row) for row in rows]
    if isinstance(value, np.ndarray):
        content = [look(each) for each in value.ravel().tolist()] if value.dtype.hasobject else value.tobytes()
        return "array", str(value.dtype), value.shape, content
    if isinstance(value, np.generic):
        return type(value).__name__, str(value.dtype), value.tobytes()
    if isinstance(value, dict):
        extra = value.default_factory if isinstance(value, collections.defaultdict) else None
        return type(value).__name__, extra, [(look(key), look(each)) for key, each in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value).__name__, [look(each) for each in value]
    if isinstance(value, set | frozenset):
        return type(value).__name__, sorted(map(repr, value))
    if type(value).__module__.startswith("PIL."):
        value.load()  # some formats say more then
        palette = value.getpalette() if value.mode in ("P", "PA") else None
        return (
            type(value).__name__,
            value.mode,
            value.size,
            value.format,
            palette,
            sorted(map(repr, value.info)),
            value.tobytes(),
        )
    return type(value).__name__, repr(value)

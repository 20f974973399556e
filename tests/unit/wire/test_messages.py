"""Messages: what is encoded is decoded; other types, tags and versions are refused or read as far as known."""

from __future__ import annotations

from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import hypothesis.strategies as st
import msgspec
import numpy as np
from hypothesis import given

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, Misuse
from dataplane.stream.sampler import BuiltIn, CompleteGroups, Fifo, Freshest, TokenBalanced, Weighted
from dataplane.stream.settings import StreamSettings
from dataplane.wire import messages as m
from dataplane.wire.boundary import encoded
from dataplane.wire.client_messages import AnyReply, AnyRequest, decoder
from tests.cases import each_case

SAMPLERS = [Fifo(), CompleteGroups(8), Freshest(2), Weighted("domain", {"math": 0.5}), TokenBalanced("ids", 4)]

requests = decoder(AnyRequest)


def instances(union: Any) -> st.SearchStrategy[m.Message]:
    simple = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        bool: st.booleans(),
        dict[str, Any]: st.dictionaries(st.text(max_size=4), st.integers(0, 9) | st.text(max_size=3), max_size=3),
    }
    return st.one_of([st.builds(kind, **{n: of(t, simple) for n, t in fields(kind)}) for kind in get_args(union)])


def fields(kind: type[msgspec.Struct]) -> list[tuple[str, Any]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(kind)]


def of(kind: Any, simple: dict[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    if kind in simple:
        return simple[kind]
    if kind is m.SegmentGrant:
        return st.builds(m.SegmentGrant, simple[int], simple[int], simple[bool])
    if kind is StreamSettings:
        names = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3, unique=True)
        return st.builds(StreamSettings, names.map(tuple), st.integers(0, 9), st.integers(0, 9), st.integers(-1, 9))
    if kind is BatchRef:
        return st.just(ref_to(b"12345678", 2, [("x", Field("dense", "int64", ()), 16, 1, 0)]))
    if get_origin(kind) is np.ndarray:
        return st.lists(simple[int], max_size=3).map(lambda values: np.array(values, np.int64))
    if kind in get_args(BuiltIn):
        return st.sampled_from([sampler for sampler in SAMPLERS if isinstance(sampler, kind)])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return st.builds(kind, **{name: of(each, simple) for name, each in fields(kind)})
    if kind is type(None):
        return st.none()
    if get_origin(kind) in (UnionType, Union):
        return st.one_of([of(inner, simple) for inner in get_args(kind)])
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is dict:
        return st.dictionaries(simple[str], of(get_args(kind)[1], simple), max_size=3)
    if kind.__origin__ is tuple and get_args(kind)[1:] == (...,):
        return st.lists(of(get_args(kind)[0], simple), max_size=3).map(tuple)
    if kind.__origin__ is tuple:
        return st.tuples(*(of(inner, simple) for inner in get_args(kind)))
    return st.lists(of(get_args(kind)[0], simple), max_size=3)


@each_case("union", [AnyRequest, AnyReply])
def test_messages_round_trip(union: Any) -> None:
    @given(instances(union))
    def come_back(message: m.Message) -> None:
        decoded = decoder(union).decode(encoded(message))
        assert type(decoded) is type(message)
        assert encoded(decoded) == encoded(message)  # arrays have no equality

    come_back()


@given(instances(AnyRequest), st.integers(0, 30), st.binary(min_size=1, max_size=3))
def test_corrupted_requests_are_decoded_or_refused(request_: m.Message, where: int, what: bytes) -> None:
    spoilt = encoded(request_)
    spoilt[where : where + len(what)] = what
    try:
        decoded = requests.decode(bytes(spoilt))
    except (msgspec.DecodeError, UnicodeDecodeError, Misuse, Corrupt):
        return
    assert isinstance(decoded, m.Message)


@each_case("union", [AnyRequest, AnyReply])
def test_fields_added_by_a_later_minor_version_are_ignored(union: Any) -> None:
    messages = decoder(union)

    @given(instances(union))
    def ignored(message: m.Message) -> None:
        later = [*msgspec.msgpack.decode(encoded(message)), "more", {"and": "more"}]
        assert encoded(messages.decode(msgspec.msgpack.encode(later))) == encoded(message)

    ignored()

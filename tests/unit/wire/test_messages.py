"""Messages: what is encoded is decoded; other types, tags and versions are refused or read as far as known."""

from __future__ import annotations

import logging
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, LimitExceeded, Misuse
from dataplane.stream.sampler import BuiltIn, CompleteGroups, Fifo, Freshest, TokenBalanced, Weighted
from dataplane.stream.settings import StreamSettings
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire.boundary import EACH_S, MOST, Heads, InvalidMessageLog, answered, encoded, failure
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


# What the log says of strangers' nonsense is bounded, and says how much more there was.

LOG = logging.getLogger("dataplane.test")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_invalid_messages_of_a_sender_are_logged_a_few_times_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    complain = InvalidMessageLog(LOG, clock=lambda: now)
    for number in range(1000):
        complain.log(logging.WARNING, "a", "%s sent %d", "a", number)
    complain.log(logging.WARNING, "b", "%s is another", "b")
    assert said(caplog) == [*(f"a sent {number}" for number in range(MOST)), "b is another"]
    now += EACH_S
    complain.log(logging.WARNING, "a", "%s sent %d", "a", 1000)
    assert said(caplog) == [f"a: {1000 - MOST} more of this kind in 60 s", "a sent 1000"]


# The boundary: numbers of requests that can not be decoded, and answers that can always be encoded.

encode = msgspec.msgpack.encode
LOCAL, PEERS = Heads(AnyRequest), Heads(pm.PeerRequest)
WITHOUT = {
    "stays",
    "abort",
    "unpin",
    "cancel",
    "leave",
    "alive",
    "report",
    "give-back",
    "release-snapshot",
    "partitions",
}


def tag(kind: Any) -> str:
    return str(kind.__struct_config__.tag)


NUMBERS = [0, 1, 127, 128, 255, 65_536, 2**32, 2**63 - 1, 2**64 - 1, -1, -32, -33, -(2**63)]


@each_case("kind", [*get_args(AnyRequest), *get_args(pm.PeerRequest)], ids=tag)
def test_the_number_of_a_malformed_request_of_any_kind_is_decoded(kind: Any) -> None:
    heads = LOCAL if kind in get_args(AnyRequest) else PEERS
    for number in NUMBERS:
        read = None if tag(kind) in WITHOUT else number
        for rest in ([], ["x", None], [[]] * 20):
            assert heads.number(encode([tag(kind), number, *rest])) == read
        assert heads.number(encode([tag(kind), number, b"x" * 100])[:-50]) == read
        assert heads.number(encode([tag(kind), number]) + b"\xc1") == read


WORST: dict[str, Any] = {
    "a number beyond 64 bits": 1 << 70,
    "a negative one": -(1 << 70),
    "half of a pair": "\ud800",
    "long text": "x" * 10_000_000,
    "a thing": object(),
    "many": list(range(1_000_000)),
    "deep": [[[[[[[[1]]]]]]]],
    "a mapping": {object(): 1 << 70},
}


@each_case("what", WORST)
def test_a_failure_with_any_fields_can_be_encoded(what: str) -> None:
    error = LimitExceeded(f"much: {WORST[what]}"[:5_000_000], what=what, asked=WORST[what], limit=1)
    said = failure(7, error, "somebody")
    assert (said.id, said.name) == (7, "LimitExceeded")
    assert len(encoded(said)) < 1 << 18
    assert msgspec.msgpack.decode(answered(said, "somebody"), type=AnyReply).fields["limit"] == 1


def test_an_internal_error_is_logged_as_one_line_that_names_its_sender(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        try:
            raise KeyError("two\nlines" * 1000)
        except KeyError as error:
            said = failure(7, error, "client x")
    assert (said.id, said.name) == (7, "Rejected")
    assert "lines" not in said.message
    (record,) = caplog.records
    text = record.getMessage()
    assert "client x" in text
    assert "KeyError" in text
    assert "\n" not in text
    assert len(text) < 2000

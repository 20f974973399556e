"""The boundary: numbers of requests that can not be decoded, and answers that can always be encoded."""

from __future__ import annotations

import logging
from typing import Any, get_args

import msgspec
import pytest

from dataplane.errors import LimitExceeded
from dataplane.wire import peer_messages as pm
from dataplane.wire.boundary import Heads, answered, encoded, failure
from dataplane.wire.client_messages import AnyReply, AnyRequest
from tests.cases import each_case

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

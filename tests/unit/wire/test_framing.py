"""Frames: cut anywhere on the way, put together again; lengths that nobody may send."""

from __future__ import annotations

import struct

import hypothesis.strategies as st
import pytest
from hypothesis import given

from dataplane.errors import ProtocolMismatch
from dataplane.wire import messages as m
from dataplane.wire.framing import Framer
from tests.cases import each_case

bodies = st.lists(st.binary(max_size=200), max_size=12)


def framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


@given(bodies, st.data())
def test_messages_survive_any_fragmentation(sent: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(framed, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=20)))
    framer = Framer()
    got: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += framer.feed(stream[start:end])
    assert got == sent
    assert list(framer.feed(b"")) == []


@each_case("size", [m.MAX_FRAME + 1, 2**31, 2**32 - 1])
def test_an_invalid_frame_length_is_refused_before_buffering(size: int) -> None:
    framer = Framer()
    with pytest.raises(ProtocolMismatch, match=str(size)):
        list(framer.feed(struct.pack("<I", size)))

"""Numbers of links: what they are to, and back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.field import Field
from dataplane.batch.links import MAX_LINK, link_of, linked, shard_of
from dataplane.batch.ref import BatchRef

NODE = b"12345678"


@given(st.integers(1, (1 << 40) - 1), st.integers(0, MAX_LINK))
def test_a_link_says_what_it_is_to(shard: int, link: int) -> None:
    number = linked(shard, link)
    assert (shard_of(number), link_of(number)) == (shard, link)
    assert number < 1 << 63


def test_a_reference_to_links_is_read_where_they_are_to() -> None:
    fields = [("x", Field("text"), 9, 3, 0), ("y", Field("text"), 9, 4, 1)]
    ref = BatchRef.of(NODE, 5, fields)[[3, 1, 1]]
    other = ref.numbered(lambda key: linked(key[1], 2))
    assert other.shards() == ((NODE, linked(3, 2)), (NODE, linked(4, 2)))
    assert other != ref
    assert BatchRef.decode(other.encode()) == other
    assert other.unlinked() == ref
    assert ref.unlinked() is ref

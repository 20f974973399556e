from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from dataplane.store.pins import Pins

clients = st.sampled_from("abc")
shards = st.integers(1, 4)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), clients, shards),
        st.tuples(st.just("drop"), clients, shards),
        st.tuples(st.just("leave"), clients, st.just(0)),
    ),
    max_size=60,
)


@given(steps)
def test_pins_are_counts_of_client_and_shard(done: list[tuple[str, str, int]]) -> None:
    pins, model = Pins(), Counter[tuple[str, int]]()

    def held() -> set[int]:
        return {shard for _, shard in +model}

    for what, client, shard in done:
        before = held()
        if what == "add":
            pins.add(client, shard)
            model[client, shard] += 1
        elif what == "drop":
            last = pins.drop_all(client, [shard]) == [shard]
            model[client, shard] = max(0, model[client, shard] - 1)
            assert last == (shard in before - held())
        else:
            unheld = pins.drop_client(client)
            for key in [key for key in model if key[0] == client]:
                del model[key]
            assert sorted(unheld) == sorted(before - held())
        assert {shard for shard in range(6) if pins.holds(shard)} == set(pins.shards()) == held()
        by_client = {who: {s for c, s in +model if c == who} for who, _ in +model}
        assert {who: set(them) for who, them in pins.by_client().items()} == by_client

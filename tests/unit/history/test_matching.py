"""Matching: the extension and the Python propose the same, whatever they are given; orders are sorted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.history import matching
from tests.cases import each_case

texts = st.lists(st.integers(0, 3), max_size=90).map(lambda values: np.array(values, np.int32))
native = pytest.mark.skipif(not matching.NATIVE, reason="the extension is not built: no C compiler was there")


def key(tokens: list[int], at: int) -> list[int]:
    return tokens[max(0, at - matching.DEPTH) : at][::-1]


@given(texts)
def test_an_order_sorts_positions_by_what_is_before_them(tokens: np.ndarray) -> None:
    found = matching.order(tokens).tolist()
    assert found == sorted(range(len(tokens)), key=lambda at: key(tokens.tolist(), at))
    assert found == matching.order_by_sorting(tokens).tolist()


@native
@given(
    st.lists(st.tuples(texts, st.floats(0.1, 2.0)), max_size=5), texts, st.integers(1, 3), st.sampled_from([0.0, 0.3])
)
def test_both_propose_the_same(responses: list, new: np.ndarray, branches: int, threshold: float) -> None:
    both = matching._suffix.Matcher(), matching.PlainMatcher()
    for each in both:
        for tokens, weight in responses:
            each.add(tokens, matching.order(tokens), weight)
    at = 0
    while at < len(new):
        said = [each.propose(12, threshold, branches) for each in both]
        assert said[0] == said[1]
        came = new[at : at + 3].copy()
        assert len({each.accept(came) for each in both}) == 1
        assert both[0].chances() == both[1].chances()
        at += len(came)


MATCHERS = [pytest.param(matching.PlainMatcher, id="python")]
if matching.NATIVE:
    MATCHERS.append(pytest.param(matching._suffix.Matcher, id="extension"))


@each_case("make", MATCHERS)
def test_what_is_no_response_is_refused(make: type) -> None:
    each = make()
    tokens = np.arange(4, dtype=np.int32)
    for order, weight in ((tokens[:3], 1.0), (tokens, 0.0), (tokens, float("nan")), (tokens, float("inf"))):
        with pytest.raises(ValueError, match="tokens and their order"):
            each.add(tokens, order, weight)
    with pytest.raises(ValueError, match="hits are above 0"):
        each.set_chances([(1.0, 0.5)] * 8)
    for _ in range(matching.MOST):
        each.add(tokens, tokens, 1.0)
    with pytest.raises(ValueError, match="64 responses"):
        each.add(tokens, tokens, 1.0)


@each_case("make", MATCHERS)
@each_case("order", [[-1, -5, 99, 1 << 30], [7, 7, 7, 7], [0, 0, 0, 0], [3, 2, 1, 0]])
def test_a_false_order_reads_nothing_beyond(make: type, order: list[int]) -> None:
    each = make()
    each.add(np.array([1, 2, 3, 4], np.int32), np.array(order, np.int32), 1.0)
    for token in (1, 9, 3, 3, 2, 1):
        tokens, _ = each.propose(8, 0.0, 2)
        assert set(tokens) <= {1, 2, 3, 4}
        each.accept(np.array([token], np.int32))


@native
def test_the_extension_refuses_what_is_no_array_of_tokens() -> None:
    for bad in (b"abc", np.zeros(3, np.int8)):
        with pytest.raises(ValueError, match="int32"):
            matching._suffix.order(bad)
        with pytest.raises(ValueError, match="int32"):
            matching._suffix.Matcher().accept(bad)
    with pytest.raises(TypeError):
        matching._suffix.order([1, 2])


@native
def test_it_leaks_nothing() -> None:
    import sys

    tokens = np.arange(1000, dtype=np.int32)
    order = matching.order(tokens)
    before = sys.getrefcount(tokens), sys.getrefcount(order)
    for _ in range(50):
        each = matching._suffix.Matcher()
        each.add(tokens, order, 1.0)
        each.propose(64, 0.0, 3)
        each.accept(tokens)
        del each
    assert (sys.getrefcount(tokens), sys.getrefcount(order)) == before

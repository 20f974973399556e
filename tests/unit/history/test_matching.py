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


@native
@given(
    st.lists(st.tuples(texts, st.floats(0.1, 2.0)), max_size=5), texts, st.integers(1, 3), st.sampled_from([0.0, 0.3])
)
def test_the_extension_and_the_plain_matcher_propose_the_same_tokens(
    responses: list, new: np.ndarray, branches: int, threshold: float
) -> None:
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
@each_case("order", [[-1, -5, 99, 1 << 30], [7, 7, 7, 7], [0, 0, 0, 0], [3, 2, 1, 0]])
def test_an_invalid_suffix_order_causes_no_read_out_of_bounds(make: type, order: list[int]) -> None:
    each = make()
    each.add(np.array([1, 2, 3, 4], np.int32), np.array(order, np.int32), 1.0)
    for token in (1, 9, 3, 3, 2, 1):
        tokens, _ = each.propose(8, 0.0, 2)
        assert set(tokens) <= {1, 2, 3, 4}
        each.accept(np.array([token], np.int32))

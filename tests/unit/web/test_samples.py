"""Rates and sums of two looks."""

from __future__ import annotations

import msgspec
import pytest

from dataplane.web.samples import MAX_NAME, sample
from tests.unit.web.looking import A, B, looked, part, stats


def test_a_node_that_was_started_again_has_no_rate_yet() -> None:
    before = looked(0.0, stats(A, 100.0, put_bytes=10**9))
    now = looked(1.0, stats(A, 1.0, put_bytes=10, pid=8))
    assert sample(now, before).hosts[0].put is None


def test_stream_figures_are_summed_over_hosts() -> None:
    before = looked(0.0, stats(A, streams={"s": part(100, 40)}), stats(B, streams={"s": part(10, 0)}))
    now = looked(2.0, stats(A, streams={"s": part(120, 60)}), stats(B, streams={"s": part(30, 10)}))
    [stream] = sample(now, before).streams
    assert (stream.appended, stream.rows, stream.rate) == (150, 80, 20.0)
    reward = stream.tasks[0]
    assert (reward.name, reward.pending, reward.rate) == ("reward", 80, 15.0)
    assert reward.lag_s == pytest.approx(80 / 15, abs=0.1)


def test_untrusted_names_are_shortened_and_printable() -> None:
    hostile = "\x1b[31m<script>\u202e" + "x" * 10_000
    now = looked(0.0, stats(A, streams={hostile: part(1, 0)}, spill_error=hostile))
    made = sample(now, None)
    for text in (made.streams[0].name, made.hosts[0].spill_error):
        assert len(text) <= MAX_NAME + 1
        assert text.isprintable()
    assert len(msgspec.json.encode(made)) < 4000

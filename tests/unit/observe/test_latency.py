"""Latencies: events folded into histograms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dataplane.observe.latency import Histogram, Latencies
from dataplane.observe.ring import CODE, EVENT


def events(code: int, *took_s: float) -> np.ndarray:
    made = np.zeros(len(took_s), EVENT)
    made["code"], made["began"] = code, 10**9
    made["ended"] = [10**9 + round(each * 1e9) for each in took_s]
    return made


def of(latencies: Latencies, name: str) -> Histogram:
    return Histogram.of(latencies.values()[name])


def test_each_is_in_its_bucket() -> None:
    latencies = Latencies()
    latencies.fold(events(CODE["put"], 5e-6, 10e-6, 11e-6, 400.0))
    latencies.fold(events(CODE["get"], 0.0))
    put = of(latencies, "put")
    assert put.counts[:2] == (2, 1)
    assert put.counts[-1] == 1
    assert put.count == 4
    assert put.sum_s == pytest.approx(400.000026)
    assert of(latencies, "get").counts[0] == 1


def test_what_has_no_histogram_or_ends_before_it_began_is_passed_over() -> None:
    latencies = Latencies()
    odd = events(CODE["put"], 1.0)
    odd["ended"] = 5
    for each in (odd, events(CODE["reserve"], 1.0), events(0, 1.0), events(60000, 1.0), events(CODE["put"])):
        latencies.fold(each)
    assert all(Histogram.of(each).count == 0 for each in latencies.values().values())


def test_a_quantile_is_within_its_bucket() -> None:
    latencies = Latencies()
    latencies.fold(events(CODE["put"], *[0.002] * 90, *[0.2] * 10))
    put = of(latencies, "put")
    assert 1e-3 <= put.quantile(0.5) <= 2.5e-3
    assert 0.1 <= put.quantile(0.95) <= 0.25
    assert math.isnan(Histogram().quantile(0.5))

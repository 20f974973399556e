"""What one stream carries, by a line through what its leader costs."""

from __future__ import annotations

import pytest

from bench.scale.model import Costs, Line, outcomes, scaling, text


def test_a_line_goes_through_its_points_and_never_down() -> None:
    line = Line.through({1.0: 3.0, 2.0: 5.0, 3.0: 7.0})
    assert (line.at(0), line.at(10)) == (pytest.approx(1.0), pytest.approx(21.0))
    assert Line.through({1.0: 3.0, 2.0: 1.0}) == Line(2.0, 0.0)


def test_what_a_leader_costs_is_said_of_many_hosts() -> None:
    costs = Costs(Line(100.0, 1.0), Line(0.0, 0.0), Line(0.0, 0.0004))
    one, blocks, many = outcomes(costs, [64], [10.0], [1, 64]) + outcomes(costs, [4096], [100.0], [1])
    assert one.leader == pytest.approx(640 * 101e-6)
    assert blocks.leader == pytest.approx(10 * 164e-6)
    assert (one.streams, many.streams) == (1, 42)
    assert (one.bottleneck, many.etcd) == ("the stream's leader", pytest.approx(1.6384))
    assert "4096" in text([one, many])
    assert set(scaling([one, many])) == {"x", "y", "series"}

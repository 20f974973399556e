"""The model of many hosts: it is lines through what real nodes cost."""

from __future__ import annotations

import numpy as np
import pytest

from bench.scale.__main__ import measure
from bench.scale.model import GROUPS, Costs, Line, outcomes, partitions_hit, scaling, text
from dataplane.node.partitions.table import Table
from tests.cases import each_case

MEMBER = {16.0: 0.0001, 1024.0: 0.0002}


@each_case("hosts", [2, 8, 64, 512])
def test_as_many_partitions_are_hit_as_the_table_has_groups_in(hosts: int) -> None:
    table = Table(0, "rollouts", "a1", b"", 1).extended([f"n{number}" for number in range(hosts)])
    hit = [len(np.unique(table.place([f"{block} {group}" for group in range(GROUPS)]))) for block in range(60)]
    assert np.mean(hit) == pytest.approx(partitions_hit(hosts), rel=0.05)


def test_more_hosts_than_groups_cost_a_block_no_more_than_its_groups() -> None:
    assert partitions_hit(1) == 1
    assert partitions_hit(4096) == pytest.approx(GROUPS, rel=0.01)


def test_a_line_goes_through_its_points_and_never_down() -> None:
    line = Line.through({1.0: 3.0, 2.0: 5.0, 3.0: 7.0})
    assert (line.at(0), line.at(10)) == (pytest.approx(1.0), pytest.approx(21.0))
    assert Line.through({1.0: 3.0, 2.0: 1.0}) == Line(2.0, 0.0)


def test_what_is_known_of_few_hosts_is_said_of_many() -> None:
    def cost(us: float, requests: float) -> dict[str, float]:
        return {"us_per_row": us, "requests_per_512_rows": requests}

    whole = {2: cost(10.0, 2.0), 4: cost(10.0, 2.0)}
    placed = {count: cost(10.0 + partitions_hit(count), 2 * partitions_hit(count)) for count in (2, 4, 8)}
    costs = Costs.of(whole, placed, MEMBER, {16.0: 0.01, 1024.0: 0.2})
    few, many = outcomes(costs, [8, 4096])
    assert few.whole_rows_s == pytest.approx(1e5, rel=0.001)
    assert many.placed_rows_s == pytest.approx(1e6 / (10.0 + GROUPS), rel=0.02)
    assert many.placed_requests == pytest.approx(2 * GROUPS, rel=0.02)
    assert many.etcd == pytest.approx(0.01 + (4096 - 16) * 0.19 / 1008)
    assert "4096" in text([few, many])
    assert set(scaling([few, many])) == {"x", "y", "series"}


def test_real_nodes_are_what_it_is_made_of() -> None:
    found = measure(False, (2, 3), 1, 2)
    assert all(each["us_per_row"] > 0 for each in found.values())
    assert found[3]["requests_per_512_rows"] > found[2]["requests_per_512_rows"] > 0

"""The model of many hosts: its queues do what is known of queues, nothing is lost in it, and it is the same twice."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.scale import costs as costs_module
from bench.scale import sweep
from bench.scale.controller import Controller
from bench.scale.costs import KEPT, Costs, Line, of_json, read
from bench.scale.events import Links, Loop, Process, Processors, Shared, Signal
from bench.scale.homes import Homes, Rows
from bench.scale.job import Job
from bench.scale.outcome import simulate, walls
from bench.scale.streams import Stream
from dataplane.cluster.placement import Placement
from dataplane.stream.sampler import CompleteGroups


@pytest.fixture(scope="module")
def kept() -> Costs:
    return read(KEPT)[0]


# queues


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_processor_that_is_asked_at_random_is_an_m_d_1_queue(load: float) -> None:
    # Pollaczek and Khinchine: with a constant service time of 1, the mean wait is load / (2 (1 - load)).
    random, loop, waits = np.random.default_rng(1), Loop(), []
    processor = Processors(loop, 1)

    def come() -> None:
        waits.append(processor.one(0, loop.now, 1.0) - loop.now - 1.0)

    for at in np.cumsum(random.exponential(1 / load, 20_000)).tolist():
        loop.at(at, come)
    loop.run(math.inf)
    assert np.mean(waits) == pytest.approx(load / (2 * (1 - load)), rel=0.15)


def test_events_happen_in_order_and_those_of_one_time_as_they_were_planned() -> None:
    loop, seen = Loop(), []
    for number, at in enumerate([2.0, 1.0, 1.0, 3.0, 0.5]):
        loop.at(at, lambda number=number: seen.append((loop.now, number)))  # type: ignore[misc]
    loop.run(2.5)
    assert seen == [(0.5, 4), (1.0, 1), (1.0, 2), (2.0, 0)]


def test_who_waits_for_a_signal_goes_on_when_it_comes() -> None:
    loop, signal, seen = Loop(), Signal(), []

    def waiting() -> Process:
        yield signal
        seen.append(loop.now)

    loop.start(waiting())
    loop.at(3.0, lambda: loop.raise_signal(signal))
    loop.run(10)
    assert seen == [3.0]


def test_what_comes_in_a_moment_leaves_the_time_until_then_to_others() -> None:
    processor = Processors(Loop(), 1)
    assert processor.one(0, 5.0, 1.0) == 6.0
    assert processor.one(0, 0.0, 1.0) == 2.0  # not 7: it could be done meanwhile
    assert processor.busy[0] == 2.0


def test_processes_that_share_cores_get_no_more_time_than_these_have() -> None:
    shared = Shared(Loop(), 6, cores=2)
    done = [shared.one(number, 0.0, 1.0) for number in range(6)]
    assert sorted(done) == [1, 1, 2, 2, 3, 3]
    assert shared.one(0, 0.0, 1.0) == 4.0


def test_a_process_does_one_thing_at_a_time_however_many_cores_there_are() -> None:
    shared = Shared(Loop(), 2, cores=8)
    assert shared.many(np.array([0, 1]), 0.0, 1.0).tolist() == [1.0, 1.0]
    assert shared.one(0, 0.0, 1.0) == 2.0


def test_a_link_takes_as_long_as_its_bytes_whoever_sends() -> None:
    links = Links(Loop(), 3, bytes_s=100.0, latency_s=0.5)
    assert links.bring(0, 2, 0.0, 100.0) == pytest.approx(1.5)
    assert links.bring(1, 2, 0.0, 100.0) == pytest.approx(2.5)  # both come over one link
    assert links.bring(1, 0, 0.0, 100.0) == pytest.approx(2.5)


# homes


def rows(*groups: int) -> Rows:
    return Rows(np.array(groups), np.zeros(len(groups), int), np.zeros(len(groups), int))


def test_homes_give_what_the_librarys_sampler_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, choose = [], CompleteGroups.choose

    def counted(self: CompleteGroups, candidates: Any, want: int) -> Any:
        asked.append((len(candidates), want))
        return choose(self, candidates, want)

    monkeypatch.setattr(CompleteGroups, "choose", counted)
    homes = Homes(2, group=2)
    homes.bring(1, rows(7, 7, 8, 8, 9, 9))
    given = homes.give(1, 5, 2)
    assert given is not None
    assert given.group.tolist() == [7, 7, 8, 8]  # whole groups
    assert asked == [(6, 5)]
    assert homes.give(0, 5, 2) is None
    homes.take_back(1, given)
    assert homes.ready.tolist() == [0, 6]


def test_rows_come_to_the_homes_that_placement_says(kept: Costs) -> None:
    stream = Stream(Job(16), kept)
    assert isinstance(stream.cluster.placement, Placement)
    shares = stream._shares(3, 0)
    assert sum(map(len, shares.values())) == 512
    for home, brought in shares.items():
        groups = np.unique(brought.group).tolist()
        assert set(stream.cluster.placement.homes("rollouts", groups).tolist()) == {home}


# all of it


@pytest.mark.parametrize("least", [8, 512])
@pytest.mark.parametrize("hosts", [1, 3, 8])
def test_every_row_is_given_and_acked_once(hosts: int, least: int, kept: Costs) -> None:
    job = Job(hosts, appends=6, ahead=99, least=least, row_bytes=1e4, limited=True)
    stream = Stream(job, kept)
    stream.loop.run(20.0)
    assert stream.over
    assert stream.homes.acked == stream.homes.came == hosts * 6 * 512
    assert sum(count for _, _, count in stream.delivered) == hosts * 6 * 512
    assert not stream.homes.ready.any()


def test_what_nodes_spend_is_all_counted_by_kind(kept: Costs) -> None:
    stream = Stream(Job(4, rows_s=1000), kept)
    stream.loop.run(1.0)
    greeted = stream.cluster.processors.busy[:4].sum() - sum(
        each.sum() for kind, each in stream.cluster.spent.items() if kind != "greet"
    )
    assert stream.cluster.spent["greet"].sum() == pytest.approx(greeted)


def test_the_same_seed_gives_the_same_and_another_does_not(kept: Costs) -> None:
    job = Job(8, rows_s=1000, seconds=1.5)
    assert simulate(job, kept).as_json() == simulate(job, kept).as_json()
    assert simulate(job, kept).as_json() != simulate(replace(job, seed=2), kept).as_json()


def test_hosts_that_have_time_do_all_that_comes(kept: Costs) -> None:
    found = simulate(Job(8, rows_s=500, seconds=9, warm_s=3), kept)
    assert found.rows_s == pytest.approx(8 * 500, rel=0.12)
    assert found.node_busiest < 0.9


def test_greetings_grow_with_the_square_of_the_hosts(kept: Costs) -> None:
    few, many = (simulate(Job(hosts, rows_s=1.0, seconds=2.5), kept) for hosts in (64, 256))
    assert few.messages_s["greet"] == pytest.approx(64 * 63, rel=0.1)
    assert many.messages_s["greet"] / few.messages_s["greet"] == pytest.approx(256 * 255 / (64 * 63), rel=0.1)
    assert many.by_kind["greet"] > 4 * few.by_kind["greet"]  # each costs more, too


def test_a_home_that_all_append_to_is_busier_than_the_others(kept: Costs) -> None:
    even, hot = (simulate(Job(8, rows_s=2000, hot=hot), kept) for hot in (0.0, 0.5))
    assert hot.node_busiest / hot.node > even.node_busiest / even.node


def test_payload_is_what_fills_a_slow_link(kept: Costs) -> None:
    found = simulate(Job(4, rows_s=200, row_bytes=1e6, link_bytes_s=1.2e8, seconds=6, warm_s=3), kept)
    assert found.first == "a link"
    assert found.link > 0.9


def test_numbers_in_the_code_that_many_hosts_are_beyond_are_named() -> None:
    assert walls(64) == []
    assert [wall.split()[0] for wall in walls(1024)] == ["4096"]
    assert [wall.split()[0] for wall in walls(8192)] == ["8192", "4096"]


def test_the_reports_picture_has_every_job_and_a_controller(kept: Costs) -> None:
    name = "groups, 1,000 rows/s a host"
    found = sweep.run([name], [2, 4], kept, seed=1)
    points = sweep.scaling(found)["series"]
    assert [hosts for hosts, _ in points[name]] == [2, 4]
    assert points[name][1][1] > points[name][0][1] > 0
    assert {rows_s for _, rows_s in points["one controller, metadata alone, at most"]} == {
        found[name][0].controller_rows_s
    }


# the controller


def test_a_controller_gives_at_most_what_its_processor_does(kept: Costs) -> None:
    controller = Controller(Job(32), kept)
    controller.loop.run(2.0)
    assert controller.homes.acked / 2.0 == pytest.approx(controller.capacity_rows_s(), rel=0.15)


def test_a_controller_that_payload_passes_is_as_slow_as_its_link(kept: Costs) -> None:
    controller = Controller(Job(8, row_bytes=1e6, link_bytes_s=1e9), kept, payload=True)
    controller.loop.run(4.0)
    assert controller.capacity_rows_s() <= 1000
    assert controller.homes.acked / 4.0 < 1.1 * controller.capacity_rows_s()


# costs


def test_costs_are_read_as_they_were_written(kept: Costs, tmp_path: Path) -> None:
    costs_module.write(tmp_path / "costs.json", kept, {"cores": 2}, {})
    assert read(tmp_path / "costs.json") == (kept, {"cores": 2})


def test_the_kept_costs_say_what_they_are_of() -> None:
    assert {"cpu", "cores", "commit"} <= set(read(KEPT)[1])


@pytest.mark.parametrize("wrong", [None, -1.0, "much"])
def test_costs_that_are_none_are_refused(wrong: Any) -> None:
    content = json.loads(KEPT.read_text())["costs"] | {"ask_watch": wrong}
    with pytest.raises(ValueError, match="--calibrate"):
        of_json(content)


def test_a_line_goes_through_what_was_measured_and_costs_nothing_below_0() -> None:
    assert Line.through((16, 100.0), (512, 596.0)) == Line(84.0, 1.0)
    assert Line.through((16, 100.0), (512, 50.0)) == Line(100.0, 0.0)
    assert Line(84.0, 1.0)(16) == pytest.approx(100e-6)


def test_jobs_differ_in_hosts_and_time_alone() -> None:
    first, second = sweep.jobs(next(iter(sweep.JOBS)), (8, 4096), seed=3)
    assert replace(second, hosts=8, seconds=first.seconds, warm_s=first.warm_s) == first

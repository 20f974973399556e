"""Admission, delivery and the end of rows of a stream of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.errors import Closed, LeaseExpired, Misuse, NotReady
from dataplane.stream import leased_rows
from dataplane.stream import requests as r
from dataplane.stream.lease import Who
from dataplane.stream.progress import DEAD, LEASED, REDELIVERED
from dataplane.stream.rows import MAX_COLUMNS
from dataplane.stream.sampler import Candidates, CompleteGroups, Fifo, Freshest, TokenBalanced
from dataplane.stream.settings import MAX_TASKS, StreamSettings
from dataplane.stream.statistics import figures
from tests.cases import each_case
from tests.unit.stream import example_streams
from tests.unit.stream.example_streams import INTS, Asked


class Stream(example_streams.Stream):
    def __init__(self, *tasks: str, **limits: int) -> None:
        super().__init__(StreamSettings(tasks or ("actor",), **limits))

    def take(self, chosen: Sequence[int], expired: Sequence[int] = (), **asked: Any) -> Asked:
        """The grant of rows that the caller has chosen."""
        rows = {"chosen": np.array(chosen, np.int64), "expired": np.array(expired, np.int64)}
        try:
            found = self.run(self.demand(**asked, **rows))
        except NotReady:
            return Asked()
        return Asked([self.leased.leases.live(found.grant)])


class TestAdmission:
    @each_case("limit", [{"max_rows": 3}, {"max_bytes": 24}])
    def test_producers_that_wait_for_room_are_admitted_in_order(self, limit: dict[str, int]) -> None:
        stream = Stream(**limit)
        stream.append(1)
        stream.append(1)
        large, small = stream.ask(2), stream.ask(1)
        assert (large.got, small.got, stream.figures()["waiting"]) == ([], [], 2), "one would fit, and came later"
        stream.ack(stream.consume(1).grant)
        assert (len(large.got), small.got) == (1, [])
        stream.give_back(large)
        assert len(small.got) == 1
        assert stream.come(small, 1) == (2, True)
        assert stream.figures()["bytes"] == 16
        assert stream.released == [1]

    def test_a_producer_beyond_the_lag_limit_waits_for_the_slowest_task(self) -> None:
        stream = Stream("reward", "actor", max_lag=1)
        stream.append(1, version=5)
        ahead, near = stream.ask(1, version=7), stream.ask(1, version=6)
        assert (ahead.got, len(near.got)) == ([], 1), "later ones that are not ahead pass"
        stream.give_back(near)
        stream.ack(stream.consume(task="reward").grant)
        assert (ahead.got, stream.figures()["behind"], stream.figures()["latest_version"]) == ([], ["actor"], 5)
        stream.ack(stream.consume(task="actor").grant)
        assert len(ahead.got) == 1

    def test_a_task_whose_consumers_wait_for_columns_is_not_what_holds_up_appends(self) -> None:
        stream = Stream("reward", "actor", max_rows=3)
        for _ in range(3):
            stream.append(1)
        stream.consume(task="reward")
        waiting = [(1, ("score",)), (None, ())]
        assert figures(stream.leased, 0.0, waiting)["behind"] == ["reward"]
        assert figures(stream.leased, 0.0, [(None, ())])["behind"] == ["reward", "actor"]
        assert figures(stream.leased, 0.0, [(0, ()), (1, ("score",))])["behind"] == ["reward"]
        stream.leased.asked[1] = ("score",)
        assert figures(stream.leased, 0.0, [(None, ())])["behind"] == ["reward"], "rows without the column do not count"


class TestKeys:
    def test_requested_columns_do_not_count_against_the_column_limit(self) -> None:
        stream = Stream()
        for i in range(2 * MAX_COLUMNS):
            stream.withdraw(stream.consume(columns=[f"mistyped {i}"]))
        assert stream.append(1, columns=[f"c{i}" for i in range(MAX_COLUMNS)]) == (0, True)

    def test_a_repeated_append_with_some_rows_done_is_refused_as_done_before(self) -> None:
        stream = Stream()
        stream.append(2, keys=["a", "b"])
        stream.ack(stream.consume(rows=1).grant)
        with pytest.raises(Misuse, match="of which some rows are done"):
            stream.append(2, keys=["a", "b"])


class TestDelivery:
    @each_case("rows", [1, 3])
    def test_a_lease_holds_memory_for_its_own_rows_only(self, rows: int) -> None:
        stream = Stream()
        stream.append(1000)
        held = stream.consume(rows=rows).grant.rows
        owner = held if held.base is None else held.base
        assert (len(held), owner.nbytes) == (rows, 8 * rows)

    @each_case("how", ["nack", "time", "leave"])
    @each_case("then", ["nobody", "held", "extended", "acked", "done by all", "dropped"])
    def test_a_consumer_whose_lease_ended_cannot_extend_its_rows(self, how: str, then: str) -> None:
        stream = Stream("reward", "actor")
        stream.append(2)
        slow = stream.consume(task="reward")
        match how:
            case "nack":
                stream.nack(slow.grant)
            case "time":
                stream.settle(10.0)
            case "leave":
                stream.run(r.EndClient(client="c", ended=True))
        if then != "nobody":
            other = stream.consume(task="reward", who=Who("d"))
        if then in ("extended", "acked", "done by all"):
            stream.extend([0, 1], "r", by=other.grant)
        if then in ("acked", "done by all"):
            stream.ack(other.grant, "d")
        if then == "done by all":
            stream.ack(stream.consume(task="actor", columns=["x", "r"]).grant)
            assert stream.leased.partition.rows.count == 0
        if then == "dropped":
            stream.ack(other.grant, "d")
            stream.drop(0, 1)
        for column in ("r", "other"):
            for replace in (False, True):
                with pytest.raises(LeaseExpired):
                    stream.extend([1, 0], column, by=slow.grant, replace=replace)

    def test_extending_unknown_rows_is_misuse_and_not_lease_expired(self) -> None:
        stream = Stream()
        stream.append(2)
        done = stream.consume()
        stream.ack(done.grant)
        for rows, by in (([7], done.grant), ([-1], done.grant), ([0], None)):
            with pytest.raises(Misuse, match="is not in the stream"):
                stream.extend(rows, "r", by=by)
        with pytest.raises(Misuse, match="number 1 of those named"):
            stream.extend([0, 7], "r", by=done.grant)
        with pytest.raises(LeaseExpired):
            stream.extend([0, 1], "r", by=done.grant)

    def test_a_consumer_may_extend_rows_after_acking_them(self) -> None:
        stream = Stream("reward", "actor")
        stream.append(2)
        first = stream.consume(task="reward")
        stream.ack(first.grant)
        stream.extend([0, 1], "r", by=first.grant)
        assert stream.consume(task="actor", columns=["r"]).rows == [0, 1]
        with pytest.raises(Misuse, match="has a column"):
            stream.extend([0, 1], "r", by=first.grant)

    def test_an_unseen_delivery_does_not_count_as_a_delivery(self) -> None:
        stream = Stream(max_deliveries=1)
        stream.append(1)
        counts = stream.leased.partition.progress.counts[0]
        for _ in range(3):
            stream.nack(stream.consume().grant, seen=False)
            assert (counts[LEASED], counts[REDELIVERED]) == (0, 0)
        stream.nack(stream.consume().grant)
        assert stream.leased.partition.progress.in_state(0, DEAD).tolist() == [0]
        assert (counts[LEASED], counts[REDELIVERED]) == (1, 0)

    def test_rows_chosen_by_one_replica_are_delivered_to_waiting_replicas(self) -> None:
        stream = Stream()
        stream.append(4)
        waiting = stream.consume(sampler=Bad([]), who=Who("d", "m", 1, 3))
        first = stream.take([3, 1], rows=2, who=Who("c", "m", 0, 3))
        assert first.rows == waiting.rows == [3, 1]
        later = stream.take([0], who=Who("e", "m", 2, 3))
        assert later.grant is first.grant, "whatever it would have chosen"


class Bad:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def choose(self, candidates: Candidates, want: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class TestSamplers:
    def test_waiting_consumers_are_closed_when_a_sampler_expires_the_last_rows(self) -> None:
        stream = Stream()
        stream.append(1, version=0)
        stream.append(1, version=5)
        stream.ack(stream.consume(sampler=Freshest(9), rows=1).grant)
        waiting = stream.consume(columns=["y"])
        stream.run(r.Close())
        last = stream.consume(sampler=Freshest(1))
        assert [type(error) for error in (*waiting.errors, *last.errors)] == [Closed, Closed]

    def test_a_closed_stream_delivers_fewer_rows_than_the_minimum(self) -> None:
        stream = Stream()
        stream.append(3)
        assert stream.take([0, 1, 2], least=4).got == []
        stream.run(r.Close())
        assert stream.take([0, 1], least=4).got == [], "three are left"
        assert stream.take([2, 0, 1], least=4).rows == [2, 0, 1]

    def test_rows_that_expire_together_are_settled_and_removed_in_commands_of_bounded_size(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(leased_rows, "_COMMAND_ROWS", 4)
        for expired in (True, False):
            stream = Stream()
            stream.append(10)
            rows = stream.leased
            if expired:
                rows.expire(0, np.arange(10))
            else:
                rows.partition.drop_rows(np.arange(10))
            assert [len(command.rows) for command in rows.tick(0.0)] == [4, 4, 2]

    @each_case("built_in", [True, False])
    def test_a_sampler_that_needs_lengths_of_a_dense_column_is_refused(self, built_in: bool) -> None:
        class Measures(Bad):
            needs = ("x",)

        stream = Stream()
        waiting = stream.consume(sampler=TokenBalanced("x", 2) if built_in else Measures([0]))
        assert not waiting.errors, "no column has come yet"
        stream.append(1)
        (error,) = waiting.errors
        assert isinstance(error, Misuse)
        assert "a dense column has none" in str(error)
        assert stream.consume().rows == [0]

    def test_a_group_within_a_balanced_delivery_expires_by_age(self) -> None:
        stream = Stream()
        stream.append(1, groups=["g"], field=INTS)
        waiting = stream.consume(sampler=TokenBalanced("x", 2, within=CompleteGroups(2, timeout=1.0)))
        stream.settle(1.0)
        assert stream.figures()["task"]["actor"]["expired"] == 0
        stream.settle(1.1)
        assert stream.figures()["task"]["actor"]["expired"] == 1
        assert not waiting.got


class TestGroups:
    def test_groups_that_are_not_complete_are_named(self) -> None:
        stream = Stream("actor", "reward")
        for now, rows, groups in ((1.0, 3, ["a", "a", "whole"]), (3.0, 2, [7, "whole"]), (4.0, 1, None)):
            stream.now = now
            stream.append(rows, groups=groups)
        stream.drop(0)
        stream.now = 5.0
        assert stream.figures()["task"]["actor"]["incomplete"] == [], "nobody has asked for groups"
        stream.consume(columns=["y"], sampler=CompleteGroups(2))
        named = [of["group"] for of in stream.figures()["task"]["actor"]["incomplete"]]
        assert named == [7, None], "a group that lacks what was dropped is complete"
        assert stream.consume(2, sampler=CompleteGroups(2)).rows == [1], "one of two, the other was dropped"
        stream.consume(3, sampler=CompleteGroups(3))
        assert stream.figures()["task"]["actor"]["incomplete"] == [
            {"group": "whole", "rows": 2, "dropped": 0, "of": 3, "age_s": 4.0},
            {"group": 7, "rows": 1, "dropped": 0, "of": 3, "age_s": 2.0},
            {"group": None, "rows": 1, "dropped": 0, "of": 3, "age_s": 1.0},
        ]
        assert stream.figures()["task"]["reward"]["incomplete"] == []


class TestExtending:
    @each_case("task", ["t0", "t63"])
    def test_a_column_extended_without_a_delivery_cannot_be_extended_again(self, task: str) -> None:
        stream = Stream(*(f"t{i}" for i in range(MAX_TASKS)))
        stream.append(1)
        stream.extend([0], "y")
        with pytest.raises(Misuse, match="already"):
            stream.extend([0], "y", by=stream.consume(task=task).grant)


class TestTheEnd:
    def test_a_dropped_stream_frees_its_rows_and_refuses_further_calls(self) -> None:
        stream = Stream(max_rows=3)
        stream.append(2, keys=["a", "b"], groups=["g", "g"])
        held, waiting, entering = stream.consume(1), stream.consume(2, least=2), stream.ask(2)
        stream.alone.end()
        assert stream.released == [1]
        assert [type(error) for error in (*waiting.errors, *entering.errors)] == [Closed, Closed]
        with pytest.raises(LeaseExpired):
            stream.nack(held.grant)
        assert [type(error) for error in stream.consume().errors] == [Closed]
        figures = stream.figures()
        assert (figures["rows"], figures["bytes"], figures["groups"], figures["behind"]) == (0, 0, 0, [])
        assert stream.leased.leases.next_end() is None


def test_rows_fetched_ahead_whose_lease_expires_go_to_a_waiting_consumer() -> None:
    stream = Stream()
    stream.append(4, groups=["a", "a", "b", "b"])

    def fetch() -> Any:
        return stream._wait(msgspec.structs.replace(stream.demand(2, sampler=Fifo()), loop=1), "loop")

    current, ahead = fetch(), fetch()
    waiting = stream.consume(2, sampler=CompleteGroups(2))
    stream.append(1, groups=["c"])  # for which it is tried in vain
    stream.now = 5.0
    stream.run(r.Renew(client="c", grant=current.grant.number))
    assert not waiting.got
    stream.settle(10.0)
    assert waiting.rows == ahead.rows == [2, 3]

"""Admission, delivery and the end of rows at the home of a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.errors import Closed, LeaseExpired, LimitExceeded, Misuse, SchemaMismatch
from dataplane.stream.admission import Entry
from dataplane.stream.facts import Arrival
from dataplane.stream.figures import figures
from dataplane.stream.home import Demand, Home
from dataplane.stream.lease import Grant, Who
from dataplane.stream.progress import DEAD
from dataplane.stream.rows import Patch
from dataplane.stream.sampler import Candidates, Choice, CompleteGroups, Fifo, Freshest
from dataplane.stream.settings import Settings

INT = Field("dense", "int64", ())


def stored(shard: int, rows: int, *columns: str, field: Field = INT) -> BatchRef:
    return BatchRef.of(b"the-node", rows, [(name, field, 8 * rows, shard, i) for i, name in enumerate(columns)])


@dataclass(eq=False)
class Asked:
    """What became of a demand or an entry."""

    got: list[Any] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    request: Any = None

    @property
    def grant(self) -> Grant:
        (grant,) = self.got
        return grant

    @property
    def rows(self) -> list[int]:
        return self.grant.rows.tolist() if self.got else []


class Stream:
    """A home with fewer words. Each append is a shard of its own, counted from 1."""

    def __init__(self, *tasks: str, **limits: int) -> None:
        self.released: list[int] = []
        self.told = 0
        self.home = Home(Settings(tasks or ("actor",), **limits), self._released, self._changed)
        self.shards = 0

    def _released(self, patches: list[Patch]) -> None:
        self.released += [patch.ref.shards()[0][1] for patch in patches]

    def _changed(self) -> None:
        self.told += 1

    def ask(self, rows: int, version: int = 0, client: str = "p", nbytes: int | None = None) -> Asked:
        asked = Asked()
        size = 8 * rows if nbytes is None else nbytes
        asked.request = Entry(client, rows, size, version, asked.got.append, asked.errors.append)
        self.home.admit(asked.request)
        return asked

    def come(
        self,
        asked: Asked,
        rows: int,
        *,
        keys: Sequence[str] = (),
        groups: Sequence[Any] | None = None,
        version: int = 0,
        columns: Sequence[str] = ("x",),
        tags: dict[str, list[Any]] | None = None,
        now: float = 0.0,
    ) -> tuple[int, bool]:
        self.shards += 1
        arrival = Arrival(groups, np.full(rows, version, np.int64), tags or {}, {})
        return self.home.append(asked.got[0], stored(self.shards, rows, *columns), keys, b"", arrival, now)

    def append(self, rows: int, **said: Any) -> tuple[int, bool]:
        return self.come(self.ask(rows, said.get("version", 0)), rows, **said)

    def consume(
        self,
        rows: int = 100,
        task: str = "actor",
        *,
        least: int = 1,
        columns: Sequence[str] = ("x",),
        sampler: Any = None,
        who: Who | None = None,
        now: float = 0.0,
    ) -> Asked:
        asked, home = Asked(), self.home
        asked.request = Demand(
            task=home.settings.task(task),
            rows=rows,
            min_rows=least,
            columns=tuple(columns),
            sampler=sampler or Fifo(),
            who=who or Who("c"),
            lease_s=10.0,
            serve=asked.got.append,
            fail=asked.errors.append,
        )
        home.consume(asked.request, now)
        return asked

    def ack(self, asked: Asked, client: str = "c", replica: int | None = None, now: float = 0.0) -> None:
        self.home.ack(asked.grant.number, client, replica, now)

    def nack(self, asked: Asked, client: str = "c", now: float = 0.0) -> None:
        self.home.nack(asked.grant.number, client, None, now)

    def figures(self, now: float = 0.0) -> dict[str, Any]:
        return figures(self.home, now)


class TestAdmission:
    def test_what_can_never_fit_is_refused_at_once(self) -> None:
        stream = Stream(max_rows=4, max_bytes=64)
        with pytest.raises(LimitExceeded, match="rows"):
            stream.ask(5, nbytes=1)
        with pytest.raises(LimitExceeded, match="bytes"):
            stream.ask(1, nbytes=65)
        assert stream.figures()["waiting"] == 0

    @pytest.mark.parametrize("limits", [{"max_rows": 4}, {"max_bytes": 32}])
    def test_who_waits_is_let_in_in_turn_when_rows_are_gone(self, limits: dict[str, int]) -> None:
        stream = Stream(**limits)
        stream.append(4)
        large, small = stream.ask(3), stream.ask(1)
        taken = stream.consume(2)
        stream.ack(taken)
        assert (large.got, small.got) == ([], []), "a patch of four rows stays until its last row; the small one waits"
        stream.ack(stream.consume(2))
        assert large.got
        assert small.got

    def test_others_are_not_let_in_on_the_bytes_of_an_append_that_comes(self) -> None:
        stream = Stream(max_bytes=32)
        first, second = stream.ask(4), stream.ask(4)
        stream.come(first, 4)
        assert second.got == []
        assert stream.figures()["bytes"] == 32

    def test_versions_ahead_wait_for_the_slowest_task_and_for_what_was_admitted(self) -> None:
        stream = Stream("reward", "actor", max_lag=1)
        ticket = stream.ask(1, version=0)
        ahead = stream.ask(1, version=2)
        assert ahead.got == []
        stream.come(ticket, 1, version=0)
        stream.ack(stream.consume(task="reward"))
        assert ahead.got == []
        stream.ack(stream.consume(task="actor"))
        assert ahead.got

    def test_more_rows_than_were_admitted_are_refused_and_the_ticket_is_given_back(self) -> None:
        stream = Stream(max_rows=4)
        for rows in (0, 3):
            asked = stream.ask(2)
            with pytest.raises(Misuse, match="were admitted"):
                stream.home.append(
                    asked.got[0],
                    stored(1, 3, "x")[:rows],
                    [],
                    b"",
                    Arrival(None, np.zeros(rows, np.int64), {}, {}),
                    0.0,
                )
        assert stream.ask(4).got
        assert stream.released == []

    def test_tickets_come_back_with_what_fails_who_leaves_and_who_says_so(self) -> None:
        stream = Stream(max_rows=2)
        stream.append(1, keys=["a"])
        with pytest.raises(Misuse, match="begin with"):
            stream.append(1, keys=["~a"])
        asked = stream.ask(1)
        with pytest.raises(SchemaMismatch):
            arrival = Arrival(None, np.zeros(1, np.int64), {}, {})
            ref = stored(9, 1, "x", field=Field("dense", "float32", ()))
            stream.home.append(asked.got[0], ref, [], b"", arrival, 0.0)
        asked = stream.ask(1, client="gone")
        waiting = stream.ask(1)
        assert not waiting.got
        stream.home.leave("gone", 0.0)
        with pytest.raises(Misuse, match="not admitted"):
            stream.come(asked, 1)
        stream.home.admission.give_back(waiting.got[0])
        stream.home.admission.give_back(waiting.got[0])
        assert stream.ask(1).got

    def test_who_waits_no_longer_is_told_why_he_did_and_lets_others_pass(self) -> None:
        stream = Stream("reward", "actor", max_rows=4)
        stream.append(3)
        stream.ack(stream.consume(1, "reward"))
        large, small = stream.ask(2), stream.ask(1)
        assert stream.home.withdraw(small.request) == "others before it; it waits for actor"
        small = stream.ask(1)
        assert stream.home.withdraw(large.request) == "max_rows; it waits for actor"
        assert small.got
        stream.ack(stream.consume(3, "actor"))
        assert stream.home.behind() == ["reward"]


class TestKeys:
    def test_the_very_same_append_is_there_once(self) -> None:
        stream = Stream()
        assert stream.append(2, keys=["a", "b"]) == (0, True)
        assert stream.append(2, keys=["a", "b"]) == (0, False)
        assert stream.figures()["appended"] == 2
        stream.ack(stream.consume())
        assert stream.released == [1]


class TestDelivery:
    def test_rows_are_delivered_when_they_become_ready_to_who_waited_first(self) -> None:
        stream = Stream()
        first, second = stream.consume(1, columns=["x", "y"]), stream.consume(1, columns=["x", "y"])
        stream.append(2)
        assert not first.got
        stream.home.extend(np.array([1]), stored(8, 1, "y"), {}, 0.0)
        assert (first.rows, second.rows) == ([1], [])
        stream.home.extend(np.array([0]), stored(9, 1, "y"), {}, 0.0)
        assert second.rows == [0]

    def test_fewer_than_the_least_wait(self) -> None:
        stream = Stream()
        asked = stream.consume(4, least=2)
        stream.append(1)
        assert not asked.got
        stream.append(1)
        assert asked.rows == [0, 1]

    def test_each_task_gets_each_row_and_then_it_goes(self) -> None:
        stream = Stream("reward", "actor")
        stream.append(3)
        stream.ack(stream.consume(task="actor"))
        assert stream.released == []
        reward = stream.consume(task="reward")
        assert reward.rows == [0, 1, 2]
        stream.ack(reward)
        assert stream.released == [1]
        assert (stream.figures()["rows"], stream.figures()["bytes"]) == (0, 0)

    def test_what_is_given_back_or_runs_out_is_delivered_again_and_the_late_ack_refused(self) -> None:
        stream = Stream()
        stream.append(2)
        first = stream.consume(1)
        stream.nack(first)
        second = stream.consume(1)
        third = stream.consume(2, least=2, who=Who("d"))
        assert (second.rows, third.rows) == ([0], [])
        stream.home.tick(10.0)
        assert third.rows == [0, 1]
        for late in (first, second):
            with pytest.raises(LeaseExpired):
                stream.ack(late)

    def test_rows_given_back_too_often_are_dead_until_they_are_dropped(self) -> None:
        stream = Stream(max_deliveries=2)
        stream.append(2)
        stream.nack(stream.consume(1))
        stream.nack(stream.consume(1))
        assert stream.home.progress.in_state(0, DEAD).tolist() == [0]
        assert stream.consume().rows == [1]
        assert stream.figures()["task"]["actor"]["dead"] == 1
        stream.home.drop_rows(np.array([0]), 0.0)
        assert stream.home.progress.in_state(0, DEAD).tolist() == []

    def test_what_nobody_has_seen_was_no_delivery(self) -> None:
        stream = Stream(max_deliveries=1)
        stream.append(1)
        for _ in range(3):
            stream.home.nack(stream.consume().grant.number, "c", None, 0.0, seen=False)
        stream.nack(stream.consume())
        assert stream.home.progress.in_state(0, DEAD).tolist() == [0]

    def test_replicas_see_the_same_rows_and_one_that_restarts_sees_them_again(self) -> None:
        stream = Stream()
        stream.append(4)
        zero = stream.consume(2, who=Who("c", "m", 0, 2))
        one = stream.consume(2, who=Who("d", "m", 1, 2))
        assert one.grant is zero.grant
        other = stream.consume(1, who=Who("e", "n", 0, 1))
        assert other.rows == [2]
        stream.ack(zero, "c", 0)
        stream.home.leave("d", 0.0)
        again = stream.consume(2, who=Who("d2", "m", 1, 2))
        assert again.rows == [0, 1]
        with pytest.raises(LeaseExpired):
            stream.ack(one, "d", 1)
        stream.ack(again, "d2", 1)
        assert stream.figures()["task"]["actor"]["acked"] == 2

    def test_rows_that_an_announced_replica_never_took_are_delivered_again(self) -> None:
        stream = Stream()
        stream.append(1)
        stream.ack(stream.consume(who=Who("c", "m", 0, 2)), "c", 0)
        stream.home.tick(10.0)
        assert stream.consume(who=Who("c", "m", 0, 2)).rows == [0]

    def test_who_leaves_gives_back_what_he_held_and_gets_nothing(self) -> None:
        stream = Stream()
        stream.append(1)
        stream.consume()
        gone, stays = stream.consume(), stream.consume(who=Who("d"))
        stream.home.leave("c", 0.0)
        assert (gone.got, gone.errors, stays.rows) == ([], [], [0])

    def test_still_ready_names_each_row_once(self) -> None:
        stream = Stream()
        stream.append(3)
        stream.consume(1)
        stream.consume(1, columns=["y"])
        assert stream.home.progress.still_ready(0, ("x",), np.array([2, 1, 2, 0, 99, -1])).tolist() == [2, 1]


class Bad:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def choose(self, candidates: Candidates, want: int) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class TestSamplers:
    @pytest.mark.parametrize("answer", [ValueError("mine"), [2], [-1], [0, 0], [0, 1, 0], "x", None])
    def test_one_that_fails_is_the_end_of_its_demand_alone(self, answer: Any) -> None:
        stream = Stream()
        bad, good = stream.consume(2, sampler=Bad(answer)), stream.consume(2)
        assert stream.append(2) == (0, True)
        assert len(bad.errors) == 1
        assert good.rows == [0, 1]

    def test_stale_rows_expire_and_make_room(self) -> None:
        stream = Stream()
        stream.append(1, version=0)
        stream.append(1, version=5)
        assert stream.consume(sampler=Freshest(1)).rows == [1]
        assert stream.released == [1]
        assert stream.figures()["task"]["actor"]["expired"] == 1

    def test_who_waits_behind_one_whose_sampler_let_the_last_rows_expire_is_told_that_all_is_done(self) -> None:
        stream = Stream()
        stream.append(1, version=0)
        stream.append(1, version=5)
        stream.ack(stream.consume(sampler=Freshest(9), rows=1))
        waiting = stream.consume(columns=["y"])
        stream.home.close(0.0)
        told = stream.told
        last = stream.consume(sampler=Freshest(1))
        assert [type(error) for error in (*waiting.errors, *last.errors)] == [Closed, Closed]
        assert stream.told > told


class TestGroups:
    def test_a_group_is_delivered_whole_however_its_rows_arrive(self) -> None:
        stream = Stream()
        asked = stream.consume(2, sampler=CompleteGroups(2))
        stream.append(2, groups=["g", "h"])
        assert not asked.got
        stream.append(2, groups=["h", "g"])
        assert asked.rows == [0, 3]
        assert stream.consume(2, sampler=CompleteGroups(2)).rows == [1, 2]

    def test_dropped_rows_count_towards_their_group(self) -> None:
        stream = Stream()
        stream.append(3, groups=["g"] * 3)
        asked = stream.consume(sampler=CompleteGroups(3), columns=["y"])
        stream.home.extend(np.array([0, 1]), stored(9, 2, "y"), {}, 0.0)
        assert not asked.got
        stream.home.drop_rows(np.array([2]), 0.0)
        assert asked.rows == [0, 1]

    def test_rows_dead_for_one_task_do_not_keep_their_group_from_another(self) -> None:
        stream = Stream("reward", "actor", max_deliveries=1)
        stream.append(2, groups=["g", "g"])
        stream.nack(stream.consume(1, "reward"))
        assert stream.consume(2, "reward", sampler=CompleteGroups(2)).rows == [1]
        assert stream.consume(2, "actor", sampler=CompleteGroups(2)).rows == [0, 1]

    def test_facts_of_rows(self) -> None:
        stream = Stream()
        stream.append(1, groups=["g"], tags={"domain": ["math"]}, version=3)
        stream.append(1)
        assert stream.home.told(np.array([1, 0])) == ([None, "g"], [0, 3], {"domain": [None, "math"]})


class TestDropping:
    def test_rows_that_somebody_holds_stay_until_he_is_done(self) -> None:
        stream = Stream()
        stream.append(2)
        held = stream.consume(1)
        stream.home.drop_rows(np.array([0, 1, 1]), 0.0)
        assert (stream.figures()["rows"], stream.released) == (1, [])
        stream.ack(held)
        assert (stream.figures()["rows"], stream.released) == (0, [1])

    @pytest.mark.parametrize("how", ["ack", "nack", "expiry"])
    def test_a_row_dropped_while_held_is_done_for_the_other_tasks_too(self, how: str) -> None:
        stream = Stream("reward", "actor")
        stream.append(1)
        held = stream.consume(task="reward")
        stream.home.drop_rows(np.array([0]), 0.0)
        stream.home.close(0.0)
        waiting = stream.consume(task="actor")
        if how == "expiry":
            stream.home.tick(10.0)
        else:
            getattr(stream, how)(held)
        assert stream.released == [1]
        assert [type(error) for error in waiting.errors] == [Closed]


class TestTheEnd:
    def test_after_close_consumers_drain_and_then_stop(self) -> None:
        stream = Stream(max_rows=2)
        stream.append(2)
        ticket_holder, held = stream.ask(1), stream.consume(1)
        stream.home.close(0.0)
        assert [type(error) for error in ticket_holder.errors] == [Closed]
        with pytest.raises(Closed):
            stream.ask(1)
        stream.ack(stream.consume(1))
        waiting = stream.consume()
        assert not waiting.errors
        stream.nack(held)
        assert waiting.rows == [0]
        stream.ack(waiting)
        assert [type(error) for error in stream.consume().errors] == [Closed]
        with pytest.raises(Closed):
            stream.home.check_drained(0)

    def test_at_the_end_no_more_rows_are_waited_for_than_are_left(self) -> None:
        stream = Stream()
        stream.append(1, version=0)
        stream.append(2, version=5)
        waiting = stream.consume(least=4, columns=["x", "y"])
        stream.home.extend(np.array([1, 2]), stored(9, 2, "y"), {}, 0.0)
        stream.home.close(0.0)
        assert not waiting.got, "the first row may get its column yet"
        assert stream.consume(sampler=Bad(Choice(np.empty(0, np.int64), np.array([0])))).rows == []
        assert waiting.rows == [1, 2]

    def test_what_was_admitted_before_the_close_is_refused(self) -> None:
        stream = Stream()
        asked = stream.ask(1)
        stream.home.close(0.0)
        with pytest.raises(Closed):
            stream.come(asked, 1)

    def test_drop_frees_everything_and_refuses_what_comes_after(self) -> None:
        stream = Stream(max_rows=3)
        stream.append(2, keys=["a", "b"], groups=["g", "g"])
        held, waiting, entering = stream.consume(1), stream.consume(2, least=2), stream.ask(2)
        stream.home.drop()
        assert stream.released == [1]
        assert [type(error) for error in (*waiting.errors, *entering.errors)] == [Closed, Closed]
        with pytest.raises(LeaseExpired):
            stream.nack(held)
        assert [type(error) for error in stream.consume().errors] == [Closed]
        figures = stream.figures()
        assert (figures["rows"], figures["bytes"], figures["groups"], figures["behind"]) == (0, 0, 0, [])
        assert stream.home.next_tick() is None

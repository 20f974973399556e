"""Waits in collectives, of runs that are made up: who is late, and what is the collective's own."""

from __future__ import annotations

import pytest

from dataplane.diagnosis.diagnosis import diagnosed
from dataplane.diagnosis.graph import Process, Run
from dataplane.diagnosis.text import as_text
from tests.unit.diagnosis.runs import appending, consuming, line, process, run, waited


def rank(number: int, computes_s: float, meets_s: float, tokenizes_s: float = 0.5) -> Process:
    """A process that learns: it computes, meets the others and takes rows that are there."""
    lines = [line(20, computes_s), line(21, tokenizes_s), line(30, meets_s, via="torch.distributed.all_reduce")]
    return process(number, "actor", [consuming(0.1)], lines)


def job(*ranks: Process) -> Run:
    return run(*ranks, process(9, "roll_out", [appending(0.1, 0.09)], [line(8, 9.0)]))


def test_what_the_last_rank_spends_longer_on_is_what_the_others_wait_for() -> None:
    told = diagnosed(job(rank(1, 3.0, 6.2), rank(2, 3.0, 6.2), rank(3, 9.0, 0.2)))
    first = told.causes[0]
    assert (first.kind, first.line, first.processes) == ("straggler", 20, (1003,))
    assert first.seconds * 300 == pytest.approx(2 * 6.0, rel=0.01), "of 100 steps of three ranks, two wait 6 of 6.2 s"
    assert [(link.kind, link.line) for link in first.chain] == [("collective", 30)]
    assert "takes 2.7 times as long" in first.advice
    assert "actor waits for other ranks" in as_text(told)


def test_a_rank_that_waits_for_its_rows_leads_on_to_who_makes_them() -> None:
    late = process(3, "actor", [consuming(6.0)], [line(20, 3.0), line(30, 0.2, via="torch.distributed.barrier")])
    late.waits.append(waited(1, "rows", 5.9, 9))
    told = diagnosed(job(rank(1, 3.0, 6.2), rank(2, 3.0, 6.2), late))
    first = told.causes[0]
    assert (first.kind, first.role, first.line) == ("code", "roll_out", 8)
    assert {link.kind for link in first.chain} <= {"collective", "rows"}


def test_a_rank_alone_waits_for_bytes() -> None:
    assert diagnosed(job(rank(1, 5.0, 4.0))).causes[0].kind == "collective"


def test_time_in_a_collective_is_not_told_as_work() -> None:
    (actor,) = (role for role in diagnosed(job(rank(1, 3.0, 6.0), rank(2, 3.0, 6.0))).roles if role.name == "actor")
    assert actor.busy == pytest.approx(0.35, rel=0.05)
    assert actor.waiting["collective"] == pytest.approx(0.6, rel=0.05)
